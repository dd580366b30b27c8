"""Times that can be compared: the actions take turns, so that what else the machine does falls on all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from operator import truediv

ROUNDS, WARMUP = 25, 3


def interleaved(actions: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """The median time of each action in seconds, one of each per round, after a few rounds that don't count."""
    return {name: statistics.median(taken) for name, taken in _rounds(actions, rounds).items()}


def ratios(actions: dict[str, Callable[[], object]], base: str, rounds: int = ROUNDS) -> dict[str, float]:
    """For each action the median, over the rounds, of its time over that of the base in the same round.

    It tells a few percent apart where a machine is now faster and now slower.
    """
    times = _rounds(actions, rounds)
    return {name: statistics.median(map(truediv, taken, times[base])) for name, taken in times.items()}


def _rounds(actions: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in actions}
    names = list(actions)
    for i in range(WARMUP + rounds):
        # Each begins a round in turn: what one leaves in the caches falls on all others.
        for name in names[i % len(names) :] + names[: i % len(names)]:
            action = actions[name]
            start = time.perf_counter()
            action()
            times[name].append(time.perf_counter() - start)
    return {name: taken[WARMUP:] for name, taken in times.items()}
