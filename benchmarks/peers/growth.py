"""Question 4: how does the cost grow, and how near is it to the limit? Against weights, tensors and blocks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from functools import partial

import torch
from cost import timed
from results import Measurement
from torch import nn

from sparse_lightning import Blocks, Constant, Magnitude, Sparsifier

SPARSITY, ROUNDS = 0.75, 15
CASES = {
    "weights": [(n * 1_000_000, 16, 32) for n in (1, 2, 4, 8, 16, 32, 64, 200)],
    "tensors": [(4_000_000, n, 16) for n in (10, 40, 160, 640)],
    "blocks": [(4_000_000, 16, side) for side in (32, 16, 8, 4, 2, 1)],
}
"""Weights, tensors and the side of a block, of which one grows."""


def measurements() -> Iterator[Measurement]:
    """Three series: in each, one number grows."""
    for grows, cases in CASES.items():
        for weights, tensors, side in cases:
            case = {"grows": grows, "weights": weights, "tensors": tensors, "side": side}
            yield Measurement("growth", case, partial(measured, weights, tensors, side))


def measured(weights: int, tensors: int, side: int) -> dict[str, float]:
    """Milliseconds of a hold and of an update, and those that a copy of the weights takes in the same run."""
    size = round(math.sqrt(weights / tensors) / 32) * 32
    model = nn.ParameterList(nn.Parameter(torch.randn(size, size)) for _ in range(tensors))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sparsifier = Sparsifier([Blocks("*", (side, side))], Constant(SPARSITY), Magnitude(), update_every=1)
    sparsifier.attach(model, optimizer, total_steps=10**6)
    sparsifier.update_now()
    pruned = sum(int((weight == 0).sum()) for weight in model)
    if abs(pruned / (tensors * size * size) - SPARSITY) > tensors * side**2 / (tensors * size * size) + 1e-6:
        raise AssertionError(f"{pruned} weights are pruned")
    flat, copy = torch.randn(tensors * size * size), torch.empty(tensors * size * size)
    actions = {"hold": sparsifier.hold, "update": sparsifier.update_now, "copy": lambda: copy.copy_(flat)}
    rounds = [[1e3 * timed(action) for action in actions.values()] for _ in range(ROUNDS)]
    sparsifier.detach()
    medians = [round(statistics.median(column), 4) for column in zip(*rounds, strict=True)]
    return dict(zip(actions, medians, strict=True))


def exponent(sizes: list[float], times: list[float]) -> float:
    """The slope of a line through the logarithms: time ~ size ** exponent.

    Example:
        >>> round(exponent([1, 10, 100], [3, 30, 300]), 2)
        1.0
    """
    x, y = ([math.log(value) for value in values] for values in (sizes, times))
    return statistics.linear_regression(x, y).slope
