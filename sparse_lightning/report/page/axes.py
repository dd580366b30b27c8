"""Axes of charts: round numbers between two values, and their text."""

from __future__ import annotations

import math
from collections.abc import Sequence


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers that span the values; the first is at most `low`, the last at least `high`.

    Example:
        >>> ticks(0.0, 0.93), ticks(4, 4)
        ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [2.0, 3.0, 4.0, 5.0, 6.0])
    """
    largest = max(abs(low), abs(high))
    if not high - low > max(1e-9 * largest, 1e-200):  # no numbers lie between them that are worth a tick
        size = largest / 2 if largest > 1e-200 else 1.0
        low, high = low - size, high + size
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(0, 2 - math.floor(math.log10(step)))
    return [round(i * step, digits) for i in range(first, last + 1)]


def tick_texts(values: Sequence[float], is_fraction: bool) -> list[str]:
    """Return the texts of ticks: percentages of fractions, or numbers with as many digits as they need.

    Example:
        >>> tick_texts([0.0, 0.5], is_fraction=True), tick_texts([0.0, 2.5], False), tick_texts([0, 20000], False)
        (['0%', '50%'], ['0', '2.5'], ['0', '20k'])
    """
    if is_fraction:
        return [f"{100 * value:g}%" for value in values]
    if max(map(abs, values), default=0) >= 10_000:
        return ["0" if value == 0 else f"{value / 1000:g}k" for value in values]
    return [f"{value:g}" for value in values]
