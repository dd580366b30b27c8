"""Charts: a layout in the coordinates of its base, so that it can follow the base to other strides or shards."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from sparse_lightning.errors import LayoutError
from sparse_lightning.layout import Layout, is_chained
from sparse_lightning.reach import even_step, reaches


class Digit(NamedTuple):
    """A run of `size` steps that each move one base coordinate, that of `dim`, by `step`."""

    size: int
    dim: int
    step: int


class Chart(NamedTuple):
    """Where a layout lies in the coordinates of a base.

    Coordinate 0 lies at `start`. Dimension i of the layout is the row-major run of `digits[i]`: one digit
    where it stays within a dimension of the base, several where it counts on through them.
    """

    start: tuple[int, ...]
    digits: tuple[tuple[Digit, ...], ...]


@lru_cache(maxsize=4096)
def chart(layout: Layout, base: Layout) -> Chart | None:
    """The layout in the coordinates of `base`, or None where it does not move along its dimensions.

    Example:
        >>> chart(Layout((2, 4, 6), (24, 6, 1), offset=24), Layout((12, 6))).start
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
    return Chart(start, tuple(digits))


def locate(base: Layout, offset: int) -> tuple[int, ...] | None:
    """The coordinate of an offset in a base whose dimensions nest; None where there is none, or no nesting."""
    if not base.numel or not _is_nested(base):
        return None
    place, offset = [0] * base.ndim, offset - base.offset
    for d in falling(base):
        place[d], offset = divmod(offset, base.stride[d])
        if not 0 <= place[d] < base.shape[d]:
            return None
    return None if offset else tuple(place)


def _is_nested(base: Layout) -> bool:
    """Whether each stride is larger than all that the smaller ones reach together."""
    extent = 0
    for d in reversed(falling(base)):
        if base.stride[d] <= extent:
            return False
        extent += (base.shape[d] - 1) * base.stride[d]
    return True


def falling(base: Layout) -> list[int]:
    """The dimensions that move, largest stride first."""
    moving = [d for d, n in enumerate(base.shape) if n > 1]
    return sorted(moving, key=lambda d: -base.stride[d])


def _digits(size: int, stride: int, base: Layout) -> tuple[Digit, ...] | None:
    if size <= 1 or not stride:
        return (Digit(size, 0, 0),) if base.ndim else None
    sign, stride = (1, stride) if stride > 0 else (-1, -stride)
    dims, run = falling(base), []
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
    """Whether every element of a layout is one of the base's; exact, also where the base leaves gaps."""
    if not layout.numel:
        return True
    base = _moving(base)
    (low, high), (lowest, highest) = layout.span, base.span
    if low < lowest or high > highest:
        return False
    step = even_step((s, n - 1) for n, s in zip(base.shape, base.stride, strict=True))
    if step is not None:
        moves = [s for n, s in zip(layout.shape, layout.stride, strict=True) if n > 1]
        return all(x % step == 0 for x in (low - lowest, *moves)) if step else True
    if _is_apart(base):
        return not _reaches_a_gap(layout, base)
    if layout.numel == 1:
        return layout.overlaps(base)
    if chart(layout, base) is not None:
        return True
    # Dimensions that interleave leave gaps in no simple places: look at parts until they follow the base.
    d = max(range(layout.ndim), key=lambda i: (layout.shape[i] > 1, abs(layout.stride[i])))
    half = layout.shape[d] // 2
    return lies_inside(layout.slice(d, None, half), base) and lies_inside(layout.slice(d, half), base)


def _moving(base: Layout) -> Layout:
    """A layout that reaches the same elements, without repetitions and without negative strides."""
    upright = base.positive()[0]
    pairs = [(n, s) for n, s in zip(upright.shape, upright.stride, strict=True) if n != 1 and s]
    return Layout([n for n, _ in pairs], [s for _, s in pairs], upright.offset) if base.numel else upright


def _is_apart(base: Layout) -> bool:
    """Whether each dimension ends, its last step included, before the next larger one steps on."""
    dims = falling(base)
    return all(base.stride[a] >= base.shape[b] * base.stride[b] > 0 for a, b in pairwise(dims))


def _reaches_a_gap(layout: Layout, base: Layout) -> bool:
    """Whether a layout within the span of a base whose dimensions are apart reaches an element between the base's own.

    An element between them has a coordinate in the outer dimensions, and behind it a remainder that is too
    large for the next dimension, or, after the last one, a remainder at all.
    """
    mine = [(s, 0, n - 1) for n, s in zip(layout.shape, layout.stride, strict=True)]
    dims = falling(base)
    for j in range(1, len(dims) + 1):
        outer = [(-base.stride[d], 0, base.shape[d] - 1) for d in dims[:j]]
        least = base.shape[dims[j]] * base.stride[dims[j]] if j < len(dims) else 1
        gap = (-1, least, base.stride[dims[j - 1]] - 1)
        if reaches([*mine, *outer, gap], base.offset - layout.offset):
            return True
    return False


@lru_cache(maxsize=4096)
def restride(layout: Layout, old: Layout, new: Layout) -> Layout:
    """The same elements of a base when the base, of the same shape, moves to other strides.

    A layout follows its base where each of its dimensions moves along the base's dimensions, alone or counting on
    from one into the next. A diagonal crosses them: it is refused, though strides may reach its elements.

    Raises:
        LayoutError: where the layout does not move along the dimensions of the base, or no strides reach its
            elements in the new one.
    """
    if layout == old:
        return new
    if not layout.numel:
        return Layout(layout.shape, layout.stride, new.offset)
    if old.shape == new.shape and old.stride == new.stride:
        return Layout(layout.shape, layout.stride, layout.offset - old.offset + new.offset)
    before, after = _merged(old, new)
    found = chart(layout, before)
    if found is None:
        raise LayoutError(f"the view {layout} can't follow its parameter from {old} to {new}")
    strides = []
    for run in found.digits:
        merged = merge_digits(run, after)
        if merged is None:
            raise LayoutError(f"the view {layout} of {old} needs a copy in {new}: its elements do not lie on strides")
        strides.append(merged)
    return Layout(layout.shape, strides, after(found.start))


def merge_digits(run: tuple[Digit, ...], base: Layout) -> int | None:
    """The one stride that a run of digits has on a base, or None where it has no single one."""
    steps = [(g.size, g.step * base.stride[g.dim]) for g in run if g.size > 1]
    if not all(is_chained(steps[i], steps[i + 1]) for i in range(len(steps) - 1)):
        return None
    return steps[-1][1] if steps else 0


def _merged(old: Layout, new: Layout) -> tuple[Layout, Layout]:
    """Both layouts with the neighbours merged that count on through one another in both."""
    d = old.ndim - 1
    while d > 0:
        pairs = [((b.shape[d - 1], b.stride[d - 1]), (b.shape[d], b.stride[d])) for b in (old, new)]
        if all(is_chained(outer, inner) for outer, inner in pairs):
            old, new = old.merge((d - 1, d)), new.merge((d - 1, d))
        d -= 1
    return old, new
