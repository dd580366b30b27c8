"""The public contract, row by row: the members of views, blocks and scopes mean what the documentation says."""

from __future__ import annotations

import inspect
import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import block_shapes, views
from torch import nn

import sparse_lightning
from sparse_lightning import (
    BlockCoupling,
    BlockSpec,
    CouplingError,
    LayoutError,
    ScopeCoupling,
    ScopeSpec,
    SparseBlock,
    SparseScope,
    SparsityBuilder,
    View,
    copy_,
    empty_strided,
)


def neurons(up=None, down=None):
    """Rows of one weight coupled with columns of the next."""
    up = torch.randn(4, 3) if up is None else up
    down = torch.randn(2, 4) if down is None else down
    return BlockCoupling([BlockSpec(up, (1, -1)), BlockSpec(down, (-1, 1))], orders=[None, (1, 0)])


# Members of blocks


def test_ndim_is_that_of_the_view():
    assert BlockSpec(torch.ones(8), (2,)).ndim == 1
    assert BlockSpec(View(torch.ones(8, 16), (8, 1, 8, 2), (16, 16, 1, 8)), (1, 1, 1, 2)).ndim == 4
    assert neurons().ndim == 2


@given(views(), st.data())
def test_nnz_counts_weights_above_eps(view, data):
    block = data.draw(block_shapes(view.shape, divide=False))
    spec = BlockSpec(view, block, edge="partial")
    eps = data.draw(st.integers(0, view.param.numel() + 1))
    assert spec.nnz(eps) == int((view.read().abs() > eps).sum())


def test_nnz_of_weights_and_nnz_of_blocks():
    weight = torch.ones(4, 6)
    spec = BlockSpec(weight, (2, 3))
    assert (spec.nnz(), spec.nnz_blocks()) == (24, 4)
    weight[0:2, 0:3] = 1e-9
    weight[3, 5] = 0
    assert (spec.nnz(), spec.nnz_blocks()) == (17, 3)
    assert (spec.nnz(eps=1e-10), spec.nnz_blocks(eps=1e-10)) == (23, 4)
    weight[0, 0] = math.nan
    assert (spec.nnz(), spec.nnz_blocks()) == (18, 4), "NaN is not zero"


def test_nnz_of_couplings_and_scopes_adds_up():
    up, down = torch.ones(4, 3), torch.ones(2, 4)
    up[0], down[1] = 0, 0
    coupling = neurons(up, down)
    assert coupling.nnz() == 9 + 4
    assert coupling.nnz_blocks() == 4
    other = BlockSpec(torch.eye(4), (4, 1))
    scope = ScopeSpec(coupling)
    assert scope.nnz() == 13
    assert ScopeCoupling([scope, ScopeSpec(other)]).nnz() == 13 + 4
    assert scope.nnz(eps=1.0) == 0


@given(views(), st.data())
def test_reduce_takes_a_function_of_the_merged_block_view(view, data):
    spec = BlockSpec(view, data.draw(block_shapes(view.shape)))
    seen = []
    found = spec.reduce(None, lambda b: seen.append(b) or b.abs().amax(-1))
    [merged] = seen
    assert torch.equal(merged, View.block_view_of(view.read(), spec.shape, merge=True))
    assert torch.equal(found, spec.norms(p=math.inf))


def test_reduce_may_look_at_all_blocks_at_once_and_reduce_chunks_at_each_alone():
    weight = torch.rand(2048, 2048)
    spec = BlockSpec(weight, (32, 32))
    calls = []
    relative = spec.reduce(None, lambda b: calls.append(b.shape) or b.amax(-1) / b.max())
    assert calls == [(64, 64, 1024)]
    assert torch.equal(relative, spec.max() / weight.max())
    calls.clear()
    assert torch.equal(spec.reduce_chunks(None, lambda b: calls.append(b.shape) or b.amax(-1)), spec.max())
    assert len(calls) > 1, "a bounded number of blocks at a time"


def test_reduce_of_values_of_a_coupling_and_of_edges():
    coupling = neurons()
    assert torch.allclose(coupling.reduce(None, lambda b: b.norm(dim=-1)), coupling.norms())
    doubled = {spec: 2 * spec.data for spec in coupling.blocks()}
    assert torch.allclose(coupling.reduce(doubled, lambda b: b.norm(dim=-1)), 2 * coupling.norms())
    ragged = BlockSpec(torch.randn(5, 7), (2, 3), edge="partial")
    sizes = []
    assert torch.equal(ragged.reduce(None, lambda b: sizes.append(b.shape[-1]) or b.amax(-1)), ragged.max())
    assert sorted(sizes) == [1, 2, 3, 6], "one call for the blocks of each size"


@pytest.mark.parametrize("fn", [torch.sum, lambda b: b, lambda b: b.sum(-1, keepdim=True), lambda b: 1.0])
def test_reduce_refuses_a_result_that_is_not_a_grid(fn):
    with pytest.raises(LayoutError, match=r"reduce_fn.*grid.*\(2, 2\).*b\.sum\(-1\)"):
        BlockSpec(torch.ones(4, 6), (2, 3)).reduce(None, fn)


def test_expand_block_tensor_gives_block_values_the_shape_of_the_grid():
    rows = BlockSpec(torch.ones(4, 3), (1, -1))
    values = torch.arange(4.0)
    for given_values in (values, values.view(2, 2), values.view(4, 1)):
        assert torch.equal(rows.expand_block_tensor(given_values), values.view(4, 1))
    assert neurons().expand_block_tensor(block_values=values).shape == (4, 1)
    with pytest.raises(LayoutError, match=r"3 values for the 4 blocks"):
        rows.expand_block_tensor(torch.ones(3))


def test_the_former_expand_block_tensor_keeps_another_name():
    grid = torch.arange(4.0).view(2, 2)
    wide = BlockSpec(torch.ones(4, 6), (2, 3)).expand_to_block_view(grid)
    assert wide.shape == (2, 2, 2, 3)
    assert torch.equal(wide[1, 0], torch.full((2, 3), 2.0))


def test_parameters_are_the_views_of_each_spec():
    fused = nn.Parameter(torch.ones(8, 4))
    halves = [View(fused, (4, 4), (4, 1), offset=16 * i) for i in range(2)]
    specs = [BlockSpec(half, (1, -1)) for half in halves]
    coupling = BlockCoupling(specs)
    assert coupling.parameters() == halves
    assert specs[1].parameters() == [halves[1]]
    assert [p is fused for p in coupling.unique_params()] == [True]
    scope = ScopeSpec(coupling)
    assert scope.parameters() == halves
    assert [p is fused for p in scope.unique_params()] == [True]


def test_get_masks_takes_block_masks():
    coupling = neurons()
    mask = torch.tensor([[True], [False], [False], [True]])
    found = coupling.get_masks(block_masks=mask)
    assert [m.sum().item() for m in found.values()] == [6, 4]


def test_empty_orders_are_no_orders():
    a, b = BlockSpec(torch.ones(4, 4), (2, 2)), BlockSpec(torch.ones(2, 2), (1, 1))
    assert BlockCoupling([a, b], orders=[]).orders == BlockCoupling([a, b]).orders
    assert ScopeCoupling([ScopeSpec(a), ScopeSpec(b)], orders=[]).numblk_per_scope() == 8
    built = SparsityBuilder().add_block("a", torch.ones(4, 4), (2, 2)).add_block("b", torch.ones(2, 2), (1, 1))
    assert built.couple_blocks("both", ["a", "b"], orders=[]).get_block("both").numblk() == 4


# Members of views


@given(views(), st.data())
def test_writes_broadcast_as_tensors_do(view, data):
    shape = [data.draw(st.sampled_from([1, n])) for n in view.shape][data.draw(st.integers(0, view.ndim)) :]
    values = torch.arange(1.0, math.prod(shape) + 1).view(shape)
    wanted = view.read().clone().copy_(values)
    kind = data.draw(st.sampled_from(["data", "set_data", "copy_", "copy_ of a view"]))
    if kind == "data":
        view.data = values
    elif kind == "set_data":
        BlockSpec(view, ()).set_data(values)
    else:
        copy_(view, values if kind == "copy_" else View.from_existing(values))
    assert torch.equal(view.read(), wanted)


@pytest.mark.parametrize("value", [3, 2.5, True, torch.tensor(4.0), torch.tensor([[7]])], ids=repr)
def test_writes_take_scalars(value):
    param = nn.Parameter(torch.zeros(3, 4))
    backwards = View(param, (3, 2), (4, -2), 3)
    wanted = torch.zeros(3, 4)
    wanted[:, 1::2] = value
    for write in (
        lambda: setattr(backwards, "data", value),
        lambda: BlockSpec(backwards, (1, 1)).set_data(value),
        lambda: copy_(backwards, value),
    ):
        param.detach().zero_()
        write()
        assert torch.equal(param.detach(), wanted)


def test_writes_that_do_not_broadcast_are_refused():
    target = empty_strided((2, 3), (3, 1))
    for values in (torch.ones(2), torch.ones(1, 2, 3, 3), torch.ones(3, 3), torch.ones(0)):
        with pytest.raises(LayoutError, match=r"can't copy shape .* to shape \(2, 3\)"):
            target.data = values


def test_a_broadcast_source_in_the_same_storage_is_read_before_it_is_written():
    storage = torch.arange(6.0)
    View(storage, (2, 3), (3, 1)).data = storage[1:4]
    assert storage.tolist() == [1, 2, 3, 1, 2, 3]


def test_from_existing_keeps_the_subclass():
    class Own(View):
        pass

    tensor = torch.ones(2, 3)
    made = Own.from_existing(tensor)
    assert type(made) is Own
    assert Own.from_existing(made) is made
    assert View.from_existing(made) is made
    assert type(View.from_existing(tensor)) is View


def test_eq_with_something_else_is_not_implemented():
    class Same:
        def __eq__(self, other):
            return True

        __hash__ = None

    view = View.from_existing(torch.ones(2))
    spec = BlockSpec(view, (1,))
    assert view.__eq__(1) is NotImplemented
    assert spec.__eq__(1) is NotImplemented
    assert view == Same()
    assert view != 1


def test_reading_data_through_negative_strides_warns_that_it_is_a_copy():
    param = torch.arange(4.0)
    view = View(param, (4,), (-1,), 3)
    spec = BlockSpec(view, (2,))
    for read in (lambda: view.data, lambda: spec.data, lambda: BlockCoupling([spec]).data[spec]):
        with pytest.warns(sparse_lightning.CopyWarning, match="copy.*negative strides.*lost") as caught:
            assert read().tolist() == [3, 2, 1, 0]
        assert caught[0].filename == __file__, "it points to the caller"
    with pytest.warns(sparse_lightning.CopyWarning):
        view.data += 1  # reads a copy, and writes it through
    assert param.tolist() == [1, 2, 3, 4]
    with pytest.warns(sparse_lightning.CopyWarning):
        assert spec.block_view().tolist() == [[4, 3], [2, 1]]


def test_what_needs_no_write_reads_without_a_warning():
    view = View(torch.arange(4.0), (4,), (-1,), 3)
    spec = BlockSpec(view, (2,))
    assert view.read().tolist() == [3, 2, 1, 0]
    assert spec.reduce(None, lambda b: b.sum(-1)).tolist() == [5, 1]
    assert spec.reduce_chunks(None, lambda b: b.sum(-1)).tolist() == [5, 1]
    assert spec.norms(p=1).tolist() == [5, 1]
    spec.soft_threshold(0.5, conditioners=torch.ones(4))
    assert View(torch.ones(1, 3), (1, 3), (-3, 1)).data.tolist() == [[1, 1, 1]], "one element has no direction"


# Scopes


@given(st.data())
def test_block_to_scope_and_scope_to_block_are_the_order_of_gather(data):
    grid = data.draw(st.lists(st.sampled_from([1, 2, 4, 6]), min_size=1, max_size=3))
    block = BlockSpec(torch.rand(grid), (1,) * len(grid))
    scope = ScopeSpec(block, data.draw(block_shapes(grid)))
    scores = torch.rand(block.grid_shape)
    gathered = scope.gather({block: scores})
    for at in torch.cartesian_prod(*map(torch.arange, scope.grid_shape)).view(-1, len(grid)).tolist():
        members = scope.scope_to_block(at)
        assert [scores[place] for place in members] == gathered[tuple(at)].tolist()
        assert all(scope.block_to_scope(place) == tuple(at) for place in members)


def test_indices_may_be_tensors():
    scope = ScopeSpec(BlockSpec(torch.ones(2, 8), (1, 1)), (1, 4))
    assert scope.block_to_scope(torch.tensor([[0, 3], [1, 4]])).tolist() == [[0, 0], [1, 1]]
    assert scope.scope_to_block(torch.tensor([[1, 1]])).tolist() == [[[1, 4], [1, 5], [1, 6], [1, 7]]]


@given(st.data())
def test_indices_may_be_numbers_in_row_major_order(data):
    grid = data.draw(st.lists(st.sampled_from([1, 2, 4, 6]), min_size=1, max_size=3))
    scope = ScopeSpec(BlockSpec(torch.ones(grid), (1,) * len(grid)), data.draw(block_shapes(grid)))
    gathered = scope.gather({scope.block: torch.arange(scope.numblk()).view(scope.block.grid_shape)})
    for number, members in enumerate(gathered.flatten(0, -2).tolist()):
        assert scope.scope_to_block(number) == members
        assert {scope.block_to_scope(member) for member in members} == {number}
    with pytest.raises(LayoutError, match="outside of the grid"):
        scope.block_to_scope(scope.numblk())


def test_in_a_coupling_the_block_is_named_and_the_scope_grid_is_permuted():
    a, b = BlockSpec(torch.ones(4, 6), (1, 1), name="a"), BlockSpec(torch.ones(3, 2), (1, 1), name="b")
    coupling = ScopeCoupling([ScopeSpec(a, (2, 2)), ScopeSpec(b, (1, 1))], orders=[None, (1, 0)])
    assert coupling.grid_shape == (2, 3)
    assert coupling.block_to_scope((3, 0), a) == (1, 0)
    assert coupling.block_to_scope((2, 0), b) == (0, 2)
    assert coupling.scope_to_block((0, 2), b) == [(2, 0)]
    assert coupling.scope_to_block((0, 2), a) == [(0, 4), (0, 5), (1, 4), (1, 5)]
    with pytest.raises(CouplingError, match="several blocks: pass the block"):
        coupling.block_to_scope((0, 0))
    with pytest.raises(CouplingError, match="not a block of"):
        coupling.scope_to_block((0, 0), BlockSpec(torch.ones(1), (1,)))


@pytest.mark.parametrize("index", [(2, 0), (0,), (0, -1), (0, 0, 0)])
def test_an_index_outside_of_the_grid_is_refused(index):
    scope = ScopeSpec(BlockSpec(torch.ones(2, 8), (1, 1)), (1, 4))
    for find in (scope.block_to_scope, scope.scope_to_block):
        with pytest.raises(LayoutError, match=r"outside of the grid \(2, \d\)"):
            find(index)


# Thresholds


def conditioned(**arguments):
    """A conditioned step on a block whose weights have conditioners far apart."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 64, generator=generator, dtype=torch.float64)
    h = torch.logspace(-6, 2, 64, dtype=torch.float64).expand(4, 64)
    spec = BlockSpec(weight, (1, -1))
    spec.soft_threshold(3.0, conditioners=h.clone(), **arguments)
    return weight


def test_soft_threshold_iterates_as_asked():
    exact = conditioned()
    one, few = conditioned(max_iter=1), conditioned(max_iter=4)
    errors = [float((x - exact).abs().max()) for x in (one, few, conditioned(max_iter=32))]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-12
    assert 0 < float((conditioned(atol=1e-2) - exact).abs().max()) < 1e-1, "it stops where a step is small"


def test_soft_threshold_adds_eps_to_the_conditioners_and_scales_the_thresholds():
    v, h = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 4.0]])
    found, wanted = v.clone(), v.clone()
    BlockSpec(found, (1, 2)).soft_threshold(0.5, conditioners=h, eps=0.25, scale=2.0)
    BlockSpec(wanted, (1, 2)).soft_threshold(1.0, conditioners=h + 0.25)
    torch.testing.assert_close(found, wanted)
    BlockSpec(v, (1, 2)).soft_threshold(0.5, scale=2.0)
    torch.testing.assert_close(v, torch.tensor([[2.4, 3.2]]))


def test_scopes_pass_the_arguments_of_the_iteration_on():
    v = torch.tensor([[3.0, 4.0], [3.0, 4.0]])
    h = torch.tensor([[1.0, 4.0], [1.0, 4.0]])
    wanted = v[:1].clone()
    BlockSpec(wanted, (1, 2)).soft_threshold(1.0, conditioners=h[:1], max_iter=3, atol=0.1, eps=0.5, scale=0.5)
    scope = ScopeSpec(BlockSpec(v, (1, 2)), (1, 1))
    scope.soft_threshold(torch.tensor([[1.0], [0.0]]), conditioners=h, max_iter=3, atol=0.1, eps=0.5, scale=0.5)
    torch.testing.assert_close(v, torch.cat([wanted, torch.tensor([[3.0, 4.0]])]))


@pytest.mark.parametrize("wrong", [{"max_iter": 0}, {"atol": -1.0}, {"eps": -1.0}, {"scale": -1.0}], ids=str)
def test_arguments_of_the_iteration_out_of_range_are_refused(wrong):
    with pytest.raises(sparse_lightning.SparsityError, match=next(iter(wrong))):
        conditioned(**wrong)


@pytest.mark.parametrize(
    ("kind", "member", "names"),
    [
        (SparseBlock, "apply_mask", ["values"]),
        (SparseBlock, "apply_multiplier", ["values"]),
        (SparseBlock, "hard_threshold", ["values"]),
        (SparseBlock, "soft_threshold", ["values", "conditioners", "max_iter", "atol", "eps", "scale"]),
        (SparseScope, "soft_threshold", ["values", "conditioners", "max_iter", "atol", "eps", "scale"]),
    ],
)
def test_arguments_that_would_be_mistaken_are_keyword_only(kind, member, names):
    taken = inspect.signature(getattr(kind, member)).parameters
    assert [name for name, p in taken.items() if p.kind is p.KEYWORD_ONLY] == names


# Names


@pytest.mark.parametrize("name", ["Criterion", "Save", "Load", "State", "Scorer", "InputNorms", "nm_select", "Strided"])
def test_top_level_names(name):
    assert name in sparse_lightning.__all__
    assert getattr(sparse_lightning, name).__name__ == name


def test_old_spellings_of_arguments_work_for_a_release():
    spec = BlockSpec(torch.arange(24.0).view(4, 6), (2, 3))
    mask = torch.eye(2) > 0
    with pytest.warns(DeprecationWarning, match=r"get_masks\(block_mask=…\) is deprecated: use .*block_masks=…"):
        [old] = spec.get_masks(block_mask=mask).values()
    assert torch.equal(old, spec.get_masks(mask)[spec])
    with pytest.warns(DeprecationWarning, match=r"reduce\(fn=…\) is deprecated"):
        assert torch.equal(spec.reduce(None, fn=torch.sum), spec.reduce(None, lambda b: b.sum(-1)))
    with pytest.warns(DeprecationWarning, match=r"expand_block_tensor\(grid=…\) is deprecated"):
        assert torch.equal(spec.expand_block_tensor(grid=mask), spec.expand_to_block_view(mask))
    with pytest.raises(TypeError, match="both block_masks and block_mask"):
        spec.get_masks(mask, block_mask=mask)


# Dtypes


@pytest.mark.parametrize(
    "dtype", [torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int32, torch.int64], ids=str
)
def test_blocks_of_weights_that_are_not_real_floats_are_refused_with_the_reason(dtype):
    weight = torch.ones(4, 4).to(dtype)
    with pytest.raises(LayoutError, match=rf"'fc'.*{dtype}.*floating-point"):
        BlockSpec(weight, (2, 2), name="fc")
    spec = BlockSpec(torch.ones(4, 4), (2, 2))
    if dtype.is_complex:
        for use in (spec.norms, spec.min, lambda v: spec.apply_mask(torch.ones(2, 2) > 0, values=v)):
            with pytest.raises(LayoutError, match=f"{dtype}"):
                use(weight)


def test_a_parameter_that_becomes_complex_is_refused_when_it_is_used():
    weight = nn.Parameter(torch.ones(4, 4))
    spec = BlockSpec(weight, (2, 2))
    weight.data = weight.data.to(torch.complex64)
    for use in (spec.norms, spec.nnz, lambda: spec.apply_mask(torch.ones(2, 2) > 0)):
        with pytest.raises(LayoutError, match=r"torch\.complex64"):
            use()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_blocks_of_eight_bit_floats_are_refused(dtype):
    with pytest.raises(LayoutError, match=f"{dtype}"):
        BlockSpec(torch.ones(4, 4).to(dtype), (2, 2))


def test_quantised_tensors_have_no_views():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.qint8)
    with pytest.raises(LayoutError, match=r"quantised.*qint8"):
        View.from_existing(quantised)
    with pytest.raises(LayoutError, match=r"quantised.*qint8"):
        BlockSpec(quantised, (2, 2))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool, torch.uint8, torch.int64], ids=str)
def test_views_move_values_of_any_dtype(dtype):
    param = torch.arange(6).view(2, 3).to(dtype)
    view = View(param, (3, 2), (-1, 3), 2)
    assert torch.equal(view.read(), param.T.flip(0))
    view.data = 1
    assert (param == 1).all()
    view.apply_mask(torch.tensor([[True, False]] * 3), (1, 1))
    assert param.tolist() == torch.tensor([[0, 0, 0], [1, 1, 1]]).to(dtype).tolist()


# Tracing


def in_a_view(x):
    return View(x, (2, 6), (12, 1)).data.sum()


def in_a_layout(x):
    return x * sparse_lightning.Layout.of(x).numel


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")  # a notice of torch.compile
@pytest.mark.parametrize("fn", [in_a_view, in_a_layout])
def test_torch_compile_runs_views_and_refuses_a_full_graph_with_the_reason(fn):
    x = torch.randn(4, 6)
    torch.compiler.reset()
    assert torch.equal(torch.compile(fn, backend="eager")(x), fn(x))
    torch.compiler.reset()
    with pytest.raises(Exception, match="Layout and View consist of integers"):
        torch.compile(fn, backend="eager", fullgraph=True)(x)


class Runs(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x):
        return self.fn(x)


@pytest.mark.parametrize("fn", [in_a_view, in_a_layout])
def test_torch_export_takes_fixed_shapes_and_refuses_dynamic_ones(fn):
    x, other = torch.randn(4, 6), torch.randn(4, 6)
    exported = torch.export.export(Runs(fn), (x,), strict=False).module()
    assert torch.equal(exported(other), fn(other))
    batch = {"x": {0: torch.export.Dim("batch", min=2, max=64)}}
    with pytest.raises(LayoutError, match="dynamic dimension has no Layout"):
        torch.export.export(Runs(fn), (x,), strict=False, dynamic_shapes=batch)
    with pytest.raises(Exception, match="Layout and View consist of integers"):
        torch.export.export(Runs(fn), (x,), strict=True, dynamic_shapes=batch)
