"""Pairwise combinations of test parameters: far fewer cases than their product, with every pair of values in one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import combinations, product
from typing import Any

import pytest

Pair = tuple[tuple[int, int], tuple[int, int]]
"""Two values, each as (number of the parameter, number of the value)."""


def pairwise(**parameters: Iterable[Any]) -> list[dict[str, Any]]:
    """Return cases in which any two values of different parameters occur together at least once.

    Greedy and deterministic: a case starts with a pair that has not occurred yet, and each further parameter takes the
    value that adds the most new pairs. For k parameters of n values there are little more than n² cases instead of nᵏ.

    Example:
        >>> cases = pairwise(device=["cpu", "cuda"], dtype=["fp32", "bf16"], shape=[(1,), (2, 3)])
        >>> len(cases)
        4
        >>> cases[0]
        {'device': 'cpu', 'dtype': 'fp32', 'shape': (1,)}
    """
    values = {name: list(choices) for name, choices in parameters.items()}
    for name, choices in values.items():
        if not choices:
            raise ValueError(f"{name!r} has no values: no case can be made")
    sizes = [len(choices) for choices in values.values()]
    rows = _rows(sizes) if len(sizes) > 1 else [[i] for size in sizes for i in range(size)]
    return [{name: values[name][i] for name, i in zip(values, row, strict=True)} for row in rows]


def parametrize(ids: Callable[[Any], str] = str, **parameters: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by the product of its parameters, of which `make test` runs the pairwise cases only.

    The others are marked `exhaustive`.

    Args:
        ids: returns the part of a test's id that a value makes.
        **parameters: the values of each argument of the test.
    """
    values = {name: list(choices) for name, choices in parameters.items()}
    numbers = {name: range(len(choices)) for name, choices in values.items()}
    return _marked(ids, values, {tuple(case.values()) for case in pairwise(**numbers)})


def in_turn(ids: Callable[[Any], str] = str, **parameters: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by the product of its parameters, of which `make test` runs a few: every value in one case.

    The others are marked `exhaustive`.
    """
    values = {name: list(choices) for name, choices in parameters.items()}
    longest = max(map(len, values.values()))
    return _marked(ids, values, {tuple(i % len(choices) for choices in values.values()) for i in range(longest)})


def _marked(
    ids: Callable[[Any], str], values: Mapping[str, list[Any]], quick: set[tuple[int, ...]]
) -> pytest.MarkDecorator:
    """Parametrize a test by the product of values; all cases that are not quick are marked."""
    cases = []
    for row in product(*(range(len(choices)) for choices in values.values())):
        chosen = [choices[i] for choices, i in zip(values.values(), row, strict=True)]
        marks = () if row in quick else (pytest.mark.exhaustive,)
        cases.append(pytest.param(*chosen, marks=marks, id="-".join(map(ids, chosen))))
    return pytest.mark.parametrize(list(values), cases)


def pairs(case: Mapping[Any, Any]) -> set[tuple[tuple[Any, Any], tuple[Any, Any]]]:
    """Return all pairs of (parameter, value) that occur in a case."""
    return set(combinations(case.items(), 2))


def _rows(sizes: list[int]) -> list[list[int]]:
    left: dict[Pair, None] = {}
    for a, b in combinations(range(len(sizes)), 2):
        left |= {((a, i), (b, j)): None for i, j in product(range(sizes[a]), range(sizes[b]))}
    rows = []
    while left:
        case = dict(next(iter(left)))
        for parameter in range(len(sizes)):
            if parameter not in case:
                gains = [_gain(left, case, (parameter, i)) for i in range(sizes[parameter])]
                case[parameter] = gains.index(max(gains))
        row = dict(sorted(case.items()))
        for pair in pairs(row):
            left.pop(pair, None)
        rows.append(list(row.values()))
    return rows


def _gain(left: dict[Pair, None], case: dict[int, int], value: tuple[int, int]) -> int:
    return sum((min(value, other), max(value, other)) in left for other in case.items())
