"""A layout in the coordinates of its base, so that it can follow the base to other strides or to shards."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from sparse_lightning.errors import LayoutError
from sparse_lightning.layout.coalesce import coalesce
from sparse_lightning.layout.layout import Layout
from sparse_lightning.layout.locate import descending, locate
from sparse_lightning.layout.overlap import gapless_step, has_solution


class Digit(NamedTuple):
    """A range of `size` steps, each of which moves one base coordinate, that of `dim`, by `step`."""

    size: int
    dim: int
    step: int


class Coordinates(NamedTuple):
    """The position of a layout in the coordinates of a base.

    Coordinate 0 is at `start`. Dimension i of the layout is the row-major product of `digits[i]`: one digit if it
    stays within a dimension of the base, several if it spans contiguous dimensions of it.
    """

    start: tuple[int, ...]
    digits: tuple[tuple[Digit, ...], ...]


@lru_cache(maxsize=4096)
def coordinates_in(layout: Layout, base: Layout) -> Coordinates | None:
    """Return the layout in the coordinates of `base`, or None if it does not follow the dimensions of the base.

    Example:
        >>> coordinates_in(Layout((2, 4, 6), (24, 6, 1), offset=24), Layout((12, 6))).start
        (4, 0)
    """
    start = locate(base, layout.offset)
    if start is None:
        return None
    digits = []
    for n, s in zip(layout.shape, layout.stride, strict=True):
        found = _digits(n, s, base)
        if found is None:
            return None
        digits.append(found)
    for d, (n, x) in enumerate(zip(base.shape, start, strict=True)):
        steps = [(g.size - 1) * g.step for run in digits for g in run if g.dim == d]
        if x + sum(s for s in steps if s < 0) < 0 or x + sum(s for s in steps if s > 0) >= n:
            return None
    return Coordinates(start, tuple(digits))


def _digits(size: int, stride: int, base: Layout) -> tuple[Digit, ...] | None:
    if size <= 1 or not stride:
        return (Digit(size, 0, 0),) if base.ndim else None
    sign, stride = (1, stride) if stride > 0 else (-1, -stride)
    dims, run = descending(base), []
    at = next((i for i, d in enumerate(dims) if base.stride[d] <= stride), None)
    while size > 1:
        if at is None or at < 0 or stride % base.stride[dims[at]]:
            return None
        n, s = base.shape[dims[at]], base.stride[dims[at]]
        step = stride // s
        if (size - 1) * step < n:
            run.append(Digit(size, dims[at], sign * step))
            break
        if n % step or size % (n // step):
            return None
        if n // step > 1:
            run.append(Digit(n // step, dims[at], sign * step))
        size, stride, at = size // (n // step), n * s, at - 1
    return tuple(reversed(run))


@lru_cache(maxsize=4096)
def lies_inside(layout: Layout, base: Layout) -> bool:
    """Whether every element of a layout is an element of the base; exact, also if the base has gaps."""
    if not layout.numel:
        return True
    base = _upright(base)
    (low, high), (lowest, highest) = layout.span, base.span
    if low < lowest or high > highest:
        return False
    step = gapless_step((s, n - 1) for n, s in zip(base.shape, base.stride, strict=True))
    if step is not None:
        strides = [s for n, s in zip(layout.shape, layout.stride, strict=True) if n > 1]
        return all(x % step == 0 for x in (low - lowest, *strides)) if step else True
    if _is_separated(base):
        return not _hits_a_gap(layout, base)
    if layout.numel == 1:
        return layout.overlaps(base)
    if coordinates_in(layout, base) is not None:
        return True
    # The gaps of interleaved dimensions have no simple form: halve the layout until its parts follow the base.
    d = max(range(layout.ndim), key=lambda i: (layout.shape[i] > 1, abs(layout.stride[i])))
    half = layout.shape[d] // 2
    return lies_inside(layout.slice(d, None, half), base) and lies_inside(layout.slice(d, half), base)


def _upright(base: Layout) -> Layout:
    """Return a layout of the same elements without repetitions and without negative strides."""
    upright = base.positive()[0]
    pairs = [(n, s) for n, s in zip(upright.shape, upright.stride, strict=True) if n != 1 and s]
    return Layout([n for n, _ in pairs], [s for _, s in pairs], upright.offset) if base.numel else upright


def _is_separated(base: Layout) -> bool:
    """Whether each dimension ends, its last step included, within one step of the next larger one."""
    dims = descending(base)
    return all(base.stride[a] >= base.shape[b] * base.stride[b] > 0 for a, b in pairwise(dims))


def _hits_a_gap(layout: Layout, base: Layout) -> bool:
    """Whether a layout within the span of a separated base has an element in a gap of the base.

    An element in a gap has a coordinate in the outer dimensions and a remainder that is too large for the next
    dimension or, after the last one, not zero.
    """
    mine = [(s, 0, n - 1) for n, s in zip(layout.shape, layout.stride, strict=True)]
    dims = descending(base)
    for j in range(1, len(dims) + 1):
        outer = [(-base.stride[d], 0, base.shape[d] - 1) for d in dims[:j]]
        least = base.shape[dims[j]] * base.stride[dims[j]] if j < len(dims) else 1
        gap = (-1, least, base.stride[dims[j - 1]] - 1)
        if has_solution([*mine, *outer, gap], base.offset - layout.offset):
            return True
    return False


@lru_cache(maxsize=4096)
def restride(layout: Layout, old: Layout, new: Layout) -> Layout:
    """Return the same elements of a base after the base, of the same shape, has moved to other strides.

    Each dimension of the layout must follow a dimension of the base, or several contiguous ones. A diagonal crosses
    them: it raises an error, even if strides for its elements exist.

    Raises:
        LayoutError: if the layout does not follow the dimensions of the base, or no strides express its elements in
            the new one.
    """
    if layout == old:
        return new
    if not layout.numel:
        return Layout(layout.shape, layout.stride, new.offset)
    if old.shape == new.shape and old.stride == new.stride:
        return Layout(layout.shape, layout.stride, layout.offset - old.offset + new.offset)
    before, after = coalesced(old, new)
    found = coordinates_in(layout, before)
    if found is None:
        raise LayoutError(
            f"the view {layout} can't follow its parameter from {old} to {new}: it crosses the parameter's dimensions"
        )
    strides = []
    for run in found.digits:
        stride = stride_of(run, after)
        if stride is None:
            raise LayoutError(f"the view {layout} of {old} needs a copy in {new}: no strides express it there")
        strides.append(stride)
    return Layout(layout.shape, strides, after(found.start))


def coalesced(old: Layout, new: Layout) -> tuple[Layout, Layout]:
    """Return two layouts of one shape with the dimensions merged that are contiguous in both."""
    runs = coalesce(old.shape, old.stride, new.stride)
    shape = [run.size for run in runs]
    return (
        Layout(shape, [run.strides[0] for run in runs], old.offset),
        Layout(shape, [run.strides[1] for run in runs], new.offset),
    )


def stride_of(run: tuple[Digit, ...], base: Layout) -> int | None:
    """Return the stride of a product of digits on a base, or None if no single stride expresses it."""
    sizes, strides = [g.size for g in run], [g.step * base.stride[g.dim] for g in run]
    runs = [found for found in coalesce(sizes, strides) if found.size > 1]
    if len(runs) > 1:
        return None
    return runs[0].strides[0] if runs else 0
