"""Coordinates: the position of a layout in the coordinates of its base, and after the base has moved."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import layouts, offsets, tensors, walks

from sparse_lightning import Layout, LayoutError
from sparse_lightning.layout.coordinates import Coordinates, coordinates_in, lies_inside, restride

ALONG_DIMENSIONS = ["permute", "slice", "step", "flip", "split", "insert"]


@st.composite
def bases(draw):
    """Contiguous, transposed, sliced, at an offset, and every second element of some dimensions."""
    base = Layout.of(draw(tensors()))
    for d in range(base.ndim):
        base = base.slice(d, None, None, draw(st.sampled_from([1, 1, 2])))
    return base


@st.composite
def placed(draw, base):
    """Strides near those of a base or any others, begun at an element of the base or beside it."""
    near = [k * s for s in base.stride for k in (-2, -1, 1, 2, 3)]
    strides = st.one_of(st.sampled_from([0, 1, 2, 3, *near]), st.integers(-12, 12))
    layout = draw(layouts(max_dims=3, max_size=draw(st.sampled_from([3, 6])), strides=strides, min_size=0))
    low, high = base.span
    return Layout(layout.shape, layout.stride, draw(st.integers(low - 1, high + 1)))


@st.composite
def moved(draw, base):
    """A base of the same shape with other strides: another order, other gaps, another offset."""
    return Layout.of(draw(tensors(shape=base.shape)))


def candidates(base):
    return st.one_of(walks(base), placed(base))


def coordinate_in_base(found: Coordinates, coord) -> list[int]:
    """The base coordinate of a coordinate, by its digits, the last one fastest."""
    place = list(found.start)
    for x, run in zip(coord, found.digits, strict=True):
        for digit in reversed(run):
            x, moves = divmod(x, digit.size)
            place[digit.dim] += moves * digit.step
        assert x == 0, f"the digits {run} of a dimension do not count that far"
    return place


def follow(layout, old, new):
    """The offsets that the elements of a layout have after the base moved, one by one."""
    moves = dict(zip(offsets(old), offsets(new), strict=True))
    return [moves[offset] for offset in offsets(layout)]


@given(bases(), st.data())
def test_coordinates_lead_to_the_same_elements(base, data):
    layout = data.draw(candidates(base))
    found = coordinates_in(layout, base)
    if found is None:
        return
    for coord in itertools.product(*map(range, layout.shape)):
        assert base(coordinate_in_base(found, coord)) == layout(coord)


@given(bases(), st.data())
def test_a_layout_that_moves_along_the_dimensions_of_its_base_has_coordinates(base, data):
    layout = data.draw(walks(base, kinds=ALONG_DIMENSIONS))
    assert coordinates_in(layout, base) is not None


@pytest.mark.parametrize(
    ("layout", "base"),
    [
        (Layout((2, 3), (4, 1)), Layout((2, 2), (4, 1))),
        (Layout((2,), (1,), 1), Layout((2, 2), (4, 1))),
        (Layout((3,), (2,)), Layout((4, 3))),
        (Layout((3,), (5,)), Layout((3, 4))),
        (Layout((2,), (1,), 3), Layout((2, 3), (4, 1))),
        (Layout((), (), 3), Layout((2, 3), (4, 1))),
        (Layout((3,), (1,)), Layout((3, 3), (1, 1))),
        (Layout((1,)), Layout((0, 4))),
    ],
    ids=[
        "too wide",
        "past the end of a row",
        "across rows out of step",
        "diagonal",
        "from the gap",
        "in the gap",
        "base that overlaps itself",
        "base without elements",
    ],
)
def test_what_does_not_move_along_the_dimensions_of_its_base_has_no_coordinates(layout, base):
    assert coordinates_in(layout, base) is None


def test_a_dimension_that_spans_contiguous_dimensions_has_several_digits():
    found = coordinates_in(Layout((2, 12), (24, 2), offset=2), Layout((2, 4, 6), offset=1))
    assert found.start == (0, 0, 1)
    assert [[digit.size for digit in run] for run in found.digits] == [[2], [4, 3]]


def test_the_coordinates_of_a_fused_qkv_begin_at_its_own_row():
    assert coordinates_in(Layout((2, 4, 6), (24, 6, 1), offset=24), Layout((12, 6))).start == (4, 0)


@given(bases(), st.data())
def test_inside_means_that_every_offset_is_one_of_the_base(base, data):
    layout = data.draw(candidates(base))
    assert lies_inside(layout, base) == (set(offsets(layout)) <= set(offsets(base)))


@given(layouts(max_dims=3, min_size=0), layouts(max_dims=3, strides=st.integers(-5, 5), min_size=0))
@example(Layout((2,), (3,), 6), Layout((8, 3)).slice(1, None, None, 2))
def test_inside_is_exact_for_bases_of_any_strides(layout, base):
    assert lies_inside(layout, base) == (set(offsets(layout)) <= set(offsets(base)))


WIDE = Layout((10**5, 10**4), (2 * 10**4, 1))
EVERY_SECOND = Layout((10**5, 10**4 - 1)).slice(1, None, None, 2)


@pytest.mark.parametrize(
    ("layout", "base", "inside"),
    [
        (Layout((10**9,)), Layout((10**9,)), True),
        (Layout((10**9,), (1,), 1), Layout((10**9,)), False),
        (Layout((10**9,), (-1,), 10**9 - 1), Layout((10**5, 10**4)), True),
        (WIDE, WIDE, True),
        (WIDE.flip((0, 1)), WIDE, True),
        (WIDE.permute((1, 0)).split(1, (100, -1)), WIDE, True),
        (Layout((10**5, 10**4 + 1), (2 * 10**4, 1)), WIDE, False),
        (Layout((10**9,)), WIDE, False),
        (Layout((10**4 - 1, 10**5), (2 * 10**4, 0), 5), WIDE, True),
        (EVERY_SECOND, EVERY_SECOND, True),
        (EVERY_SECOND.slice(0, 7).flip((1,)), EVERY_SECOND, True),
    ],
)
def test_inside_is_known_without_visiting_a_billion_elements(layout, base, inside):
    assert lies_inside(layout, base) is inside


EXPANDED = Layout((8, 10**4, 10**4), (0, 10**4, 1))
EXPANDED_WIDE = WIDE.expand((8, -1, -1))
SLIDING = Layout((10**4, 10**4), (1, 1))


@pytest.mark.parametrize(
    ("layout", "base"),
    [
        (EXPANDED, EXPANDED),
        (EXPANDED.slice(1, 5), EXPANDED),
        (EXPANDED_WIDE.slice(1, 5), EXPANDED_WIDE),
        (SLIDING, SLIDING),
    ],
    ids=["expanded", "part of an expanded one", "part of an expanded one with gaps", "sliding windows"],
)
def test_a_base_that_contains_elements_twice_holds_its_views(layout, base):
    assert lies_inside(layout, base)


@given(bases(), st.data())
def test_restride_follows_the_elements_or_raises_an_error(old, data):
    layout = data.draw(st.one_of(walks(old), placed(old)))
    if not set(offsets(layout)) <= set(offsets(old)):
        return
    new = data.draw(moved(old))
    try:
        after = restride(layout, old, new)
    except LayoutError:
        return
    assert after.shape == layout.shape
    assert offsets(after) == follow(layout, old, new)


@given(bases(), st.data())
def test_a_layout_that_moves_along_the_dimensions_of_its_base_always_follows(old, data):
    layout = data.draw(walks(old, kinds=ALONG_DIMENSIONS))
    new = data.draw(moved(old))
    assert offsets(restride(layout, old, new)) == follow(layout, old, new)


@given(bases(), st.data(), st.integers(0, 20))
def test_any_layout_follows_a_base_that_keeps_its_strides(old, data, offset):
    layout = data.draw(candidates(old))
    new = Layout(old.shape, old.stride, offset)
    moved_by = [x + new.offset - old.offset for x in offsets(layout)]
    assert offsets(restride(layout, old, new)) == moved_by


@given(bases(), st.data())
def test_the_whole_base_follows_to_any_strides(old, data):
    new = data.draw(moved(old))
    assert restride(old, old, new) == new


@given(bases(), st.data())
def test_there_and_back_again_is_where_it_was(old, data):
    new = data.draw(moved(old))
    layout = data.draw(walks(old, kinds=ALONG_DIMENSIONS))
    assert restride(restride(layout, old, new), new, old) == layout


CONV = Layout((8, 4, 3, 3))
CHANNELS_LAST = Layout((8, 4, 3, 3), (36, 1, 12, 4))


def test_a_filter_view_follows_to_channels_last():
    assert restride(CONV.slice(0, 2, 6), CONV, CHANNELS_LAST) == CHANNELS_LAST.slice(0, 2, 6)
    pixels = CONV.merge((2, 3))
    assert restride(pixels, CONV, CHANNELS_LAST) == Layout((8, 4, 9), (36, 1, 4))


def test_dimensions_that_move_together_are_followed_as_one():
    old, new = Layout((2, 3, 4)), Layout((2, 3, 4), (1, 8, 2))
    assert restride(Layout((2, 2, 6), (12, 6, 1)), old, new) == Layout((2, 2, 6), (1, 12, 2))


def test_rows_of_filters_can_not_follow_to_channels_last():
    rows = CONV.merge((1, 2, 3))
    with pytest.raises(LayoutError, match=re.escape(f"the view {rows} of {CONV} needs a copy in {CHANNELS_LAST}")):
        restride(rows, CONV, CHANNELS_LAST)


def test_a_diagonal_can_not_follow_to_other_strides():
    square, diagonal = Layout((4, 4)), Layout((3,), (6,), 1)
    padded = Layout((4, 4), (7, 1))
    refusal = f"the view {diagonal} can't follow its parameter from {square} to {padded}"
    with pytest.raises(LayoutError, match=re.escape(refusal)):
        restride(diagonal, square, padded)
