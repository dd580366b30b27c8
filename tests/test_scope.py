"""Scopes: exact, deterministic selection in every scope, through any coupling and permutation."""

from __future__ import annotations

import itertools
import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sparse_lightning import (
    BlockCoupling,
    BlockSpec,
    CouplingError,
    LayoutError,
    ScopeCoupling,
    ScopeSpec,
    ScoreWarning,
    SparsityBuilder,
    SparsityError,
)
from sparse_lightning.kernels.rank_select import descending_order

SCORES = [0.0, 1.0, 1.0, 2.0, -1.0, math.inf, -math.inf, math.nan]


@st.composite
def scope_specs(draw, scope_grid=None):
    """Scopes of a few blocks each on a grid of 1 to 4 dimensions."""
    counts = scope_grid or draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    shape = [draw(st.integers(1, 3)) for _ in counts]
    block = [draw(st.integers(1, 2)) for _ in counts]
    param = torch.randn([c * s * b for c, s, b in zip(counts, shape, block, strict=True)])
    return ScopeSpec(BlockSpec(param, block), shape)


@st.composite
def scopes(draw):
    """A spec, or a coupling of several whose scope grids agree under a permutation each."""
    if draw(st.booleans()):
        return draw(scope_specs())
    grid = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    members, orders = [], []
    for _ in range(draw(st.integers(1, 3))):
        orders.append(draw(st.permutations(range(len(grid)))))
        members.append(draw(scope_specs([grid[orders[-1].index(d)] for d in range(len(grid))])))
    return ScopeCoupling(members, orders)


@st.composite
def scored(draw):
    scope = draw(scopes())
    n = scope.numblk()
    values = draw(st.lists(st.sampled_from(SCORES), min_size=n, max_size=n))
    shape = (*scope.grid_shape, scope.numblk_per_scope())
    return scope, torch.tensor(values).view(shape)


def kept_of(scores, k):
    """The indices kept in one scope, written in the plainest way."""
    rank = [(math.isnan(s), -s if not math.isnan(s) else 0.0, i) for i, s in enumerate(scores)]
    return {i for _, _, i in sorted(rank)[:k]}


@pytest.mark.filterwarnings("ignore::sparse_lightning.errors.ScoreWarning")
@given(scored(), st.data())
def test_a_selection_keeps_exactly_nnz_blocks_the_best_and_of_equals_the_first(case, data):
    scope, scores = case
    n = scope.numblk_per_scope()
    counts = torch.tensor([data.draw(st.integers(0, n)) for _ in range(scope.numscp())]).view(scope.grid_shape)
    mask = scope.select(scores, counts)
    for at in itertools.product(*map(range, scope.grid_shape)):
        kept = {i for i in range(n) if not mask[at][i]}
        assert kept == kept_of(scores[at].tolist(), int(counts[at]))


@pytest.mark.filterwarnings("ignore::sparse_lightning.errors.ScoreWarning")
@given(scored(), st.data())
def test_scores_in_every_form_give_the_same_selection(case, data):
    scope, scores = case
    nnz = data.draw(st.integers(0, scope.numblk_per_scope()))
    mask = scope.select(scores, nnz)
    grids = scope.scatter(scores)
    by_block = scope.select(grids, nnz)
    assert torch.equal(scope.gather(by_block), mask)
    if len(grids) == 1:
        [(block, grid)] = grids.items()
        assert torch.equal(scope.select(grid, nnz), by_block[block])


@given(scopes())
def test_gathering_by_scope_takes_each_block_to_the_scope_that_it_lies_in(scope):
    for member in scope.members():
        grid = torch.arange(member.block.numblk()).view(member.block.grid_shape)
        gathered = member.gather_grid(grid)
        for at in itertools.product(*map(range, member.grid_shape)):
            box = grid[tuple(slice(i * s, (i + 1) * s) for i, s in zip(at, member.shape, strict=True))]
            assert gathered[at].tolist() == box.flatten().tolist()
    marks = {m.block: torch.full(m.block.grid_shape, i) for i, m in enumerate(scope.members())}
    together = scope.gather(marks)
    assert together.shape == (*scope.grid_shape, scope.numblk_per_scope())
    for block, grid in scope.scatter(together).items():
        assert torch.equal(grid, marks[block])


@given(scopes(), st.data())
def test_thresholding_to_a_count_prunes_just_that_many_blocks(scope, data):
    nnz = data.draw(st.integers(0, scope.numblk_per_scope()))
    masks = scope.hard_threshold(nnz=nnz)
    pruned = scope.gather(masks)
    assert (pruned.sum(-1) == scope.numblk_per_scope() - nnz).all()
    for block, mask in masks.items():
        assert torch.equal(block.norms() == 0, mask)


@given(scopes(), st.data())
def test_the_kth_largest_is_the_threshold_that_keeps_k(scope, data):
    n = scope.numblk_per_scope()
    nnz = data.draw(st.integers(0, n))
    norms = scope.block_norms()
    threshold = scope.kth_largest(None, nnz)
    assert threshold.shape == scope.grid_shape
    assert ((norms >= threshold.unsqueeze(-1)).sum(-1) == nnz).all()
    assert torch.equal(scope.kth_largest(norms, nnz), threshold)
    by_threshold = scope.gather(scope.hard_threshold(thresholds=threshold))
    assert ((~by_threshold).sum(-1) == nnz).all()


def test_the_kth_largest_of_scores_values_and_nans():
    scope = ScopeSpec(BlockSpec(torch.tensor([[3.0, 4.0, 0.0, 1.0]]), (1, 2)))
    assert scope.kth_largest(torch.tensor([[7.0, 9.0]]), 2).item() == 7
    assert scope.kth_largest(torch.tensor([[6.0, 8.0, 0.0, 1.0]]), 1).item() == 10
    assert scope.kth_largest({scope.block: torch.tensor([[7.0, 9.0]])}, 1).item() == 9
    assert scope.kth_largest({scope.block: torch.tensor([[6.0, 8.0, 0.0, 1.0]])}, 1).item() == 10
    assert scope.kth_largest(torch.tensor([[math.nan, 1.0]]), 2).item() == -math.inf
    assert scope.kth_largest(torch.tensor([[math.nan, 1.0]]), 0).item() == math.inf


@given(scopes(), st.floats(0, 1))
def test_a_sparsity_becomes_a_count(scope, sparsity):
    n = scope.numblk_per_scope()
    assert scope.sparsity_to_nnz(sparsity) == n - math.floor(sparsity * n + 1e-9)
    assert (scope.sparsity_to_nnz(0), scope.sparsity_to_nnz(1.0)) == (n, 0)


@pytest.mark.parametrize("sparsity", [-0.01, 1.01, math.nan])
def test_a_sparsity_outside_of_0_and_1_raises_an_error(sparsity):
    scope = ScopeSpec(BlockSpec(torch.ones(4), (1,)), name="fc")
    with pytest.raises(SparsityError, match=f"sparsity of {sparsity} for ScopeSpec.'fc'.*between 0"):
        scope.sparsity_to_nnz(sparsity)
    assert issubclass(SparsityError, ValueError)


def test_every_hundredth_keeps_what_hand_arithmetic_says():
    scope = ScopeSpec(BlockSpec(torch.ones(100), (1,)))
    assert [scope.sparsity_to_nnz(i / 100) for i in range(101)] == [100 - i for i in range(101)]


def test_a_nan_score_is_reported_with_the_name_of_its_parameter():
    good, bad = BlockSpec(torch.ones(4), (1,), name="fc1.weight"), BlockSpec(torch.ones(4), (1,), name="fc2.weight")
    both = ScopeCoupling([ScopeSpec(good), ScopeSpec(bad)])
    scores = {good: torch.ones(4), bad: torch.tensor([math.nan, 1.0, 2.0, 3.0])}
    with pytest.warns(ScoreWarning, match=r"1 scores of fc2.weight are NaN: those blocks rank lowest"):
        masks = both.select(scores, 7)
    assert masks[bad].tolist() == [True, False, False, False]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both.select({good: torch.ones(4), bad: torch.ones(4)}, 7)


def test_counts_say_what_their_names_say():
    scope = ScopeSpec(BlockSpec(torch.ones(6, 8), (1, 2)), (2, -1))
    assert (scope.grid_shape, scope.numscp(), scope.numblk_per_scope(), scope.numblk()) == ((3, 1), 3, 8, 24)
    assert scope.numel_per_scope() == 16
    edge = ScopeSpec(BlockSpec(torch.ones(5, 7), (2, 3), edge="partial"), (1, -1))
    assert edge.numel_per_scope() == 14
    assert ScopeSpec(edge.block).numel_per_scope() == 35
    other = ScopeSpec(BlockSpec(torch.ones(4, 4), (4, 4)))
    assert ScopeCoupling([ScopeSpec(edge.block), other]).numel_per_scope() == 51
    rows, columns = BlockSpec(torch.ones(6, 4), (1, -1)), BlockSpec(torch.ones(5, 6), (-1, 1))
    neurons = ScopeSpec(BlockCoupling([rows, columns], [None, (1, 0)]), (2, 1))
    assert (neurons.numscp(), neurons.numel_per_scope(), neurons.numel()) == (3, 18, 54)


def test_integer_scores_are_ranked_too():
    scope = ScopeSpec(BlockSpec(torch.ones(3), (1,)))
    assert scope.select(torch.tensor([1, 3, 3]), 1).tolist() == [True, False, True]


def test_masks_of_weights_by_values_by_scores_and_by_weights():
    spec = BlockSpec(torch.tensor([[1.0, 1.0, 2.0, 2.0]]), (1, 2))
    scope = ScopeSpec(spec)
    assert scope.get_masks(1)[spec].tolist() == [[True, True, False, False]]
    assert scope.get_masks(1, values=torch.tensor([[3.0, 0, 0, 0]]))[spec].tolist() == [[False, False, True, True]]
    assert scope.get_masks(1, block_scores=torch.tensor([[2.0, 1.0]]))[spec].tolist() == [[False, False, True, True]]
    assert spec.param.tolist() == [[1, 1, 2, 2]], "asking for masks changed the weights"


def test_values_are_judged_and_thresholded_and_the_weights_are_left():
    spec = BlockSpec(torch.tensor([[5.0, 1.0]]), (1, 1))
    values = torch.tensor([[1.0, 5.0]])
    ScopeSpec(spec).hard_threshold(nnz=1, values=values)
    assert values.tolist() == [[0, 5]]
    assert spec.param.tolist() == [[5, 1]]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda b: ScopeSpec(b, (3,)),
            LayoutError,
            r"scope \(3,\) does not fit the grid \(2, 4\).*not a multiple of 3",
        ),
        (lambda b: ScopeSpec(b, (1, 1, 1)), LayoutError, "more dimensions"),
        (lambda b: ScopeSpec(b).select(torch.ones(3, 3), 1), LayoutError, r"scores of shape \(3, 3\)"),
        (
            lambda b: ScopeSpec(b).select(torch.ones(2, 4), 9),
            SparsityError,
            "nnz=9 is out of range .* from 0 to 8 blocks",
        ),
        (lambda b: ScopeSpec(b).select(torch.ones(2, 4), -1), SparsityError, "nnz=-1 is out of range"),
        (lambda b: ScopeSpec(b).select(torch.ones(2, 4), 0.5), SparsityError, "must be an integer"),
        (lambda b: ScopeSpec(b).select({}, 1), CouplingError, "no scores for BlockSpec"),
        (lambda b: ScopeSpec(b).hard_threshold(), SparsityError, "pass one of the two"),
        (lambda b: ScopeSpec(b).hard_threshold(1.0, 1), SparsityError, "pass one of the two"),
        (lambda b: ScopeCoupling([]), CouplingError, "has no members"),
        (lambda b: ScopeCoupling([ScopeSpec(b), ScopeSpec(b, (1,))]), CouplingError, r"\(1, 1\) and \(2, 1\)"),
        (lambda b: ScopeCoupling([ScopeSpec(b), ScopeSpec(b)]), CouplingError, "twice: pass each block once"),
        (
            lambda b: ScopeCoupling([ScopeSpec(b), ScopeSpec(BlockSpec(b.param.T, (1, 2)), ())]).block_norms(b.param),
            CouplingError,
            "pass a mapping",
        ),
    ],
)
def test_arguments_that_do_not_fit_raise_an_error(call, error, text):
    with pytest.raises(error, match=text):
        call(BlockSpec(torch.ones(4, 4), (2, 1), name="fc"))


def model():
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False))


def test_a_builder_makes_all_kinds_by_name():
    net = model()
    builder = SparsityBuilder(net).add_block("up", "0.weight", (1, -1)).add_block("down", net[1].weight, (-1, 1))
    builder.couple_blocks("neurons", ["up", "down"], orders=[None, (1, 0)]).add_scope("mlp", "neurons")
    builder.add_block("pairs", "1.weight", (1, 2)).add_scope("pairs", "pairs", (1, -1)).add_scope("rows", "up")
    assert builder.get_block("neurons").numel_per_block() == 8
    assert [scope.name for scope in builder.get_all_scopes()] == ["mlp", "pairs", "rows"]
    builder.couple_scopes("both", ["mlp", "rows"])
    assert [scope.name for scope in builder.get_all_scopes()] == ["pairs", "both"]
    assert builder.get_scope("both").numblk_per_scope() == 16


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda b: b.add_block("up", "0.wieght", (1,)), "no parameter '0.wieght': did you mean '0.weight'"),
        (lambda b: b.add_block("rows", "0.weight", (1,)), "the name 'rows' is taken"),
        (lambda b: b.get_block("row"), "did you mean 'rows'"),
        (lambda b: b.get_scope("nothing"), "no scope 'nothing'"),
        (lambda b: b.couple_blocks("c", ["rows"]).couple_blocks("d", ["c"]), "coupling itself"),
        (lambda b: b.add_scope("s", "rows").couple_scopes("t", ["s"]).couple_scopes("u", ["t"]), "coupling itself"),
        (lambda b: SparsityBuilder().add_block("up", "0.weight", (1,)), "'0.weight' needs a module"),
    ],
)
def test_wrong_names_in_a_builder_raise_an_error(call, text):
    with pytest.raises(CouplingError, match=text):
        call(SparsityBuilder(model()).add_block("rows", "0.weight", (1, -1)))


@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, -2.0, math.inf, -math.inf, math.nan]), max_size=12))
def test_descending_order_puts_nan_last_and_the_lower_index_first(values):
    key = [math.inf if math.isnan(x) else -x for x in values]
    wanted = sorted(range(len(values)), key=lambda i: (math.isnan(values[i]), key[i]))
    assert descending_order(torch.tensor(values)).tolist() == wanted
    both = torch.tensor(values)[:, None].expand(-1, 2)
    assert descending_order(both, dim=0).tolist() == [[i, i] for i in wanted]


@given(st.lists(st.integers(-2, 2), max_size=12))
def test_descending_order_of_integers_puts_the_lower_index_first(values):
    wanted = sorted(range(len(values)), key=lambda i: -values[i])
    assert descending_order(torch.tensor(values, dtype=torch.int64)).tolist() == wanted


def test_blocks_are_named_after_their_scope():
    first, second = (ScopeSpec(BlockSpec(torch.ones(2, 2), (1, 1), name=name)) for name in "ab")
    assert first.named_blocks("fc") == {"fc": first.block}
    named = ScopeCoupling([first, second]).named_blocks("mlp")
    assert list(named) == ["mlp/0", "mlp/1"]
    assert list(named.values()) == [first.block, second.block]
