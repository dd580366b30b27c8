"""Hard and soft thresholds on blocks, the conditioned one against the minimum it must be."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_lightning import BlockCoupling, BlockSpec, ScopeCoupling, ScopeSpec, SparsityError, View
from sparse_lightning.blocks.thresholds import solve


@given(st.integers(0, 2**32), st.floats(0, 3))
def test_soft_threshold_scales_each_block_by_its_formula(seed, t):
    weights = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    spec = BlockSpec(weights.clone(), (2, 4))
    mask = spec.soft_threshold(t)
    for i in range(3):
        for j in range(2):
            block = weights[2 * i : 2 * i + 2, 4 * j : 4 * j + 4]
            wanted = block * max(0, 1 - t / block.norm().item())
            torch.testing.assert_close(spec.param[2 * i : 2 * i + 2, 4 * j : 4 * j + 4], wanted)
            assert mask[i, j] == (block.norm() <= t)


def test_soft_threshold_of_zero_leaves_the_weights_as_they_are():
    spec = BlockSpec(torch.randn(4, 4), (2, 2))
    before = spec.param.clone()
    spec.soft_threshold(0.0)
    assert torch.equal(spec.param, before)


def test_a_block_that_shrinks_to_nothing_is_plus_zero():
    spec = BlockSpec(torch.tensor([[-1.0, -2.0, -9.0, 9.0]]), (1, 2))
    assert spec.soft_threshold(torch.tensor([[5.0, 0.0]])).tolist() == [[True, False]]
    assert not spec.param[0, :2].signbit().any()
    assert spec.param[0, 2:].tolist() == [-9, 9]


def test_a_block_with_a_nan_is_left_alone():
    spec = BlockSpec(torch.tensor([[math.nan, 2.0, 3.0, 4.0]]), (1, 2))
    spec.soft_threshold(1.0)
    assert spec.param[0, 1] == 2
    torch.testing.assert_close(spec.param[0, 2:], torch.tensor([2.4, 3.2]))


conditions = st.sampled_from([0.0, 1.0, 4.0, 8.0, 16.0])


@given(st.integers(0, 2**32), st.integers(1, 20), conditions, st.floats(0.0, 1.2))
def test_the_conditioned_step_satisfies_the_condition_of_its_minimum(seed, n, decades, share):
    """h (x − v) + t x / ‖x‖ = 0 where x is not zero; ‖h v‖ <= t where it is."""
    random = torch.Generator().manual_seed(seed)
    v = torch.randn(5, n, generator=random, dtype=torch.float64)
    h = 10 ** (-decades / 2 + decades * torch.rand(5, n, generator=random, dtype=torch.float64))
    t = share * (h * v).norm(dim=-1, keepdim=True)
    x, zero = solve(v, h, t)
    assert torch.equal(zero, ((h * v).norm(dim=-1, keepdim=True) <= t).squeeze(-1))
    size = x.norm(dim=-1, keepdim=True)
    residual = h * (x - v) + torch.where(size > 0, t * x / size, 0)
    scale = (h * v).norm(dim=-1, keepdim=True)
    assert (residual.abs() <= 1e-9 * scale)[~zero].all()


@given(st.integers(0, 2**32), st.floats(0.01, 2))
def test_the_conditioned_step_is_no_worse_than_any_other_point(seed, t):
    random = torch.Generator().manual_seed(seed)
    v, h = (torch.rand(6, generator=random, dtype=torch.float64) + 0.05 for _ in range(2))
    x, zero = solve(v, h, torch.tensor([t], dtype=torch.float64))
    x = torch.zeros_like(x) if zero else x

    def objective(y):
        return 0.5 * (h * (y - v).square()).sum(-1) + t * y.norm(dim=-1)

    others = torch.cat([x + 0.1 * torch.randn(200, 6, generator=random, dtype=torch.float64), torch.zeros(1, 6)])
    assert (objective(x) <= objective(others) + 1e-12).all()


def test_conditioners_of_one_give_the_plain_step():
    plain, conditioned = BlockSpec(torch.randn(6, 6), (2, 3)), BlockSpec(torch.zeros(6, 6), (2, 3))
    conditioned.param.copy_(plain.param)
    assert torch.equal(plain.soft_threshold(0.9), conditioned.soft_threshold(0.9, conditioners=torch.ones(6, 6)))
    torch.testing.assert_close(plain.param, conditioned.param)


def coupled(dtype=torch.float64):
    up, down = torch.randn(4, 3, dtype=dtype), torch.randn(5, 4, dtype=dtype)
    return BlockCoupling([BlockSpec(up, (1, -1)), BlockSpec(View(down, (5, 4), (4, -1), 3), (-1, 1))], [None, (1, 0)])


@pytest.mark.parametrize("limit", [1 << 20, 10], ids=["in one", "in chunks"])
def test_a_coupling_shrinks_as_one_block(limit, monkeypatch):
    monkeypatch.setattr("sparse_lightning.kernels.chunks.CPU_ELEMENTS", limit)
    neurons = coupled()
    metric = {spec: torch.rand(spec.param.shape, dtype=torch.float64) + 0.1 for spec in neurons.blocks()}
    up, down = (spec.param.clone() for spec in neurons.blocks())
    h_up, h_down = metric.values()
    thresholds = torch.tensor([[0.1], [0.5], [1.0], [50.0]], dtype=torch.float64)
    mask = neurons.soft_threshold(thresholds, conditioners=metric)
    for i, t in enumerate(thresholds):
        v, h = torch.cat([up[i], down[:, 3 - i]]), torch.cat([h_up[i], h_down[:, 3 - i]])
        wanted, zero = solve(v, h, t)
        wanted = torch.zeros_like(wanted) if zero else wanted
        torch.testing.assert_close(torch.cat([neurons.specs[0].param[i], neurons.specs[1].param[:, 3 - i]]), wanted)
        assert mask[i, 0] == zero
    assert mask.flatten().tolist() == [False, False, False, True]


def test_low_precision_weights_with_partial_edges():
    weights = torch.randn(5, 7).bfloat16()
    spec = BlockSpec(weights.clone(), (2, 3), edge="partial")
    spec.soft_threshold(0.5, conditioners=torch.ones(5, 7))
    wide = BlockSpec(weights.float(), (2, 3), edge="partial")
    wide.soft_threshold(0.5)
    torch.testing.assert_close(spec.param.float(), wide.param, rtol=1e-2, atol=1e-2)


def test_hard_threshold_prunes_below_and_keeps_at_the_threshold():
    spec = BlockSpec(torch.tensor([[3.0, 4.0, 0.0, 1.0, math.nan, 0.0]]), (1, 2))
    assert spec.hard_threshold(5.0).tolist() == [[False, True, True]]
    assert spec.param.tolist() == [[3, 4, 0, 0, 0, 0]]


def test_thresholds_of_scopes_apply_to_their_own_blocks():
    first, second = BlockSpec(torch.ones(2, 4), (1, 1)), BlockSpec(torch.ones(4, 2), (1, 1))
    both = ScopeCoupling([ScopeSpec(first, (1, -1)), ScopeSpec(second, (-1, 1))], orders=[None, (1, 0)])
    assert both.grid_shape == (2, 1)
    both.soft_threshold(torch.tensor([[0.25], [2.0]]))
    assert first.param.tolist() == [[0.75] * 4, [0.0] * 4]
    assert second.param.tolist() == [[0.75, 0.0]] * 4
    both.hard_threshold(thresholds=1.0)
    assert not first.param.any()


def test_a_negative_threshold_raises_an_error():
    with pytest.raises(SparsityError, match=r"threshold -1.0 is out of range: a proximal step takes 0 or more"):
        BlockSpec(torch.ones(2, 2), (1, 1)).soft_threshold(-1.0)
