"""What each method decides, on scores that are not all numbers too."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_lightning import SET, BlockSpec, Gradual, Proximal, RigL, ScopeSpec, Soft
from sparse_lightning.methods import PruneOnce, UpdateContext

METHODS = [Gradual(), PruneOnce(), SET(), RigL(), Soft(1), Soft(3), Proximal()]


def context(scores: list[float], keeps: list[int], **more) -> UpdateContext:
    """One scope of single weights, none of them pruned."""
    scope = ScopeSpec(BlockSpec(torch.arange(1.0, 1 + len(scores)).view(1, -1), (1, 1)))
    grid = torch.tensor([[scores]])
    growth = torch.zeros_like(grid)
    mask = torch.zeros_like(grid, dtype=torch.bool)
    return UpdateContext(scope, grid, mask, [torch.tensor([[keep]]) for keep in keeps], growth, target=0.5, **more)


numbers = st.one_of(st.integers(-3, 3).map(float), st.just(math.nan))


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.filterwarnings("ignore::sparse_lightning.errors.ScoreWarning")
@given(scores=st.lists(numbers, min_size=1, max_size=8), data=st.data())
def test_nan_ranks_lowest_and_ties_keep_the_lower_index(method, scores, data):
    keep = data.draw(st.integers(0, len(scores)))
    mask = method.choose(context(scores, [keep] * (method.ahead + 1)))
    order = sorted(range(len(scores)), key=lambda i: (math.isnan(scores[i]), -scores[i], i))
    assert sorted(order[:keep]) == (~mask).flatten().nonzero().flatten().tolist()


def test_soft_shrinks_a_block_whose_score_is_nan_before_all_others():
    """Beside `choose`, what it remembers: the block that is pruned next has shrunk most."""
    left = Soft(2).remember(context([3.0, math.nan, 2.0, 1.0], [4, 3]), torch.zeros(1, 1, 4, dtype=torch.bool))
    assert left.flatten().tolist() == [1.0, 0.5, 1.0, 1.0]
