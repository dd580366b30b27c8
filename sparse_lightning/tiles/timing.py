"""compare: the times of two layers on the same inputs, in interleaved rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

WARMUP, FEWEST, MOST = 2, 7, 31
"""Rounds before, and the fewest and most of, the measured ones."""

LONG = 0.25
"""Seconds after which no more than the fewest rounds are measured."""


def compare(first: nn.Module, second: nn.Module, inputs: Sequence[Tensor]) -> tuple[float, float]:
    """Return the median seconds that two layers take for all of the inputs, one after the other in each round.

    Other load on the machine affects both alike.
    """
    layers = (first, second)
    taken: tuple[list[float], list[float]] = ([], [])
    begin = time.perf_counter()
    for round_ in range(WARMUP + MOST):
        if round_ >= WARMUP + FEWEST and time.perf_counter() - begin > LONG:
            break
        for which in (0, 1) if round_ % 2 else (1, 0):
            seconds = _seconds(layers[which], inputs)
            if round_ >= WARMUP:
                taken[which].append(seconds)
    return statistics.median(taken[0]), statistics.median(taken[1])


def _seconds(layer: nn.Module, inputs: Sequence[Tensor]) -> float:
    _wait(inputs)
    start = time.perf_counter()
    for tensor in inputs:
        layer(tensor)
    _wait(inputs)
    return time.perf_counter() - start


def _wait(inputs: Sequence[Tensor]) -> None:
    """Wait for the GPU: it runs behind the program that starts its kernels."""
    if inputs and inputs[0].is_cuda:
        torch.cuda.synchronize(inputs[0].device)
