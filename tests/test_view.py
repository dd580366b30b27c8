"""Views: what they read and write is index arithmetic on the flat storage of their parameter."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import block_shapes, data_of, layouts, offsets, shapes, storage_of, tensors, views
from torch import nn

from sparse_lightning import Layout, LayoutError, View, copy_, empty_strided


def grid_of(shape, block):
    return tuple(n // b for n, b in zip(shape, block, strict=True))


def coin_mask(draw, shape):
    n = Layout(shape).numel
    return torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=torch.bool).view(shape)


@given(views())
def test_reading_is_index_arithmetic(view):
    wanted = storage_of(view.param)[offsets(view.layout)]
    assert torch.equal(data_of(view).flatten(), wanted)


@given(views(signed=False))
def test_data_is_live_and_shares_the_storage(view):
    data = view.data
    assert data.untyped_storage().data_ptr() == view.param.untyped_storage().data_ptr()
    data.fill_(-1)
    assert (storage_of(view.param)[offsets(view.layout)] == -1).all()


@given(views())
def test_write_through_is_seen_by_the_parameter_and_every_other_view(view):
    other = View.from_existing(view.param)
    wanted = storage_of(view.param).clone()
    new = -torch.arange(1.0, view.numel() + 1)
    wanted[offsets(view.layout)] = new
    pointer = view.param.data_ptr()
    view.data = new.view(view.shape)
    assert torch.equal(storage_of(view.param), wanted), "an element outside of the view changed, or one inside did not"
    assert torch.equal(other.data, view.param.detach())
    assert view.param.data_ptr() == pointer, "the parameter moved"


@given(views(), st.data())
def test_masking_is_index_arithmetic(view, data):
    block = data.draw(block_shapes(view.shape))
    mask = coin_mask(data.draw, grid_of(view.shape, block))
    wanted = storage_of(view.param).clone()
    for coord in itertools.product(*map(range, view.shape)):
        if mask[tuple(x // b for x, b in zip(coord, block, strict=True))]:
            wanted[view.layout(coord)] = 0
    view.apply_mask(mask, block)
    assert torch.equal(storage_of(view.param), wanted)


@given(views(), st.data())
def test_multiplying_is_index_arithmetic(view, data):
    block = data.draw(block_shapes(view.shape))
    grid = coin_mask(data.draw, grid_of(view.shape, block)) * 2.0 - 0.5
    wanted = storage_of(view.param).clone()
    for coord in itertools.product(*map(range, view.shape)):
        wanted[view.layout(coord)] *= grid[tuple(x // b for x, b in zip(coord, block, strict=True))]
    view.apply_multiplier(grid, block)
    assert torch.equal(storage_of(view.param), wanted)


@given(tensors(), st.data())
def test_block_views_are_what_slicing_gives(tensor, data):
    block = data.draw(block_shapes(tensor.shape))
    apart = View.block_view_of(tensor, block, reorder=False)
    reordered, merged = View.block_view_of(tensor, block), View.block_view_of(tensor, block, merge=True)
    for view in (apart, reordered):
        assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr(), "a block view copied"
    for at in itertools.product(*map(range, grid_of(tensor.shape, block))):
        sliced = tensor[tuple(slice(i * b, (i + 1) * b) for i, b in zip(at, block, strict=True))]
        assert torch.equal(reordered[at], sliced)
        assert torch.equal(merged[at], sliced.flatten())
        assert torch.equal(apart[tuple(x for i in at for x in (i, slice(None)))], sliced)


def test_a_merged_block_view_copies_only_where_a_block_does_not_lie_on_one_stride():
    weight = torch.ones(4, 8)
    assert View.block_view_of(weight, (1, 4), merge=True).untyped_storage().data_ptr() == weight.data_ptr()
    assert View.block_view_of(weight, (2, 4), merge=True).untyped_storage().data_ptr() != weight.data_ptr()


@given(shapes(max_dims=3), st.data())
def test_a_grid_broadcast_to_elements_repeats_each_value_over_its_block(grid_shape, data):
    grid = torch.rand(grid_shape)
    block = [data.draw(st.integers(1, 3)) for _ in grid_shape]
    wide = View.broadcast_block_to_element(grid, block)
    wanted = grid
    for d, b in enumerate(block):
        wanted = wanted.repeat_interleave(b, d)
    assert torch.equal(wide, wanted)
    thin = View.broadcast_block_to_element(grid, block, fake=True)
    apart = View.block_view_of(wide, block, reorder=False)
    assert torch.equal(thin.expand_as(apart), apart)


@given(views(), st.data())
def test_linear_offsets_and_rows_and_columns(view, data):
    coords = torch.tensor(list(itertools.product(*map(range, view.shape)))).view(-1, view.ndim)
    where = view.linear_offset(coords)
    assert where.tolist() == offsets(view.layout)
    if view.param.ndim != 2:
        with pytest.raises(LayoutError, match="two dimensions"):
            view.to_param_rc(coords)
    else:
        rows, columns = view.to_param_rc(coords)
        assert torch.equal(view.param[rows, columns], data_of(view).flatten())


@given(views(), st.data())
def test_the_same_view_of_a_gradient_with_other_strides_reads_the_same_places(view, data):
    """The gradient holds at each place the weight of that place, so the two views must read alike."""
    order = data.draw(st.permutations(range(view.param.ndim)))
    back = [order.index(d) for d in range(len(order))]
    gradient = view.param.detach().permute(order).contiguous().permute(back)
    try:
        seen = view.like(gradient)
    except LayoutError:
        assert any(len(d) > 1 for d in _digits(view)), "a view that merges no dimensions can follow any strides"
        return
    assert torch.equal(data_of(seen), data_of(view))
    assert seen.param is gradient


def _digits(view):
    from sparse_lightning.layout.coordinates import coordinates_in

    found = coordinates_in(view.layout, Layout.of(view.param))
    return found.digits if found else [(0, 0)]


@given(layouts(strides=st.integers(0, 12)))
def test_empty_strided_is_torch_empty_strided(layout):
    ours = empty_strided(layout.shape, layout.stride, dtype=torch.float64)
    theirs = torch.empty_strided(layout.shape, layout.stride, dtype=torch.float64)
    assert ours.shape == tuple(theirs.shape)
    assert ours.stride == theirs.stride()
    assert ours.data.dtype == torch.float64
    assert ours.param.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()


@given(layouts(min_size=0))
def test_empty_strided_holds_any_strides_in_the_least_storage(layout):
    view = empty_strided(layout.shape, layout.stride)
    assert (view.shape, view.stride) == (layout.shape, layout.stride)
    reached = offsets(layout)
    assert view.param.numel() == layout.storage_size == (max(reached) - min(reached) + 1 if reached else 0)


@given(st.data())
def test_copying_between_any_two_layouts(data):
    source = data.draw(views())
    layout = data.draw(layouts(max_dims=0) if not source.ndim else _same_shape(source.shape))
    target = empty_strided(layout.shape, layout.stride)
    target.param.fill_(-7)
    if not layout.is_injective():
        with pytest.raises(LayoutError, match="twice"):
            copy_(target, source)
        return
    copy_(target, source)
    assert torch.equal(data_of(target), data_of(source))
    untouched = set(range(target.param.numel())) - set(offsets(target.layout))
    assert (target.param[list(untouched)] == -7).all()
    back = data_of(source).clone()
    source.param.detach().zero_()
    copy_(source, target)
    assert torch.equal(data_of(source), back)


@st.composite
def _same_shape(draw, shape):
    """Dense strides in a random order, some spread, some negative: mostly injective."""
    strides, step = [0] * len(shape), draw(st.integers(1, 2))
    for d in draw(st.permutations(range(len(shape)))):
        strides[d] = step * draw(st.sampled_from([1, 1, -1]))
        step = step * shape[d] + draw(st.integers(0, 2))
    return Layout(shape, strides)


@given(st.integers(1, 12), st.integers(0, 6), st.integers(0, 6), st.sampled_from([1, -1]), st.sampled_from([1, -1]))
def test_copying_within_one_storage_reads_before_it_writes(n, source_at, target_at, source_step, target_step):
    storage = torch.arange(20.0)
    source = View(storage, (n,), (source_step,), source_at + (n - 1 if source_step < 0 else 0))
    target = View(storage, (n,), (target_step,), target_at + (n - 1 if target_step < 0 else 0))
    wanted = data_of(source).clone()
    copy_(target, source)
    assert torch.equal(data_of(target), wanted)


def test_copying_shapes_that_differ_raises_an_error():
    with pytest.raises(LayoutError, match=r"\(3,\) to shape \(4,\)"):
        copy_(torch.ones(4), torch.ones(3))


def test_copying_converts_the_dtype():
    target = empty_strided((4,), (-1,), dtype=torch.bfloat16)
    copy_(target, torch.arange(4.0))
    assert data_of(target).tolist() == [0, 1, 2, 3]


OUTSIDE = [
    ((3, 4), (4, 1), 1, "outside of its parameter of shape"),
    ((4, 4), (1, 1), 7, "reaches from element 7 to 13"),
    ((3,), (-1,), None, "start a negative stride at the end of its range"),
    ((3, 2), (4,), None, "one stride for each dimension"),
]


@pytest.mark.parametrize(("shape", "stride", "offset", "text"), OUTSIDE)
def test_a_view_outside_of_its_parameter_raises_an_error(shape, stride, offset, text):
    with pytest.raises(LayoutError, match=text):
        View(torch.ones(3, 4), shape, stride, offset)


def test_a_parameter_that_is_a_slice_does_not_lend_its_neighbours():
    """Columns 0 to 3 of a matrix: the storage goes on, the parameter does not."""
    param = torch.arange(40.0).view(4, 10)[:, :4]
    assert View(param, (4, 2), (10, 1), 2).data[3].tolist() == [32, 33]
    with pytest.raises(LayoutError, match=r"outside of its parameter of shape \(4, 4\), stride \(10, 1\)"):
        View(param, (4, 5), (10, 1))
    with pytest.raises(LayoutError, match="make the shape, the strides or the offset smaller"):
        View(param, (3,), (3,), 0)


def test_an_overlapping_view_can_be_read_and_not_written():
    windows = View(torch.arange(6.0), (4, 3), (1, 1))
    assert windows.data[2].tolist() == [2, 3, 4]
    for write in (
        lambda: windows.apply_mask(torch.ones(4, 3, dtype=torch.bool), (1, 1)),
        lambda: windows.apply_multiplier(torch.ones(4, 3), (1, 1)),
        lambda: setattr(windows, "data", torch.zeros(4, 3)),
    ):
        with pytest.raises(LayoutError, match="some element twice: it can be read, but not written"):
            write()


def test_autograd_notices_a_write_between_forward_and_backward():
    for write in (
        lambda v: v.apply_mask(torch.ones(2, 2, dtype=torch.bool), (2, 2)),
        lambda v: v.apply_multiplier(torch.ones(2, 2), (2, 2)),
        lambda v: v.data.zero_(),
        lambda v: setattr(v, "data", torch.zeros(4, 4)),
    ):
        param = nn.Parameter(torch.randn(4, 4))
        loss = param.square().sum()
        write(View.from_existing(param))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_offset_none_is_the_parameters_own_and_zero_is_zero():
    param = torch.arange(10.0)[4:8]
    assert View(param, (2,), (1,)).data.tolist() == [4, 5]
    with pytest.raises(LayoutError, match="outside"):
        View(param, (2,), (1,), 0)


def test_equality_is_same_parameter_and_same_layout():
    a, b = torch.ones(2, 3), torch.ones(2, 3)
    assert View(a, (2, 3), (3, 1)) == View.from_existing(a)
    assert hash(View(a, (2, 3), (3, 1))) == hash(View.from_existing(a))
    assert View.from_existing(a) != View.from_existing(b)
    assert View(a, (3, 2), (1, 3)) != View.from_existing(a)
    assert View.from_existing(v := View.from_existing(a)) is v
    assert "View((2, 3), stride=(3, 1), offset=0" in repr(v)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 4)
        self.conv = nn.Conv2d(4, 6, 3)


def test_a_view_follows_its_parameter_to_another_dtype_and_state_dict():
    model = Model()
    rows = View(model.fc.weight, (2, 2, 6), (12, 6, 1))
    model.double()
    assert rows.data.dtype == torch.float64
    model.load_state_dict({k: torch.full_like(v, 3.0) for k, v in model.state_dict().items()})
    assert (rows.data == 3).all()


def test_views_follow_a_change_of_memory_format():
    model = Model()
    identity = View.from_existing(model.conv.weight)
    filters = View(model.conv.weight, (2, 3, 4, 3, 3), (108, 36, 9, 3, 1))
    matrix = View(model.conv.weight, (6, 36), (36, 1))
    model.to(memory_format=torch.channels_last)
    assert identity.stride == model.conv.weight.stride() != (36, 9, 3, 1)
    identity.data.fill_(2)
    assert (model.conv.weight == 2).all()
    assert torch.equal(filters.data, model.conv.weight.detach().unflatten(0, (2, 3)))
    with pytest.raises(LayoutError, match="needs a copy"):
        _ = matrix.data
    model.to(memory_format=torch.contiguous_format)
    assert torch.equal(matrix.data, model.conv.weight.detach().flatten(1))


def test_a_parameter_that_is_a_slice_is_followed_when_conversion_packs_it():
    param = nn.Parameter(torch.arange(40.0).view(4, 10)[:, 2:6])
    backwards = View(param, (4, 4), (10, -1), 5)
    before = data_of(backwards).clone()
    param.data = param.data.double()
    assert param.stride() == (4, 1)
    assert torch.equal(data_of(backwards), before.double())


def test_a_parameter_of_another_shape_raises_an_error():
    param = nn.Parameter(torch.ones(2, 3))
    view = View(param, (3,), (1,))
    param.data = torch.ones(3, 3)
    with pytest.raises(LayoutError, match=r"changed its shape from \(2, 3\) to \(3, 3\)"):
        _ = view.data


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_a_view_is_copied_with_its_model(clone):
    model = Model()
    twin, view = clone((model, View(model.fc.weight, (24,), (1,))))
    assert view.param is twin.fc.weight
    view.data.zero_()
    assert not twin.fc.weight.any()
    assert model.fc.weight.any()


def test_a_parameter_shared_by_two_modules_is_one_parameter():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    assert View.from_existing(first.weight) == View.from_existing(second.weight)
    View.from_existing(first.weight).data.zero_()
    assert not second.weight.any()


def test_nothing_keeps_a_model_alive():
    model = Model()
    view = View(model.fc.weight, (24,), (1,))
    view.apply_mask(torch.ones(6, dtype=torch.bool), (4,))
    dead = [weakref.ref(model), weakref.ref(model.conv.weight), weakref.ref(model.fc.weight)]
    del model
    gc.collect()
    assert dead[0]() is None
    assert dead[1]() is None
    del view
    assert dead[2]() is None, "something other than the view holds the parameter"


@pytest.mark.parametrize("shape", [(), (0,), (1,), (0, 3), (3, 0), (1, 1, 1)])
def test_sizes_zero_and_one(shape):
    param = torch.ones(shape)
    view = View.from_existing(param)
    assert view.numel() == param.numel()
    view.apply_mask(torch.ones(shape, dtype=torch.bool), (1,) * len(shape))
    assert not param.any()
    assert view.cosize == param.numel()


def test_reading_a_flipped_view_is_the_only_copy(copies):
    weight = torch.randn(64, 64)
    flipped = View(weight, (64, 64), (64, -1), 63)
    with copies() as counted:
        flipped.apply_mask(torch.rand(4, 4) < 0.5, (16, 16))
        flipped.apply_multiplier(torch.rand(4, 4), (16, 16))
    assert counted.largest == 16, f"a block operation made a tensor of {counted.largest} elements"
    with copies() as counted:
        _ = data_of(flipped)
    assert counted.largest == weight.numel()


def test_copying_through_a_temporary_only_where_the_layouts_overlap(copies):
    storage = torch.randn(2000)
    apart = View(storage, (500,), (2,)), View(storage, (500,), (2,), 1)
    other = torch.empty(20, 30).t(), torch.ones(30, 20)
    with copies() as counted:
        copy_(*apart)
        copy_(*other)
    assert counted.largest == 0
    with copies() as counted:
        copy_(View(storage, (500,), (1,), 1), View(storage, (500,), (1,)))
    assert counted.largest == 500
