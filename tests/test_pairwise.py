"""Pairwise combinations: every pair of values occurs, in fewer cases than the product has."""

from __future__ import annotations

import math
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pairwise import pairs, pairwise, parametrize

PARAMETERS = st.dictionaries(st.sampled_from("abcde"), st.lists(st.integers(), min_size=1, max_size=5, unique=True))


def all_pairs(parameters):
    """Every pair of values of two parameters, written out."""
    return {((a, x), (b, y)) for a, b in combinations(parameters, 2) for x, y in product(parameters[a], parameters[b])}


@given(PARAMETERS)
def test_every_pair_occurs_and_no_case_twice(parameters):
    cases = pairwise(**parameters)
    assert all(list(case) == list(parameters) for case in cases)
    assert all(value in parameters[name] for case in cases for name, value in case.items())
    assert {pair for case in cases for pair in pairs(case)} == all_pairs(parameters)
    assert len({tuple(case.values()) for case in cases}) == len(cases) <= math.prod(map(len, parameters.values()))


@given(PARAMETERS)
def test_the_cases_are_the_same_in_every_process(parameters):
    """Workers of pytest-xdist must collect the same tests."""
    assert pairwise(**parameters) == pairwise(**{name: tuple(values) for name, values in parameters.items()})


def test_there_are_little_more_cases_than_two_parameters_need():
    assert len(pairwise(a=range(9), b=range(6), c=range(6))) <= 60
    assert len(pairwise(a=range(4), b=range(4), c=range(4), d=range(4), e=range(4))) <= 20


def test_a_single_parameter_has_a_case_for_each_value():
    assert pairwise(a=[1, 2]) == [{"a": 1}, {"a": 2}]


def test_a_parameter_without_values_is_an_error():
    with pytest.raises(ValueError, match="'b' has no values"):
        pairwise(a=[1, 2], b=[])


def test_parametrize_has_the_whole_product_and_marks_what_is_not_pairwise():
    parameters = {"a": [1, 2, 3], "b": ["x", "y"], "c": [0.5, 0.25]}
    mark = parametrize(**parameters).mark
    names, cases = mark.args
    assert names == ["a", "b", "c"]
    assert [case.values for case in cases] == list(product(*parameters.values()))
    assert cases[1].id == "1-x-0.25"
    quick = [dict(zip(names, case.values, strict=True)) for case in cases if not case.marks]
    assert sorted(quick, key=str) == sorted(pairwise(**parameters), key=str)
    assert all([mark.name for mark in case.marks] in ([], ["exhaustive"]) for case in cases)
