"""Movements: a layout as view operations on a base, replayed on layouts and on real tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import layouts, offsets, storage_of, tensors, walks

from sparse_lightning import Layout
from sparse_lightning.layout.coordinates import lies_inside
from sparse_lightning.layout.view_ops import view_ops

PLAIN = {"reshape", "permute", "slice", "flip", "expand"}


@st.composite
def bases(draw):
    """Contiguous, flat, transposed, sliced, at an offset; some counted backwards, stepped over or expanded."""
    base = Layout.of(draw(tensors()))
    if base.storage_size == base.numel and draw(st.booleans()):
        base = Layout((base.numel,), None, base.offset)
    for d in range(base.ndim):
        change = draw(st.sampled_from(["", "", "", "flip", "step", "expand"]))
        if change == "flip":
            base = base.flip([d])
        elif change == "step":
            base = base.slice(d, None, None, 2)
        elif change == "expand" and base.shape[d] == 1:
            base = base.expand([3 if i == d else n for i, n in enumerate(base.shape)])
    return base


@st.composite
def walked(draw, base):
    """What a walk reaches, perhaps with its dimensions of size 1 expanded."""
    layout = draw(walks(base))
    return layout.expand([2 if n == 1 and draw(st.booleans()) else n for n in layout.shape])


@st.composite
def strided(draw, base, lowest=-9):
    """Strides near those of a base or any others, begun somewhere between its first and its last element."""
    near = [k * s for s in base.stride for k in (-2, -1, 1, 2, 3) if k * s >= lowest]
    strides = st.one_of(st.sampled_from([0, 1, 2, 3, *near]), st.integers(lowest, 9))
    layout = draw(layouts(max_dims=4, max_size=draw(st.sampled_from([3, 6])), strides=strides, min_size=0))
    low, high = base.span
    return Layout(layout.shape, layout.stride, draw(st.integers(low, max(low, high))))


def replay(steps, start):
    """Take the steps from a layout, or from a tensor."""
    for step in steps:
        start = step.of_layout(start) if isinstance(start, Layout) else step.of_tensor(start)
    return start


def names(layout, base):
    return [step.name for step in view_ops(layout, base)]


def assert_live(view: torch.Tensor, layout: Layout, tensor: torch.Tensor) -> None:
    """The view is these elements of the tensor's storage, not a copy of them."""
    assert Layout.of(view) == layout
    assert view.tolist() == storage_of(tensor)[offsets(layout)].view(layout.shape).tolist()
    if layout.numel:
        assert view.data_ptr() == storage_of(tensor).data_ptr() + layout.offset * tensor.element_size()


@given(bases(), st.data())
def test_what_view_operations_express_needs_no_as_strided(base, data):
    layout = data.draw(walked(base))
    steps = layout.movements(base)
    assert replay(steps, base) == layout
    assert {step.name for step in steps} <= PLAIN, f"{layout} is a view of {base}, but took {steps}"


@given(st.one_of(bases(), layouts(max_dims=3)), st.data())
def test_any_strided_layout_is_rebuilt_by_its_view_operations(base, data):
    layout = data.draw(strided(base))
    steps = view_ops(layout, base)
    assert replay(steps, base) == layout
    assert {step.name for step in steps} <= PLAIN | {"as_strided"}


@given(tensors(), st.data())
def test_view_operations_on_a_tensor_are_live_views_and_never_copies(tensor, data):
    layout = data.draw(walks(Layout.of(tensor), signed=False))
    assert_live(replay(view_ops(layout, Layout.of(tensor)), tensor), layout, tensor)


@given(tensors(), st.data())
def test_any_positive_strides_inside_a_tensor_are_a_live_view(tensor, data):
    layout = data.draw(strided(Layout.of(tensor), lowest=0))
    assume(lies_inside(layout, Layout.of(tensor)))
    assert_live(replay(view_ops(layout, Layout.of(tensor)), tensor), layout, tensor)


@given(tensors(), st.data())
def test_negative_strides_cost_one_flip_and_it_comes_last(tensor, data):
    layout = data.draw(walks(Layout.of(tensor)))
    steps = view_ops(layout, Layout.of(tensor))
    assert "flip" not in [step.name for step in steps[:-1]]
    assert replay(steps, tensor).flatten().tolist() == storage_of(tensor)[offsets(layout)].tolist()


@given(bases(), st.data())
def test_no_step_is_taken_in_vain(base, data):
    now = base
    for step in view_ops(data.draw(walked(base)), base):
        after = step.of_layout(now)
        assert after != now, f"{step} changes nothing"
        now = after


@given(bases())
def test_a_layout_is_its_own_base_without_an_operation(base):
    assert view_ops(base, base) == ()


BASE = Layout((12, 8))
SHORT = {
    "keys of a fused QKV": (Layout((4, 8), (8, 1), 32), BASE, ["slice"]),
    "heads of the keys": (Layout((2, 2, 8), (16, 8, 1), 32), BASE, ["slice", "reshape"]),
    "the transpose": (Layout((8, 12), (1, 8)), BASE, ["permute"]),
    "two heads": (Layout((2, 6, 8), (48, 8, 1)), BASE, ["reshape"]),
    "every third column": (Layout((12, 3), (8, 3)), BASE, ["slice"]),
    "columns backwards": (Layout((12, 8), (8, -1), 7), BASE, ["flip"]),
    "a row for many": (Layout((5, 12, 8), (0, 8, 1)), BASE, ["reshape", "expand"]),
    "nothing at all": (Layout((3, 0)), BASE, ["slice", "reshape"]),
    "channels_last filters": (Layout((4, 2 * 9), (18, 1)), Layout((4, 2, 3, 3), (18, 1, 6, 2)), ["permute", "reshape"]),
    "the diagonal": (Layout((8,), (9,)), BASE, ["reshape", "slice"]),
    "windows that overlap": (Layout((6, 3), (1, 1)), BASE, ["as_strided"]),
}


@pytest.mark.parametrize(("layout", "base", "expected"), SHORT.values(), ids=SHORT)
def test_a_simple_view_takes_few_operations(layout, base, expected):
    assert names(layout, base) == expected


@pytest.mark.parametrize(
    "layout",
    [
        Layout((12, 4, 2), (8, 1, 4)),
        Layout((12, 2, 3), (8, 4, 1), 1),
        Layout((2, 8, 6), (48, -1, 8), 7),
    ],
    ids=[
        "columns four apart coupled",
        "three of each four columns",
        "heads backwards",
    ],
)
def test_the_views_of_patterns_take_four_operations_at_most(layout):
    taken = names(layout, BASE)
    assert len(taken) <= 4
    assert "as_strided" not in taken


@pytest.mark.parametrize(
    ("base", "step"),
    [(Layout((2, 3), (4, 1)), 2), (Layout((4, 4), (6, 1)), 3), (Layout((3, 8), (1, 4), 4).permute((1, 0)), 2)],
)
def test_contiguous_dimensions_across_a_gap_of_the_base_need_no_as_strided(base, step):
    layout = base.slice(1, None, None, step).merge((0, 1))
    assert "as_strided" not in names(layout, base), f"{layout} is a slice and a reshape of {base}"


def test_a_slice_of_contiguous_dimensions_across_a_gap_needs_no_as_strided():
    base = Layout((2, 3), (4, 1))
    layout = base.slice(1, None, None, 2).merge((0, 1)).slice(0, 1, 3)
    assert "as_strided" not in names(layout, base), f"{layout} is a slice of a reshape of {base}"


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        (Layout((2, 3), (4, 1), 1), 8),
        (Layout((2, 2, 3), (12, 4, 1), 4), 24),
        (Layout((2, 2), (4, 2)), 7),
        (Layout((2, 2, 2), (7, 4, 2)), 14),
        (Layout((2, 3, 2), (12, 4, 1)), 22),
        (Layout((2, 4), (10, 2), 2), 19),
    ],
    ids=[
        "last of each four",
        "first of each four in the last of each three",
        "even ones",
        "even ones of each seven",
        "every second pair",
        "even ones but each fifth",
    ],
)
def test_a_flat_base_is_sliced_and_reshaped_without_as_strided(layout, size):
    taken = view_ops(layout, Layout((size,)))
    assert replay(taken, Layout((size,))) == layout
    assert {step.name for step in taken} <= PLAIN


def test_a_dimension_in_step_with_the_gaps_of_its_base_may_end_in_mid_row():
    assert names(Layout((3,), (3,)), Layout((4, 4), (6, 1))) == ["slice", "reshape", "slice"]


@pytest.mark.parametrize(("size", "stride"), [(3, 4), (5, 2)])
def test_a_dimension_out_of_step_with_the_gaps_of_its_base_takes_as_strided(size, stride):
    layout, base = Layout((size,), (stride,)), Layout((4, 4), (6, 1))
    assert names(layout, base) == ["as_strided"]
    assert replay(view_ops(layout, base), base) == layout


def test_view_operations_of_a_billion_elements_are_as_few_as_of_ten():
    base = Layout((10**5, 10**5))
    keys = Layout((100, 300, 10**5), (3 * 10**7, 10**5, 1), 10**9)
    assert replay(view_ops(keys, base), base) == keys
    assert len(view_ops(keys, base)) <= 4


class Guarded(torch.Tensor):
    """A tensor that has no `as_strided`, as many subclasses."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.as_strided, torch.Tensor.as_strided):
            raise TypeError("as_strided is not for this tensor")
        return super().__torch_function__(func, types, args, kwargs)


@given(tensors(), st.data())
def test_a_tensor_subclass_is_viewed_without_as_strided(tensor, data):
    layout = data.draw(walks(Layout.of(tensor), signed=False))
    view = layout.on(tensor.as_subclass(Guarded))
    assert type(view) is Guarded
    assert_live(view.as_subclass(torch.Tensor), layout, tensor)


def test_the_guard_of_the_subclass_works():
    with pytest.raises(TypeError, match="as_strided is not for this tensor"):
        torch.zeros(4).as_subclass(Guarded).as_strided((2,), (2,))


@pytest.fixture
def mesh():
    """A device mesh of this one process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "layout",
    [
        Layout((2, 2, 4), (8, 4, 1), 16),
        Layout((4, 3), (1, 4), 12),
        Layout((12, 2, 2), (4, 1, 2)),
        Layout((6, 2), (8, 3)),
        Layout((3, 12, 4), (0, 4, 1)),
    ],
    ids=["heads of the keys", "slice and transpose", "columns two apart", "steps", "expanded"],
)
def test_a_dtensor_is_viewed_by_its_view_operations(mesh, layout):
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    weight = torch.arange(48.0).view(12, 4)
    sharded = distribute_tensor(weight, mesh, [Shard(0)])
    view = layout.on(sharded)
    assert isinstance(view, DTensor)
    assert torch.equal(view.full_tensor(), layout.on(weight))
    view.to_local().fill_(-1)
    assert (sharded.full_tensor() == -1).sum() == len(set(offsets(layout))), "the view is a copy"


def test_a_view_of_a_dtensor_keeps_the_shards_of_a_dimension_that_it_does_not_slice(mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    weight = distribute_tensor(torch.arange(48.0).view(12, 4), mesh, [Shard(1)])
    assert Layout((4, 4), (4, 1), 16).on(weight).placements == (Shard(1),)
    assert Layout((2, 2, 4), (8, 4, 1), 16).on(weight).placements == (Shard(2),)
