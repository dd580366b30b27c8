"""Blocks: disjoint, covering, reduced and masked as index arithmetic says; couplings lay grids on one another."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import block_shapes, data_of, storage_of, views
from torch import nn

from sparse_lightning import BlockCoupling, BlockSpec, CouplingError, LayoutError, SparsityError, View


@st.composite
def specs(draw, signed=True, dtype=torch.float32):
    """A spec on any view, with blocks that divide or with smaller ones at the edge."""
    view = draw(views(signed=signed, dtype=dtype))
    divide = draw(st.booleans())
    return BlockSpec(view, draw(block_shapes(view.shape, divide)), edge="error" if divide else "partial")


def elements(spec):
    """For each block its storage offsets, in the plainest way."""
    found = {at: [] for at in itertools.product(*map(range, spec.grid_shape))}
    for coord in itertools.product(*map(range, spec.view.shape)):
        found[tuple(x // b for x, b in zip(coord, spec.shape, strict=True))].append(spec.view.layout(coord))
    return found


def grid_from(spec, values, fn):
    """A grid computed block by block from the flat storage."""
    grid = torch.empty(spec.grid_shape, dtype=torch.float64)
    for at, where in elements(spec).items():
        grid[at] = fn(storage_of(values)[where].double())
    return grid


def coins(draw, shape):
    n = math.prod(shape)
    return torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=torch.bool).view(shape)


@given(specs())
def test_blocks_are_disjoint_and_cover_their_view(spec):
    """Each mask of one block prunes its own elements and no others; together they prune the view."""
    blocks = elements(spec)
    seen = [x for where in blocks.values() for x in where]
    assert len(set(seen)) == len(seen) == spec.numel()
    for at, where in blocks.items():
        param = spec.param.detach().clone(memory_format=torch.preserve_format)
        alone = torch.zeros(spec.grid_shape, dtype=torch.bool)
        alone[at] = True
        [element_mask] = spec.get_masks(alone).values()
        assert int(element_mask.sum()) == len(where) == int(spec.block_sizes()[at])
        spec.apply_mask(alone, values=param)
        assert int((param == 0).sum()) == len(where)


@given(specs(), st.data())
def test_masking_fills_the_pruned_blocks_and_nothing_else(spec, data):
    mask = coins(data.draw, spec.grid_shape)
    wanted = storage_of(spec.param).clone()
    for at, where in elements(spec).items():
        if mask[at]:
            wanted[where] = 0
    spec.apply_mask(mask)
    assert torch.equal(storage_of(spec.param), wanted)


@given(specs(), st.sampled_from([1, 2, 3, math.inf]))
def test_norms_are_those_of_each_block(spec, p):
    wanted = grid_from(spec, spec.param, lambda x: torch.linalg.vector_norm(x, p))
    torch.testing.assert_close(spec.norms(p=p), wanted.float())


@given(specs())
def test_min_max_and_any_other_reduction(spec):
    assert torch.equal(spec.min().double(), grid_from(spec, spec.param, torch.min))
    assert torch.equal(spec.max().double(), grid_from(spec, spec.param, torch.max))
    for reduce in (spec.reduce, spec.reduce_chunks):
        mean, median = reduce(None, lambda b: b.mean(-1)), reduce(None, lambda b: b.median(-1).values)
        torch.testing.assert_close(mean, grid_from(spec, spec.param, torch.mean).float())
        assert torch.equal(median.double(), grid_from(spec, spec.param, torch.median))


@given(specs())
def test_values_may_have_the_shape_of_the_parameter_or_of_the_view(spec):
    gradient = -2 * spec.param.detach()
    torch.testing.assert_close(spec.norms(gradient), 2 * spec.norms())
    if tuple(spec.param.shape) != spec.view.shape:
        torch.testing.assert_close(spec.norms(data_of(spec).clone()), spec.norms())


@given(specs(), st.data())
def test_a_pruned_block_is_plus_zero_even_where_it_held_inf_or_nan(spec, data):
    odd = torch.tensor([math.inf, -math.inf, math.nan, -0.0, 1.0])
    fresh = odd.repeat(spec.param.numel() // 5 + 1)[: spec.param.numel()].view(spec.param.shape)
    spec.param.detach().copy_(fresh)
    mask = coins(data.draw, spec.grid_shape)
    spec.apply_mask(mask)
    pruned = data_of(spec)[spec.get_masks(mask)[spec]]
    assert (pruned == 0).all()
    assert not pruned.signbit().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes(dtype):
    @given(specs(dtype=dtype), st.data())
    def law(spec, data):
        wanted = grid_from(spec, spec.param, torch.linalg.vector_norm)
        norms = spec.norms()
        assert norms.dtype == (dtype if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(norms.double(), wanted, rtol=1e-5, atol=0)
        mask = coins(data.draw, spec.grid_shape)
        spec.apply_mask(mask)
        assert torch.equal(spec.norms() == 0, mask)

    law()


@given(specs(signed=False))
def test_block_view_and_grid_broadcasts_fit_one_another(spec):
    if any(spec.has_edge(d) for d in range(spec.grid_ndim)):
        with pytest.raises(LayoutError, match="not a multiple"):
            spec.block_view()
        return
    grid = torch.arange(float(spec.numblk())).view(spec.grid_shape)
    wide = spec.expand_to_block_view(grid)
    assert torch.equal(spec.expand_block_tensor(grid.flatten()), grid)
    assert wide.shape == spec.block_view().shape
    assert wide.untyped_storage().data_ptr() == grid.untyped_storage().data_ptr()
    assert torch.equal(View.block_view_of(spec.broadcast_block_to_element(grid), spec.shape), wide)
    thin = spec.broadcast_block_to_element(grid, fake=True)
    apart = View.block_view_of(spec.broadcast_block_to_element(grid), spec.shape, reorder=False)
    assert torch.equal(thin.expand_as(apart), apart)


def test_a_block_view_is_live():
    weight = nn.Parameter(torch.ones(4, 6))
    BlockSpec(weight, (2, 3)).block_view()[0, 1].zero_()
    assert weight.detach()[0].tolist() == [1, 1, 1, 0, 0, 0]


@given(specs(), st.data())
def test_weights_that_are_held_are_found_where_blocks_are_marked(spec, data):
    marked = coins(data.draw, spec.grid_shape)
    offset = data.draw(st.sampled_from(list(itertools.chain(*elements(spec).values()))))
    with torch.no_grad():
        storage_of(spec.param).zero_()
        storage_of(spec.param)[offset] = data.draw(st.sampled_from([1e-30, -2.0, math.nan]))
    there = any(offset in where and marked[at] for at, where in elements(spec).items())
    assert spec.part().some_hold_weights(marked, most=marked.numel()) == there


def test_the_shape_may_be_short_and_span():
    weight = torch.ones(8, 4, 3, 3)
    assert BlockSpec(weight, (1, -1)).shape == (1, 4, 1, 1)
    assert BlockSpec(weight, (1, -1, -1, -1)).grid_shape == (8, 1, 1, 1)
    assert BlockSpec(weight, ()).numblk() == weight.numel()


def test_counts():
    spec = BlockSpec(torch.ones(5, 7), (2, 3), edge="partial")
    assert (spec.grid_shape, spec.grid_ndim, spec.numblk(), spec.numel()) == ((3, 3), 2, 9, 35)
    assert spec.numel_per_block() == 6
    assert spec.block_sizes().tolist() == [[6, 6, 2], [6, 6, 2], [3, 3, 1]]
    assert (spec.nnz(), spec.nnz_blocks()) == (35, 9)
    spec.param[0:2, 0:3] = 1e-9
    spec.param[4, 6] = math.nan
    assert spec.nnz_blocks() == 8, "a block of magnitudes below eps is zero, a NaN is not"
    assert spec.nnz() == 29, "weights of magnitudes below eps are zero, a NaN is not"
    assert BlockSpec(torch.ones(3), (8,), edge="partial").numel_per_block() == 3


@pytest.mark.parametrize(
    ("shape", "edge", "text"),
    [
        (
            (3, 2),
            "error",
            r"block \(3, 2\) does not fit fc of shape \(4, 6\).*dimension 0 has 4 elements.*edge=\"partial\"",
        ),
        ((2, 2, 2), "error", r"more dimensions.*Change the block shape$"),
        ((0, 2), "error", "neither positive nor −1"),
        ((2, -2), "partial", "neither positive nor −1"),
        ((2.5, 2), "error", "not a sequence of integers"),
        ((2, 2), "ragged", "edge must be"),
    ],
)
def test_block_shapes_that_do_not_fit_raise_an_error(shape, edge, text):
    with pytest.raises(LayoutError, match=text):
        BlockSpec(torch.ones(4, 6), shape, name="fc", edge=edge)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda s: s.apply_mask(torch.ones(2, 3) > 0), r"\(2, 3\) do not fit the grid \(2, 2\) of BlockSpec\('fc'"),
        (lambda s: s.apply_mask(torch.ones(2, 2)), "a mask must be boolean, .* not torch.float32"),
        (lambda s: s.norms(torch.ones(3, 3)), r"of the shape of the parameter, \(4, 6\), or of the view"),
        (lambda s: s.norms({}), "no values for BlockSpec"),
        (lambda s: s.norms(p=0), "p=0 is out of range: a norm takes a positive p"),
    ],
)
def test_grids_and_values_that_do_not_fit_raise_an_error(call, text):
    with pytest.raises((LayoutError, CouplingError, SparsityError), match=text):
        call(BlockSpec(torch.ones(4, 6), (2, 3), name="fc"))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,)])
def test_empty_parameters_have_empty_grids(shape):
    spec = BlockSpec(torch.ones(shape), (1,) * len(shape))
    assert spec.numblk() == 0
    assert spec.norms().shape == spec.reduce(None, lambda b: b.sum(-1)).shape == spec.grid_shape
    spec.apply_mask(torch.ones(spec.grid_shape, dtype=torch.bool))
    assert BlockSpec(torch.ones(shape), (-1,) * len(shape)).numblk() == 0


@st.composite
def couplings(draw):
    """Two or three specs whose grids agree under a permutation each; blocks and parameters differ."""
    grid = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    specs, orders = [], []
    for i in range(draw(st.integers(1, 3))):
        order = draw(st.permutations(range(len(grid))))
        own = [grid[order.index(d)] for d in range(len(grid))]
        block = [draw(st.integers(1, 3)) for _ in grid]
        less = [draw(st.integers(0, b - 1)) if draw(st.booleans()) else 0 for b in block]
        shape = [n * b - x for n, b, x in zip(own, block, less, strict=True)]
        param = torch.randn(shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        specs.append(BlockSpec(param, block, name=f"p{i}", edge="partial"))
        orders.append(order)
    return BlockCoupling(specs, orders)


@given(couplings(), st.data())
def test_a_coupling_decides_for_all_its_specs_at_once(coupling, data):
    mask = coins(data.draw, coupling.grid_shape)
    before = {spec: storage_of(spec.param).clone() for spec in coupling.blocks()}
    coupling.apply_mask(mask)
    for spec, order in zip(coupling.specs, coupling.orders, strict=True):
        wanted = before[spec]
        for at, where in elements(spec).items():
            if mask[tuple(at[d] for d in order)]:
                wanted[where] = 0
        assert torch.equal(storage_of(spec.param), wanted)
        assert torch.equal(spec.data == 0, coupling.get_masks(mask)[spec])


@given(couplings())
def test_a_coupling_reduces_over_all_its_specs(coupling):
    joined = {at: [] for at in itertools.product(*map(range, coupling.grid_shape))}
    for spec, order in zip(coupling.specs, coupling.orders, strict=True):
        for at, where in elements(spec).items():
            joined[tuple(at[d] for d in order)] += storage_of(spec.param)[where].tolist()
    norms, sums, sizes = coupling.norms(), coupling.reduce(None, lambda b: b.sum(-1)), coupling.block_sizes()
    least, most = coupling.min(), coupling.max()
    for at, listed in joined.items():
        values = torch.tensor(listed, dtype=torch.float64)
        assert math.isclose(norms[at], values.norm())
        assert math.isclose(sums[at], values.sum(), abs_tol=1e-12)
        assert (least[at], most[at], sizes[at]) == (values.min(), values.max(), len(values))
    assert coupling.numel() == sum(map(len, joined.values()))


def test_a_couplings_block_view_lays_blocks_end_to_end():
    up, down = torch.arange(6.0).view(3, 2), torch.arange(12.0).view(4, 3)
    neurons = BlockCoupling([BlockSpec(up, (1, -1)), BlockSpec(down, (-1, 1))], orders=[(0, 1), (1, 0)], name="mlp")
    assert neurons.shape == (-1, -1)
    assert neurons.numel_per_block() == 6
    assert neurons.block_view()[1, 0].tolist() == [2, 3, 1, 4, 7, 10]
    assert neurons.data[neurons.specs[0]] is not None
    doubled = {spec: 2 * spec.data for spec in neurons.blocks()}
    assert torch.equal(neurons.norms(doubled), 2 * neurons.norms())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda a, b: BlockCoupling([a, b], name="mlp"), r"coupling 'mlp' do not agree: \(4, 1\) and \(1, 4\)"),
        (lambda a, b: BlockCoupling([a, b], orders=[(0, 1)]), "2 members, but 1 orders"),
        (lambda a, b: BlockCoupling([a, b], orders=[(0, 1), (1, 1)]), r"order \(1, 1\).*does not permute"),
        (lambda a, b: BlockCoupling([a, a]), "twice"),
        (lambda a, b: BlockCoupling([]), "no specs"),
        (lambda a, b: BlockCoupling([a, b], [None, (1, 0)]).norms({a: torch.ones(4, 4)}), "no values for BlockSpec"),
        (lambda a, b: BlockCoupling([a, b], [None, (1, 0)]).norms(torch.ones(4, 4)), "pass a mapping"),
    ],
)
def test_couplings_that_do_not_fit_raise_an_error(make, text):
    with pytest.raises(CouplingError, match=text):
        make(BlockSpec(torch.ones(4, 4), (1, -1)), BlockSpec(torch.ones(4, 4), (-1, 1)))


def test_a_coupled_model_can_be_copied():
    model = nn.Sequential(nn.Linear(2, 4, bias=False), nn.Linear(4, 2, bias=False))
    neurons = BlockCoupling([BlockSpec(model[0].weight, (1, -1)), BlockSpec(model[1].weight, (-1, 1))], [None, (1, 0)])
    twin, other = copy.deepcopy((model, neurons))
    other.apply_mask(torch.tensor([[True], [False], [False], [True]]))
    assert not twin[0].weight[0].any()
    assert not twin[1].weight[:, 3].any()
    assert model[0].weight.all()


def test_a_spec_stays_a_key_while_its_parameter_changes_format():
    weight = nn.Parameter(torch.ones(4, 3, 2, 2))
    spec = BlockSpec(weight, (1, -1, -1, -1))
    kept = {spec: "mask"}
    weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    assert kept[BlockSpec(weight, (1, -1, -1, -1))] == "mask"
