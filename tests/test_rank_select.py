"""rank_select: every implementation against a plain sort of each row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law_examples import EXAMPLES

from sparse_lightning.kernels.native import library
from sparse_lightning.kernels.rank_select import native, rank_select, reference

needs_native = pytest.mark.skipif(library(native.SOURCE) is None, reason="needs a C++ compiler on x86 Linux")
each_select = pytest.mark.parametrize(
    "select",
    [
        pytest.param(reference.rank_select, id="reference"),
        pytest.param(native.rank_select, id="native", marks=needs_native),
    ],
)
ODD = [0.0, -0.0, 1.0, -1.0, 2.0, 1e-42, -1e-42, 1e30, math.inf, -math.inf, math.nan]


def plain_selection(row: list[float], keep: int) -> list[bool]:
    best = sorted(range(len(row)), key=lambda i: (math.isnan(row[i]), 0 if math.isnan(row[i]) else -row[i], i))
    pruned = set(best[keep:])
    return [i in pruned for i in range(len(row))]


@st.composite
def rows(draw):
    """Rows of odd and ordinary scores, and how many of each to keep."""
    length, count = draw(st.integers(1, 40)), draw(st.integers(1, 3))
    score = st.one_of(st.sampled_from(ODD), st.floats(width=32))
    scores = draw(st.lists(st.lists(score, min_size=length, max_size=length), min_size=count, max_size=count))
    return torch.tensor(scores, dtype=torch.float32), [draw(st.integers(0, length)) for _ in range(count)]


@each_select
@settings(max_examples=EXAMPLES, deadline=None)
@given(case=rows())
def test_exactly_the_highest_are_kept_and_the_lower_index_among_equals(select, case):
    scores, keep = case
    expected = [plain_selection(row, k) for row, k in zip(scores.tolist(), keep, strict=True)]
    assert select(scores, torch.tensor(keep)).tolist() == expected


@needs_native
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", [(1, 70_001), (2, 3, 20_000), (20, 2048), (9, 2049), (40, 16)])
def test_many_scores_give_the_mask_of_a_sort_with_any_number_of_threads(shape, threads):
    generator = torch.Generator().manual_seed(threads)
    scores = torch.randn(shape, generator=generator)
    scores[..., ::7] = scores[..., :1]  # ties, in all parts of a row
    keep = torch.randint(0, shape[-1] + 1, shape[:-1], generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert native.takes(scores)
        assert rank_select(scores, keep).equal(reference.rank_select(scores, keep))
    finally:
        torch.set_num_threads(before)


@needs_native
def test_scores_that_are_not_contiguous_and_not_fp32():
    scores = torch.randn(2, 40_000).abs()
    keep = torch.tensor([10_000, 39_999])
    expected = reference.rank_select(scores, keep)
    assert rank_select(scores.t().contiguous().t(), keep).equal(expected)
    assert rank_select(scores.double(), keep).equal(expected)
    assert not native.takes(scores.double())
