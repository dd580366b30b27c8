"""Times that can be compared: the actions take turns, so that what else the machine does falls on all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

ROUNDS, WARMUP = 25, 3


def interleaved(actions: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """The median time of each action in seconds, one of each per round, after a few rounds that don't count."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(WARMUP + rounds):
        for name, action in actions.items():
            start = time.perf_counter()
            action()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken[WARMUP:]) for name, taken in times.items()}
