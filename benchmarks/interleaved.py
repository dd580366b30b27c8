"""Comparable times: actions are interleaved, so that other load on the machine affects all of them.

Benchmarks run on a GPU where there is one: `DEVICE`. The limits that they print are those of a CPU with two cores.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from operator import truediv

import torch

ROUNDS, WARMUP = 25, 3

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def machine() -> str:
    """Return what the times of a run depend on: the GPU, or the threads."""
    return torch.cuda.get_device_name(DEVICE) if DEVICE.type == "cuda" else f"{torch.get_num_threads()} threads"


def finish() -> None:
    """Wait for the device: a GPU runs behind the program that starts its kernels."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def peak_on_gpu(action: Callable[[], object]) -> int:
    """Return the peak memory of the GPU in an action, in bytes."""
    finish()
    torch.cuda.reset_peak_memory_stats()
    action()
    finish()
    return torch.cuda.max_memory_allocated()


def interleaved(actions: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """Return the median time of each action in seconds, after a few warm-up rounds."""
    return {name: statistics.median(taken) for name, taken in _rounds(actions, rounds).items()}


def ratios(
    actions: dict[str, Callable[[], object]], base: str, rounds: int = ROUNDS, settled: bool = False
) -> dict[str, float]:
    """Return for each action the median over the rounds of its time relative to the base in the same round.

    It resolves a few percent even if the speed of the machine varies.

    Args:
        actions: by name.
        base: the name of one of them.
        rounds: how often each is timed.
        settled: whether each action is done twice and timed the second time, after itself: steps of one model that
            leave other weights behind would be timed on the weights of one another else.
    """
    times = _rounds(actions, rounds, settled)
    return {name: statistics.median(map(truediv, taken, times[base])) for name, taken in times.items()}


def _rounds(actions: dict[str, Callable[[], object]], rounds: int, settled: bool = False) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in actions}
    names = list(actions)
    for i in range(WARMUP + rounds):
        for name in _turn(names, i):
            action = actions[name]
            if settled:
                action()
            finish()
            start = time.perf_counter()
            action()
            finish()
            times[name].append(time.perf_counter() - start)
    return {name: taken[WARMUP:] for name, taken in times.items()}


def _turn(names: list[str], i: int) -> list[str]:
    """Return the order of a round: each action is first in turn, and of three or more each follows each other one.

    Else the action after the one that needs most memory would always find the cache without its data. Two actions
    are in turn first and last, so that each follows itself in every other round.
    """
    first = i % len(names)
    turned = names[first:] + names[:first]
    return turned[::-1] if len(names) > 2 and i // len(names) % 2 else turned
