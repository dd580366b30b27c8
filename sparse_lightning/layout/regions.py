"""The blocks that a box of a parameter contains, as a few regular regions of the grid.

A box is the whole parameter or the shard of it that one process holds. Blocks are smaller where the box ends inside a
block (a cut block) and where the shape does not divide (an edge block): along each dimension there is a cut head, a
regular body and a cut tail. Each region holds blocks of one size, so it is one strided window.

Data flow: box of the parameter → boxes of the view (`cut`) → equal blocks along each dimension (`_equal_blocks`) →
a window in memory order for each combination (`_region`). Integers only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product
from typing import NamedTuple

from sparse_lightning.errors import LayoutError
from sparse_lightning.layout.coalesce import coalesce
from sparse_lightning.layout.coordinates import Digit, coordinates_in, restride, stride_of
from sparse_lightning.layout.layout import Layout

Interval = tuple[int, int]
Box = tuple[Interval, ...]


@dataclass(frozen=True)
class BlockRegion:
    """Blocks of one size: their position in the grid, and their elements as strided windows.

    `grid` bounds the region along each dimension of the grid. A window has the shape `(n0, l0, n1, l1, …)`, blocks and
    their elements alternating. There is one for the weights, without negative strides and largest strides first, and
    one for each other tensor, in the same order whatever its own strides are. A value of the grid is brought into the
    order of the windows by `flipped`, then `order`, then a reshape to `(n0, n1, …)`: contiguous dimensions are merged.
    """

    grid: Box
    windows: tuple[Layout, ...]
    flipped: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of blocks `(n0, n1, …)` of a window."""
        return self.windows[0].shape[0::2]


class ViewBox(NamedTuple):
    """A box of a view and the layout of its elements in the local storage."""

    box: Box
    layout: Layout


class EqualBlocks(NamedTuple):
    """Equal blocks along one dimension: start in the view, first block, number of blocks, their length."""

    start: int
    first: int
    number: int
    length: int


@lru_cache(maxsize=4096)
def regions(
    view: Layout,
    base: Layout,
    block: tuple[int, ...],
    box: Box,
    local: Layout,
    others: tuple[Layout, ...] = (),
) -> tuple[BlockRegion, ...]:
    """Return the regions of blocks of a view within a box of its parameter.

    Args:
        view: the view, on the storage of the whole parameter.
        base: the whole parameter.
        block: the block shape, one positive entry for each dimension of the view.
        box: start and stop along each dimension of the parameter.
        local: the layout of the box in the storage that holds it.
        others: the layouts of other tensors of the shape of the box that are read along with it.
    """
    found = []
    for part in cut(view, base, box, local):
        layouts = [part.layout, *(restride(part.layout, local, other) for other in others)]
        along = [_equal_blocks(lo, hi, b) for (lo, hi), b in zip(part.box, block, strict=True)]
        found += [_region(part.box, layouts, blocks) for blocks in product(*along)]
    return tuple(found)


def whole(shape: Sequence[int]) -> Box:
    """Return the box that spans a shape."""
    return tuple((0, n) for n in shape)


def cut(view: Layout, base: Layout, box: Box, local: Layout) -> list[ViewBox]:
    """Return the disjoint boxes of a view within a box of its parameter, with their layouts in the local storage."""
    if tuple(hi - lo for lo, hi in box) != local.shape:
        raise LayoutError(f"the box {box} of {base} does not have the shape of its local part {local}")
    if not view.numel or not local.numel:
        return []
    if box == whole(base.shape):
        return [ViewBox(whole(view.shape), restride(view, base, local))]
    base, box, local = _merge_uncut(base, box, local)
    found = coordinates_in(view, base)
    if found is None:
        raise LayoutError(f"the view {view} can't be cut to the box {box} of {base}: it crosses its dimensions")
    digits = [g for run in found.digits for g in run]
    boxes: list[Box] = [whole([g.size for g in digits])]
    for d, (x, (lo, hi)) in enumerate(zip(found.start, box, strict=True)):
        steps = [g.step if g.dim == d else 0 for g in digits]
        boxes = [part for b in boxes for part in _between(b, steps, lo - x, hi - x)]
    start = [x - lo for x, (lo, _) in zip(found.start, box, strict=True)]
    return [part for b in boxes for part in _view_boxes(found.digits, b, start, local)]


def _merge_uncut(base: Layout, box: Box, local: Layout) -> tuple[Layout, Box, Layout]:
    """Merge contiguous dimensions of the parameter where the box spans the inner one."""
    runs = coalesce(base.shape, base.stride, _extended(local), may_merge=lambda _, d: box[d] == (0, base.shape[d]))
    inner = [math.prod(base.shape[d] for d in run.dims[1:]) for run in runs]
    bounds = tuple((box[run.dims[0]][0] * n, box[run.dims[0]][1] * n) for run, n in zip(runs, inner, strict=True))
    whole_base = Layout([run.size for run in runs], [run.strides[0] for run in runs], base.offset)
    in_box = Layout([hi - lo for lo, hi in bounds], [run.strides[1] for run in runs], local.offset)
    return whole_base, bounds, in_box


def _extended(local: Layout) -> list[int]:
    """Return the strides, those of dimensions of size 1, which are arbitrary, such that they are contiguous."""
    strides = list(local.stride)
    for d in range(local.ndim - 2, -1, -1):
        if local.shape[d] == 1:
            strides[d] = local.shape[d + 1] * strides[d + 1]
    return strides


def _between(box: Box, steps: list[int], low: int, high: int) -> Iterator[Box]:
    """Yield the boxes of coordinates x within a box for which `low <= Σ x · step < high`.

    Along the coordinate with the largest step, most values are entirely inside or outside; the few at the border are
    fixed, one by one, and the next coordinate decides.
    """
    ends = [sorted((lo * s, (hi - 1) * s)) for (lo, hi), s in zip(box, steps, strict=True)]
    least, most = sum(e[0] for e in ends), sum(e[1] for e in ends)
    if most < low or least >= high:
        return
    if low <= least and most < high:
        yield box
        return
    d = max((i for i, (lo, hi) in enumerate(box) if hi - lo > 1), key=lambda i: abs(steps[i]))
    other_least, other_most = least - ends[d][0], most - ends[d][1]
    inside = _multiples(steps[d], box[d], low - other_least, high - 1 - other_most)
    if inside:
        yield (*box[:d], (inside.start, inside.stop), *box[d + 1 :])
    touched = _multiples(steps[d], box[d], low - other_most, high - 1 - other_least)
    border = chain(range(touched.start, inside.start), range(inside.stop, touched.stop)) if inside else touched
    for x in border:
        yield from _between((*box[:d], (x, x + 1), *box[d + 1 :]), steps, low, high)


def _multiples(step: int, bounds: Interval, least: int, most: int) -> range:
    """Return the x within bounds for which `least <= x · step <= most`."""
    first, last = (-(-least // step), most // step) if step > 0 else (-(-most // step), least // step)
    return range(max(bounds[0], first), min(bounds[1], last + 1))


def _view_boxes(digits: tuple[tuple[Digit, ...], ...], box: Box, start: list[int], local: Layout) -> Iterator[ViewBox]:
    """Yield a box of digits as boxes of the view: several only if a dimension of the view was cut midway."""
    bounds = iter(box)
    choices = [list(_intervals(run, [next(bounds) for _ in run], local)) for run in digits]
    origin = local.offset + sum(x * s for x, s in zip(start, local.stride, strict=True))
    for chosen in product(*choices):
        shape = [hi - lo for (lo, hi), _, _ in chosen]
        offset = origin + sum(shift for _, _, shift in chosen)
        yield ViewBox(tuple(c[0] for c in chosen), Layout(shape, [c[1] for c in chosen], offset))


def _intervals(run: tuple[Digit, ...], bounds: list[Interval], local: Layout) -> Iterator[tuple[Interval, int, int]]:
    """Yield for bounds of the digits of one dimension: interval of the dimension, its stride and its shift."""
    inner = math.prod(g.size for g in run[1:])
    (lo, hi), stride = bounds[0], run[0].step * local.stride[run[0].dim]
    full = all(b == (0, g.size) for b, g in zip(bounds[1:], run[1:], strict=True))
    one = stride_of(run, local)
    if full and one is not None:
        yield (lo * inner, hi * inner), one, lo * stride
        return
    for x in range(lo, hi):
        for (a, b), s, shift in _intervals(run[1:], bounds[1:], local):
            yield (x * inner + a, x * inner + b), s, x * stride + shift


def _equal_blocks(low: int, high: int, block: int) -> list[EqualBlocks]:
    """Return a cut head, a regular body and a cut tail of the blocks between two bounds, the empty ones left out."""
    if low // block == (high - 1) // block:
        return [EqualBlocks(low, low // block, 1, high - low)]
    head, tail = -low % block, high % block
    body = (high - low - head - tail) // block
    found = [
        EqualBlocks(low, low // block, 1, head),
        EqualBlocks(low + head, -(-low // block), body, block),
        EqualBlocks(high - tail, high // block, 1, tail),
    ]
    return [blocks for blocks in found if blocks.number and blocks.length]


def _region(box: Box, layouts: list[Layout], blocks: Sequence[EqualBlocks]) -> BlockRegion:
    """Return equal blocks along each dimension as windows, largest strides of the first layout first.

    Dimensions are merged where they are contiguous in all layouts and the elements of a block stay together: the outer
    one has blocks of length 1, or the inner one has a single block.
    """
    for d, (start, _, n, length) in enumerate(blocks):
        low = start - box[d][0]
        layouts = [layout.slice(d, low, low + n * length) for layout in layouts]
    flipped = layouts[0].positive()[1]
    layouts = [layout.flip(flipped) for layout in layouts]
    shape, stride = layouts[0].shape, layouts[0].stride
    order = tuple(sorted(range(len(shape)), key=lambda d: -stride[d] if shape[d] > 1 else -math.inf))
    ordered = [layout.permute(order) for layout in layouts]
    sizes = [(blocks[d].number, blocks[d].length) for d in order]
    runs = coalesce(
        ordered[0].shape,
        *(layout.stride for layout in ordered),
        may_merge=lambda dims, d: sizes[d][0] == 1 or all(sizes[e][1] == 1 for e in dims),
    )
    pairs = [tuple(math.prod(sizes[d][i] for d in run.dims) for i in (0, 1)) for run in runs]
    windows = [
        Layout(
            [x for pair in pairs for x in pair],
            [x for (_, n), run in zip(pairs, runs, strict=True) for x in (n * run.strides[i], run.strides[i])],
            layout.offset,
        )
        for i, layout in enumerate(layouts)
    ]
    return BlockRegion(tuple((b.first, b.first + b.number) for b in blocks), tuple(windows), flipped, order)
