"""Layouts against plain index arithmetic, and against torch's `as_strided`."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import layouts, offsets, tensors

import sparse_lightning
from sparse_lightning import Layout, LayoutError
from sparse_lightning.layout import coalesce, row_major
from sparse_lightning.layout.locate import locate, unravel
from sparse_lightning.layout.permutation import inverse, permuted

# Strides of a few elements meet one another often, strides of some hundred seldom: both answers must be right.
ANY = st.one_of(layouts(min_size=0), layouts(strides=st.integers(-300, 300), min_size=0))
SOLID = st.one_of(layouts(), layouts(strides=st.sampled_from([-24, -6, -1, 0, 1, 2, 6, 24])))


def array(layout: Layout) -> np.ndarray:
    """The offsets of a layout as an array of its shape, so that numpy can say what an operation means."""
    return np.array(offsets(layout), dtype=np.int64).reshape(layout.shape)


def is_strided(wanted: np.ndarray) -> bool:
    """Whether one stride for each dimension can give these offsets."""
    if not wanted.size:
        return True
    first = wanted[(0,) * wanted.ndim]
    strides = [
        0 if n == 1 else wanted[tuple(np.eye(wanted.ndim, dtype=int)[d])] - first for d, n in enumerate(wanted.shape)
    ]
    return bool((array(Layout(wanted.shape, [int(s) for s in strides], int(first))) == wanted).all())


def same(layout: Layout, wanted: np.ndarray) -> bool:
    return layout.shape == wanted.shape and array(layout).tolist() == wanted.tolist()


def divisors(n: int) -> list[int]:
    return [x for x in range(1, n + 1) if n % x == 0]


@st.composite
def factors(draw, n: int) -> list[int]:
    """Sizes whose product is n, some of them 1."""
    sizes = []
    while len(sizes) < 4 and draw(st.booleans()):
        sizes.append(draw(st.sampled_from(divisors(n // math.prod(sizes)))))
    return [*sizes, n // math.prod(sizes)] if math.prod(sizes) != n or draw(st.booleans()) else sizes


@given(ANY)
def test_a_layout_is_the_function_offset_plus_coordinate_times_stride(layout):
    coords = list(itertools.product(*map(range, layout.shape)))
    assert [layout(c) for c in coords] == offsets(layout)
    assert (layout.numel, layout.ndim) == (len(coords), len(layout.shape))


@given(st.lists(st.integers(0, 4), max_size=5))
def test_without_strides_a_layout_is_row_major_as_in_torch(shape):
    assert Layout(shape).stride == torch.empty(shape).stride()
    assert offsets(Layout(shape)) == list(range(math.prod(shape)))


@given(ANY)
def test_sizes_count_from_the_lowest_to_the_highest_offset(layout):
    reached = offsets(layout)
    low, high = layout.span
    if reached:
        assert (low, high) == (min(reached), max(reached))
        assert layout.cosize == max(reached) - layout.offset + 1
        assert layout.storage_size == max(reached) - min(reached) + 1
    else:
        assert (low, high) == (layout.offset, layout.offset - 1)
        assert layout.cosize == layout.storage_size == 0


@given(ANY)
def test_injective_means_that_no_offset_comes_twice(layout):
    reached = offsets(layout)
    assert layout.is_injective() == (len(set(reached)) == len(reached))


@given(ANY, ANY)
def test_overlap_means_that_some_offset_is_in_both(a, b):
    meet = not set(offsets(a)).isdisjoint(offsets(b))
    assert a.overlaps(b) == b.overlaps(a) == meet


@pytest.mark.parametrize(
    ("shape", "stride", "injective"),
    [
        ((4096, 4096), (4097, 4096), True),
        ((4098, 4098), (4097, 4096), False),
        ((1000, 1000), (1, 1), False),
        ((1000, 1000), (1, 1000), True),
        ((1000, 1000), (1, -999), False),
        ((10**9, 10**9), (10**9, 1), True),
        ((10**9, 10**9), (10**9 - 1, 1), False),
        ((10**9, 10**9), (2 * 10**9 + 1, -2), True),
        ((10**9, 2), (0, 1), False),
        ((10**9, 0), (0, 1), True),
        ((1, 10**9), (0, 5), True),
        ((64, 3, 7, 7), (147, 1, 21, 3), True),
        ((64, 32, 8, 8, 9), (32 * 576, 576, 72, 9, 1), True),
        ((64, 8, 4, 3, 3), (32 * 9, 4, 1, 96, 32), True),
        ((8, 3, 112, 112, 7, 7), (3 * 224 * 224, 224 * 224, 448, 2, 224, 1), False),
        ((8, 3, 32, 32, 7, 7), (3 * 224 * 224, 224 * 224, 7 * 224, 7, 224, 1), True),
        ((2,) * 30, tuple(3**k for k in range(30)), True),
        ((2,) * 31, (*(2**k for k in range(30)), 2**30 - 1), False),
    ],
)
def test_injectivity_is_known_without_visiting_the_elements(shape, stride, injective):
    assert Layout(shape, stride).is_injective() is injective


@pytest.mark.parametrize(
    ("a", "b", "meet"),
    [
        (Layout((4096, 2048), (4096, 1)), Layout((4096, 2048), (4096, 1), 2048), False),
        (Layout((4096, 2049), (4096, 1)), Layout((4096, 2048), (4096, 1), 2048), True),
        (Layout((10**9,), (2,)), Layout((10**9,), (-2,), 2 * 10**9 - 1), False),
        (Layout((10**9,), (6,)), Layout((10**9,), (10,), 10**9 + 4), True),
        (Layout((10**9, 10**9), (3, 10**10 + 2)), Layout((10**9, 10**9), (3, 10**10 + 2), 1), False),
        (Layout((10**9, 10**9), (3, 3 * 10**9 - 2)), Layout((10**9, 10**9), (3, 3 * 10**9 - 2), 1), True),
    ],
)
def test_overlap_is_known_without_visiting_the_elements(a, b, meet):
    assert a.overlaps(b) is meet
    assert b.overlaps(a) is meet


@given(layouts(min_size=0), st.data())
def test_layouts_are_equal_when_they_are_the_same_function(a, data):
    stride = [s + data.draw(st.sampled_from([0, 0, 5])) for s in a.stride]
    b = Layout(a.shape, stride, a.offset + data.draw(st.sampled_from([0, 0, 3])))
    assert (a == b) == (offsets(a) == offsets(b))
    assert a != b or hash(a) == hash(b)


def test_a_layout_keeps_what_it_was_given_and_can_not_be_changed():
    layout = Layout([1, 3], [7, 2], 4)
    assert (layout.shape, layout.stride, layout.offset) == ((1, 3), (7, 2), 4)
    assert layout == Layout((1, 3), (0, 2), 4)
    assert layout != Layout((3, 1), (2, 7), 4)
    assert layout != ((1, 3), (7, 2), 4)
    with pytest.raises(FrozenInstanceError):
        layout.offset = 0


@given(ANY, st.data())
def test_permute_moves_dimensions(layout, data):
    order = data.draw(st.permutations(range(layout.ndim)))
    assert same(layout.permute(order), array(layout).transpose(order))


@given(ANY, st.data())
def test_flip_counts_backwards(layout, data):
    dims = data.draw(st.lists(st.integers(-layout.ndim, layout.ndim - 1), max_size=3)) if layout.ndim else []
    chosen = tuple({d % layout.ndim for d in dims})
    assert same(layout.flip(dims), np.flip(array(layout), chosen))


@given(ANY.filter(lambda x: x.ndim), st.data())
def test_slice_takes_what_python_takes(layout, data):
    dim = data.draw(st.integers(-layout.ndim, layout.ndim - 1))
    ends = st.one_of(st.none(), st.integers(-6, 6))
    start, stop = data.draw(ends), data.draw(ends)
    step = data.draw(st.integers(-6, 6).filter(bool))
    index = (slice(None),) * (dim % layout.ndim) + (slice(start, stop, step),)
    assert same(layout.slice(dim, start, stop, step), array(layout)[index])


@given(ANY.filter(lambda x: x.ndim), st.data())
def test_split_is_row_major_and_finds_one_missing_size(layout, data):
    dim = data.draw(st.integers(-layout.ndim, layout.ndim - 1))
    place, n = dim % layout.ndim, layout.shape[dim]
    sizes = data.draw(factors(n)) if n else [data.draw(st.integers(1, 3)), 0]
    wanted = array(layout).reshape([*layout.shape[:place], *sizes, *layout.shape[place + 1 :]])
    assert same(layout.split(dim, sizes), wanted)
    if sizes:
        missing = data.draw(st.integers(0, len(sizes) - 1))
        if n or sizes[missing] == 0:
            assert same(layout.split(dim, [-1 if i == missing else x for i, x in enumerate(sizes)]), wanted)


@given(st.one_of(ANY, SOLID).filter(lambda x: x.ndim), st.data())
def test_merge_is_row_major_in_the_order_given_or_not_possible(layout, data):
    dims = data.draw(st.permutations(range(layout.ndim)))[: data.draw(st.integers(1, layout.ndim))]
    rest = [d for d in range(layout.ndim) if d not in dims]
    place = sum(d < min(dims) for d in rest)
    size = math.prod(layout.shape[d] for d in dims)
    shape = [layout.shape[d] for d in rest]
    moved = array(layout).transpose([*rest[:place], *dims, *rest[place:]])
    wanted = moved.reshape([*shape[:place], size, *shape[place:]])
    try:
        merged = layout.merge(dims)
    except LayoutError:
        assert not is_strided(wanted), f"{layout} did not merge {dims}, but strides express it"
    else:
        assert same(merged, wanted)


@given(st.one_of(ANY, SOLID, st.builds(Layout, st.lists(st.integers(1, 4), max_size=4))), st.data())
def test_reshape_keeps_the_order_of_elements_or_is_not_possible(layout, data):
    shape = data.draw(factors(layout.numel)) if layout.numel else [0, 3]
    wanted = array(layout).reshape(shape)
    try:
        reshaped = layout.reshape(shape)
    except LayoutError:
        assert not is_strided(wanted), f"{layout} was not reshaped to {shape}, but strides express it"
    else:
        assert same(reshaped, wanted)
        assert layout.numel == 0 or same(layout.reshape([-1, *shape]), wanted[None])


@given(ANY, st.data())
def test_expand_repeats_as_broadcasting_does(layout, data):
    new = data.draw(st.lists(st.integers(0, 3), max_size=2))
    shape = [*new, *(data.draw(st.integers(0, 3)) if n == 1 else n for n in layout.shape)]
    wanted = np.broadcast_to(array(layout), shape)
    assert same(layout.expand(shape), wanted)
    kept = [-1 if i >= len(new) and n == layout.shape[i - len(new)] else n for i, n in enumerate(shape)]
    assert same(layout.expand(kept), wanted)


@given(ANY, st.data())
def test_tile_puts_the_grid_before_the_elements_of_a_block(layout, data):
    block = [data.draw(st.sampled_from(divisors(n) or [2])) for n in layout.shape]
    grid = [n // b for n, b in zip(layout.shape, block, strict=True)]
    apart = array(layout).reshape([x for pair in zip(grid, block, strict=True) for x in pair])
    wanted = apart.transpose([*range(0, 2 * layout.ndim, 2), *range(1, 2 * layout.ndim, 2)])
    assert same(layout.tile(block), wanted)


def test_a_block_shape_may_span_dimensions_and_leave_out_the_last_ones():
    assert Layout((64, 32, 3, 3)).tile((1, -1)).shape == (64, 1, 3, 3, 1, 32, 1, 1)


@given(ANY)
def test_positive_strides_have_the_same_elements(layout):
    upright, flipped = layout.positive()
    assert min(upright.stride, default=0) >= 0
    assert same(upright.flip(flipped), array(layout))


@given(layouts(strides=st.integers(0, 7), min_size=0))
def test_on_and_of_agree_with_as_strided(layout):
    storage = torch.arange(layout.offset + layout.storage_size + 2)
    expected = storage.as_strided(layout.shape, layout.stride, layout.offset)
    live = layout.on(storage)
    assert (live.shape, live.stride(), live.data_ptr()) == (expected.shape, expected.stride(), expected.data_ptr())
    assert torch.equal(live, expected)
    read = Layout.of(expected)
    assert (read.shape, read.stride, read.offset) == (layout.shape, layout.stride, layout.offset)
    live.fill_(-1)
    assert (storage == -1).nonzero().flatten().tolist() == sorted(set(offsets(layout)))


@given(layouts(min_size=0))
def test_on_reads_negative_strides_in_the_order_of_the_layout(layout):
    low, _ = layout.span
    layout = Layout(layout.shape, layout.stride, layout.offset - low)
    storage = torch.arange(100, 100 + layout.storage_size + 3)
    assert layout.on(storage).tolist() == storage[torch.from_numpy(array(layout))].tolist()


def test_a_negative_stride_that_is_never_taken_costs_no_copy():
    storage = torch.arange(6)
    assert Layout((1, 3), (-9, 1), 2).on(storage).data_ptr() == storage[2:].data_ptr()


ERRORS = [
    (lambda: Layout((2, 3), (1,)), "shape (2, 3) has 2 dimensions, but stride (1,) has 1"),
    (lambda: Layout((2, -3)), "shape (2, -3) has a negative size"),
    (lambda: Layout((2, 1.5)), "shape (2, 1.5) is not a sequence of integers"),
    (lambda: Layout((2,), (0.5,)), "stride (0.5,) is not a sequence of integers"),
    (lambda: Layout((1,), (1,), 1.5), "offset 1.5 is not an integer"),
    (lambda: Layout((1,), offset=None), "offset None is not an integer"),
    (lambda: Layout((2, 3))((2, 0)), "coordinate (2, 0) lies outside of shape (2, 3)"),
    (lambda: Layout((2, 3))((0, -1)), "coordinate (0, -1) lies outside of shape (2, 3)"),
    (lambda: Layout((2, 3))((1,)), "coordinate (1,) lies outside of shape (2, 3)"),
    (lambda: Layout((2, 3)).permute((0, 0)), "(0, 0) does not permute the 2 dimensions of Layout((2, 3)"),
    (lambda: Layout((2, 3)).permute((1,)), "(1,) does not permute the 2 dimensions of Layout((2, 3)"),
    (lambda: Layout((2, 3)).flip((2,)), "Layout((2, 3), stride=(3, 1), offset=0) has no dimension 2"),
    (lambda: Layout((2, 3)).slice(-3), "Layout((2, 3), stride=(3, 1), offset=0) has no dimension -3"),
    (lambda: Layout((2, 3)).slice(1, 0, 3, 0), "step 0 in a slice of dimension 1 of Layout((2, 3)"),
    (lambda: Layout((2, 6)).split(1, (4, -1)), "dimension 1 of size 6 of Layout((2, 6), stride=(6, 1), offset=0)"),
    (lambda: Layout((2, 6)).split(1, (2, 2)), "can't be split into (2, 2)"),
    (lambda: Layout((2, 6)).split(1, (-1, -1)), "can't be split into (-1, -1)"),
    (lambda: Layout((2, 6)).split(1, (-2, -3)), "shape (2, -2, -3) has a negative size"),
    (lambda: Layout((2, 6)).split(2, (6,)), "has no dimension 2"),
    (lambda: Layout((2, 3)).merge((1, 1)), "dimensions (1, 1) of Layout((2, 3)"),
    (lambda: Layout((2, 3)).merge(()), "dimensions () of Layout((2, 3)"),
    (lambda: Layout((2, 3)).merge((0, 2)), "has no dimension 2"),
    (lambda: Layout((2, 3), (4, 1)).merge((0, 1)), "dimensions (0, 1) of Layout((2, 3), stride=(4, 1), offset=0)"),
    (lambda: Layout((2, 3)).merge((1, 0)), "each stride must be the next one's size times its stride"),
    (lambda: Layout((2, 3)).reshape((4,)), "has 6 elements and can't be reshaped to (4,)"),
    (lambda: Layout((2, 3)).reshape((-1, 4)), "has 6 elements and can't be reshaped to (1, 4)"),
    (lambda: Layout((2, 3), (4, 1)).reshape((6,)), "offset=0) can't be reshaped to (6,) without a copy"),
    (lambda: Layout((2, 3)).expand((3,)), "can't be expanded to (3,), which has fewer dimensions"),
    (lambda: Layout((2, 3)).expand((4, 3)), "can't be expanded to (4, 3): size 2 is neither 1 nor 4"),
    (lambda: Layout((2, 3)).tile((1, 1, 1)), "block (1, 1, 1) has more dimensions than the shape (2, 3)"),
    (lambda: Layout((2, 3)).tile((0,)), "block (0,) has an entry that is neither positive nor −1"),
    (lambda: Layout((2, 3)).tile((-2, 3)), "block (-2, 3) has an entry that is neither positive nor −1"),
    (lambda: Layout((2, 6)).tile((1, 4)), "dimension 1 has 6 elements, which is not a multiple of 4"),
]


@pytest.mark.parametrize(("invalid", "text"), ERRORS, ids=[text for _, text in ERRORS])
def test_an_error_names_the_numbers(invalid, text):
    with pytest.raises(LayoutError, match=re.escape(text)) as error:
        invalid()
    assert isinstance(error.value, ValueError)


def test_the_layout_layer_works_where_torch_is_not_loaded():
    code = """
import sys
from sparse_lightning import Layout, LayoutError
from sparse_lightning.layout import coordinates, regions
columns = Layout((4, 6)).permute((1, 0))
columns.is_injective(), columns.movements(Layout((4, 6))), coordinates.lies_inside(columns, Layout((4, 6)))
sys.exit("torch was imported" if "torch" in sys.modules else 0)
"""
    root = Path(sparse_lightning.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@given(layouts(strides=st.integers(-3, 3).map(lambda x: 2 * x)), st.data())
def test_coalesced_dimensions_have_the_same_offsets_in_the_same_order(layout, data):
    other = Layout(layout.shape, data.draw(st.sampled_from([None, layout.stride, layout.stride[::-1]])))
    runs = coalesce(layout.shape, layout.stride, other.stride)
    for i, one in enumerate((layout, other)):
        merged = Layout([run.size for run in runs], [run.strides[i] for run in runs], one.offset)
        assert offsets(merged) == offsets(one)
    for outer, inner in itertools.pairwise(runs):
        assert outer.strides != tuple(inner.size * s for s in inner.strides), "contiguous dimensions were not merged"
    dims = [d for run in runs for d in run.dims]
    assert dims == sorted(dims)
    assert all(math.prod(layout.shape[d] for d in run.dims) == run.size for run in runs)


@given(layouts(min_size=2, max_size=3), st.integers(0, 4))
def test_coalesce_merges_no_dimensions_that_may_not(layout, apart):
    runs = coalesce(layout.shape, row_major(layout.shape), may_merge=lambda _, d: d != apart)
    assert len(runs) == (0 if not layout.ndim else 2 if 0 < apart < layout.ndim else 1)


@given(tensors(), st.data())
def test_locate_is_the_inverse_of_a_layout(tensor, data):
    base = Layout.of(tensor)
    coord = tuple(data.draw(st.integers(0, n - 1)) for n in base.shape)
    assert locate(base, base(coord)) == coord
    [*place], rest = unravel(base, torch.tensor([base(coord), base(coord)]))
    assert [x.tolist() for x in place] == [[x, x] for x in coord]
    assert rest.tolist() == [0, 0]


@given(tensors())
def test_locate_finds_nothing_outside_of_a_layout(tensor):
    base = Layout.of(tensor)
    inside = set(offsets(base))
    for offset in range(base.span[0] - 2, base.span[1] + 3):
        assert (locate(base, offset) is not None) == (offset in inside)


@given(st.integers(0, 5).flatmap(lambda n: st.permutations(range(n))))
def test_a_permutation_and_its_inverse_cancel_out(order):
    names = "abcdef"[: len(order)]
    assert "".join(permuted(permuted(names, order), inverse(order))) == names
    assert inverse(inverse(order)) == tuple(order)
