"""Integer solutions of bounded sums of strides: they decide injectivity and overlap of layouts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from math import gcd

Term = tuple[int, int, int]  # coefficient, lowest and highest value of its variable


def has_solution(terms: Iterable[Term], target: int) -> bool:
    """Whether integers `lo <= x <= hi`, one for each term, make the sum of `coefficient * x` equal `target`.

    Exact. The search proceeds from the largest coefficient to the smallest. It is pruned by range, by greatest common
    divisor, and where the smaller terms leave no gaps; the last two terms are solved directly.

    Example:
        >>> has_solution([(3, 0, 4), (5, 0, 2)], 11)
        True
        >>> has_solution([(3, 0, 4), (5, 0, 2)], 4)
        False
    """
    counts: dict[int, int] = defaultdict(int)
    for coefficient, low, high in terms:
        if high < low:
            return False
        target -= coefficient * (low if coefficient > 0 else high)
        counts[abs(coefficient)] += high - low
    steps = sorted(((c, n) for c, n in counts.items() if c and n), reverse=True)
    return _Search(steps).solve(0, target)


def gapless_step(steps: Iterable[tuple[int, int]]) -> int | None:
    """Return the g for which sums of `c * x`, `0 <= x <= n` over `(c, n)`, are all multiples of g up to the largest.

    None if they skip a multiple of their greatest common divisor; 0 if the only sum is 0.

    Example:
        >>> gapless_step([(6, 3), (2, 2)]), gapless_step([(8, 3), (2, 2)])
        (2, None)
    """
    search = _Search(sorted(((c, n) for c, n in steps if c and n), reverse=True))
    return search.divisor[0] if search.gapless[0] else None


class _Search:
    """Sums of `c * x` with `0 <= x <= n` over `(c, n)` in descending order of `c`."""

    def __init__(self, steps: list[tuple[int, int]]) -> None:
        self.steps = steps
        size = len(steps)
        self.extent, self.divisor, self.gapless = [0] * (size + 1), [0] * (size + 1), [True] * (size + 1)
        for i in reversed(range(size)):
            c, n = steps[i]
            self.extent[i] = self.extent[i + 1] + c * n
            self.divisor[i] = gcd(self.divisor[i + 1], c)
            below = self.divisor[i + 1]
            self.gapless[i] = below == 0 or (self.gapless[i + 1] and c % below == 0 and c <= self.extent[i + 1] + below)
        self.solve = lru_cache(maxsize=None)(self._solve)

    def _solve(self, i: int, target: int) -> bool:
        if not 0 <= target <= self.extent[i]:
            return False
        if target == 0:
            return True
        if target % self.divisor[i]:
            return False
        if self.gapless[i]:
            return True
        c, n = self.steps[i]
        lowest = max(0, -(-(target - self.extent[i + 1]) // c))
        highest = min(n, target // c)
        if i + 2 == len(self.steps):
            modulus = self.steps[i + 1][0] // self.divisor[i]
            root = target // self.divisor[i] * pow(c // self.divisor[i], -1, modulus) % modulus
            return lowest + (root - lowest) % modulus <= highest
        return any(self.solve(i + 1, target - c * x) for x in range(highest, lowest - 1, -1))
