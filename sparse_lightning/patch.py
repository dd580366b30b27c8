"""Patches: the part of a grid of blocks that a box of the parameter touches, as a few regular rectangles.

A box is the whole parameter or the shard of it that one process holds. Where it ends inside a block (a cut
block), and where the shape does not divide (an edge block), the blocks are smaller: along each dimension a
cut head, a regular body and a cut tail. Each patch holds blocks of one size, so it is one strided window.

From a view to its patches: box of the parameter → boxes of the view (`cut`) → runs of equal blocks along
each dimension (`_runs`) → a window in memory order for each combination (`_patch`). Integers only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product
from typing import NamedTuple

from sparse_lightning.chart import Digit, chart, merge_digits, restride
from sparse_lightning.errors import LayoutError
from sparse_lightning.layout import Layout, is_chained

Interval = tuple[int, int]
Box = tuple[Interval, ...]


@dataclass(frozen=True)
class Patch:
    """Blocks of one size: where they stand in the grid, and their elements as strided windows.

    `grid` bounds the rectangle along each dimension of the grid. A window has the shape `(n0, l0, n1, l1, …)`,
    blocks and their elements in turn. There is one for the weights, without negative strides and the slowest
    dimensions first, and one for each other tensor, in the same order whatever its own strides are. A value
    of the grid reaches the windows' order through `flipped`, then `order`, then a reshape to `(n0, n1, …)`:
    neighbours that count on are one.
    """

    grid: Box
    windows: tuple[Layout, ...]
    flipped: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """The blocks `(n0, n1, …)` of a window."""
        return self.windows[0].shape[0::2]


class Piece(NamedTuple):
    """A box of a view and the layout of its elements in the local storage."""

    box: Box
    layout: Layout


@lru_cache(maxsize=4096)
def patches(
    view: Layout,
    base: Layout,
    block: tuple[int, ...],
    box: Box,
    local: Layout,
    others: tuple[Layout, ...] = (),
) -> tuple[Patch, ...]:
    """The patches of a view that a box of its parameter touches.

    Args:
        view: the view, on the storage of the whole parameter.
        base: the whole parameter.
        block: the block shape, one positive entry for each dimension of the view.
        box: start and stop along each dimension of the parameter.
        local: the layout of the box in the storage that holds it.
        others: the layouts of other tensors of the box's shape that are read along with it.
    """
    found = []
    for piece in cut(view, base, box, local):
        layouts = [piece.layout, *(restride(piece.layout, local, other) for other in others)]
        runs = [_runs(lo, hi, b) for (lo, hi), b in zip(piece.box, block, strict=True)]
        found += [_patch(piece.box, layouts, rectangle) for rectangle in product(*runs)]
    return tuple(found)


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of a shape."""
    return tuple((0, n) for n in shape)


def cut(view: Layout, base: Layout, box: Box, local: Layout) -> list[Piece]:
    """The boxes of a view that lie in a box of its parameter, disjoint, with their place in the local storage."""
    if tuple(hi - lo for lo, hi in box) != local.shape:
        raise LayoutError(f"the box {box} of {base} does not have the shape of its local part {local}")
    if not view.numel or not local.numel:
        return []
    if box == whole(base.shape):
        return [Piece(whole(view.shape), restride(view, base, local))]
    base, box, local = _merge_uncut(base, box, local)
    found = chart(view, base)
    if found is None:
        raise LayoutError(f"the view {view} can't be cut to the box {box} of {base}: it crosses its dimensions")
    digits = [g for run in found.digits for g in run]
    boxes: list[Box] = [whole([g.size for g in digits])]
    for d, (x, (lo, hi)) in enumerate(zip(found.start, box, strict=True)):
        steps = [g.step if g.dim == d else 0 for g in digits]
        boxes = [part for b in boxes for part in _between(b, steps, lo - x, hi - x)]
    start = [x - lo for x, (lo, _) in zip(found.start, box, strict=True)]
    return [piece for b in boxes for piece in _pieces(found.digits, b, start, local)]


def _merge_uncut(base: Layout, box: Box, local: Layout) -> tuple[Layout, Box, Layout]:
    """Merge neighbours of the parameter's dimensions where the box is not cut along the inner one."""
    for d in range(base.ndim - 1, 0, -1):
        (lo, hi), n = box[d - 1], base.shape[d]
        pairs = [((b.shape[d - 1], b.stride[d - 1]), (n, b.stride[d])) for b in (base, local)]
        if box[d] == (0, n) and all(is_chained(*pair) for pair in pairs):
            base, local = base.merge((d - 1, d)), local.merge((d - 1, d))
            box = (*box[: d - 1], (lo * n, hi * n), *box[d + 1 :])
    return base, box, local


def _between(box: Box, steps: list[int], low: int, high: int) -> Iterator[Box]:
    """The parts of a box of coordinates x for which `low <= Σ x · step < high`.

    Along the coordinate with the largest step, most values lie wholly inside or outside; the few at the
    border are fixed, one by one, and the question goes to the next coordinate.
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
    """The x within bounds for which `least <= x · step <= most`."""
    first, last = (-(-least // step), most // step) if step > 0 else (-(-most // step), least // step)
    return range(max(bounds[0], first), min(bounds[1], last + 1))


def _pieces(digits: tuple[tuple[Digit, ...], ...], box: Box, start: list[int], local: Layout) -> Iterator[Piece]:
    """A box of digits as boxes of the view: one, but where a dimension of the view was cut in its middle."""
    bounds = iter(box)
    choices = [list(_stretches(run, [next(bounds) for _ in run], local)) for run in digits]
    origin = local.offset + sum(x * s for x, s in zip(start, local.stride, strict=True))
    for chosen in product(*choices):
        shape = [hi - lo for (lo, hi), _, _ in chosen]
        offset = origin + sum(shift for _, _, shift in chosen)
        yield Piece(tuple(c[0] for c in chosen), Layout(shape, [c[1] for c in chosen], offset))


def _stretches(run: tuple[Digit, ...], bounds: list[Interval], local: Layout) -> Iterator[tuple[Interval, int, int]]:
    """Bounds of the digits of one dimension → interval of the dimension, its stride and its shift."""
    inner = math.prod(g.size for g in run[1:])
    (lo, hi), stride = bounds[0], run[0].step * local.stride[run[0].dim]
    full = all(b == (0, g.size) for b, g in zip(bounds[1:], run[1:], strict=True))
    one = merge_digits(run, local)
    if full and one is not None:
        yield (lo * inner, hi * inner), one, lo * stride
        return
    for x in range(lo, hi):
        for (a, b), s, shift in _stretches(run[1:], bounds[1:], local):
            yield (x * inner + a, x * inner + b), s, x * stride + shift


def _runs(low: int, high: int, block: int) -> list[tuple[int, int, int, int]]:
    """Equal blocks along one dimension: start in the view, first block, number of blocks, their length."""
    if low // block == (high - 1) // block:
        return [(low, low // block, 1, high - low)]
    head, tail = -low % block, high % block
    body = (high - low - head - tail) // block
    runs = [(low, low // block, 1, head), (low + head, -(-low // block), body, block)]
    runs.append((high - tail, high // block, 1, tail))
    return [run for run in runs if run[2] and run[3]]


def _patch(box: Box, layouts: list[Layout], rectangle: Sequence[tuple[int, int, int, int]]) -> Patch:
    """One run of blocks along each dimension as windows, slowest dimensions of the first layout first.

    Neighbours merge where they count on through one another in all layouts and where that keeps the elements
    of a block together: the outer one has blocks of length 1, or the inner one has a single block.
    """
    for d, (start, _, n, length) in enumerate(rectangle):
        low = start - box[d][0]
        layouts = [layout.slice(d, low, low + n * length) for layout in layouts]
    flipped = layouts[0].positive()[1]
    layouts = [layout.flip(flipped) for layout in layouts]
    shape, stride = layouts[0].shape, layouts[0].stride
    order = tuple(sorted(range(len(shape)), key=lambda d: -stride[d] if shape[d] > 1 else -math.inf))
    pairs: list[tuple[int, int, tuple[int, ...]]] = []
    for d in order:
        (_, _, n, length), strides = rectangle[d], tuple(layout.stride[d] for layout in layouts)
        if pairs and _joins(pairs[-1], (n, length, strides)):
            pairs[-1] = (pairs[-1][0] * n, pairs[-1][1] * length, strides)
        else:
            pairs.append((n, length, strides))
    sizes = [x for n, length, _ in pairs for x in (n, length)]
    windows = [
        Layout(sizes, [x for _, length, strides in pairs for x in (length * strides[i], strides[i])], layout.offset)
        for i, layout in enumerate(layouts)
    ]
    grid = tuple((first, first + n) for _, first, n, _ in rectangle)
    return Patch(grid, tuple(windows), flipped, order)


def _joins(outer: tuple[int, int, tuple[int, ...]], inner: tuple[int, int, tuple[int, ...]]) -> bool:
    size = inner[0] * inner[1]
    counts_on = all(a == size * b for a, b in zip(outer[2], inner[2], strict=True))
    return (outer[0] * outer[1] == 1 or counts_on) and (outer[1] == 1 or inner[0] == 1)
