"""A layout as ordinary view operations on another one.

`as_strided` does not exist for every kind of tensor (DTensor, tensor subclasses, traced values). Reshape, permute,
slice, flip and expand do, and most views need no others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from sparse_lightning.layout.algebra import LayoutAlgebra
from sparse_lightning.layout.coalesce import coalesce
from sparse_lightning.layout.locate import locate
from sparse_lightning.layout.permutation import inverse, permuted

if TYPE_CHECKING:
    import torch


class ViewOp(NamedTuple):
    """One view operation: `reshape`, `permute`, `slice`, `flip`, `expand` or `as_strided`, and its arguments.

    On a plain tensor all are views except `flip`, which copies: torch has no negative strides. On a DTensor a `slice`
    of a sharded dimension also copies: it gathers that dimension first.
    """

    name: str
    args: tuple[Any, ...]

    def of_layout(self, layout: LayoutAlgebra) -> LayoutAlgebra:
        """Return the layout after the operation."""
        if self.name == "as_strided":
            return type(layout)(*self.args)
        after: LayoutAlgebra = getattr(layout, self.name)(*self.args)
        return after

    def of_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor after the operation; the class documents when it is a view."""
        if self.name == "slice":
            dim, start, stop, step = self.args
            return tensor[(slice(None),) * dim + (slice(start, stop, step),)]
        method = "view" if self.name == "reshape" else self.name
        after: torch.Tensor = getattr(tensor, method)(*self.args)
        return after


@lru_cache(maxsize=4096)
def view_ops(layout: LayoutAlgebra, base: LayoutAlgebra) -> tuple[ViewOp, ...]:
    """Return view operations that turn `base` into `layout`; `as_strided` only if nothing else expresses it.

    Example:
        >>> from sparse_lightning import Layout
        >>> qkv = Layout((12, 4))
        >>> keys = Layout((2, 2, 4), (8, 4, 1), offset=16)
        >>> [op.name for op in view_ops(keys, qkv)]
        ['slice', 'reshape']
    """
    if layout == base:
        return ()
    upright, flipped = layout.positive()
    ways = (_from_dimensions, _from_runs, _from_thinned_runs) if layout.numel else (_from_nothing,)
    path = next((found for way in ways if (found := way(base, upright)) is not None), None)
    if path is None:
        path = _Path(base)
        path.go("as_strided", upright.shape, upright.stride, upright.offset)
    if flipped:
        path.go("flip", flipped)
    return tuple(path.steps)


class _Path:
    """The operations so far and the layout after each; operations that cancel out or change nothing are dropped."""

    def __init__(self, base: LayoutAlgebra) -> None:
        self.steps: list[ViewOp] = []
        self.layouts = [base]

    @property
    def now(self) -> LayoutAlgebra:
        return self.layouts[-1]

    def go(self, name: str, *args: Any) -> None:
        if self.steps and self.steps[-1].name == name:
            if name == "reshape":
                self._undo()
            elif name == "permute":
                args = (permuted(self.steps[-1].args[0], args[0]),)
                self._undo()
            elif name == "slice" and self.steps[-1].args[0] == args[0]:
                dim, start, stop, step = self.steps[-1].args
                self._undo()
                kept = range(self.now.shape[dim])[start:stop:step][args[1] : args[2] : args[3]]
                args = (dim, kept.start, kept.stop, kept.step)
        op = ViewOp(name, args)
        after = op.of_layout(self.now)
        if after != self.now:
            self.steps.append(op)
            self.layouts.append(after)

    def _undo(self) -> None:
        self.steps.pop()
        self.layouts.pop()


def _from_nothing(base: LayoutAlgebra, wanted: LayoutAlgebra) -> _Path:
    """An empty layout."""
    path = _Path(base)
    if base.numel:
        path.go("reshape", (base.shape or (1,)))
        path.go("slice", 0, 0, 0, 1)
    path.go("reshape", wanted.shape)
    return path


def _from_dimensions(base: LayoutAlgebra, wanted: LayoutAlgebra) -> _Path | None:
    """From the dimensions of the base as they are: sharded tensors support this better than merged dimensions."""
    path = _in_descending_order(base)
    path.go("reshape", tuple(n for n in path.now.shape if n != 1))
    return _express(path, wanted)


def _from_runs(base: LayoutAlgebra, wanted: LayoutAlgebra) -> _Path | None:
    """From the base with contiguous dimensions merged."""
    path = _in_descending_order(base)
    _merge(path)
    return _express(path, wanted)


def _from_thinned_runs(base: LayoutAlgebra, wanted: LayoutAlgebra) -> _Path | None:
    """From the base with each run that a wanted dimension leaves midway sliced by its step, then merged."""
    path = _in_descending_order(base)
    _merge(path)
    for _ in range(path.now.ndim):
        if not _thin(path, wanted):
            break
    return _express(path, wanted)


def _merge(path: _Path) -> None:
    """Merge contiguous dimensions."""
    path.go("reshape", tuple(run.size for run in coalesce(path.now.shape, path.now.stride) if run.size != 1))


def _thin(path: _Path, wanted: LayoutAlgebra) -> bool:
    """Slice one run and merge it with the next larger one, such that a wanted dimension steps evenly through both."""
    now = path.now
    starts = locate(now, wanted.offset)
    if starts is None:
        return False
    for j in range(1, now.ndim):
        above, stride, size = now.stride[j - 1], now.stride[j], now.shape[j]
        for n, s in zip(wanted.shape, wanted.stride, strict=True):
            if n == 1 or not stride <= s < above or above % s or s % stride:
                continue
            step, count = s // stride, above // s
            first = starts[j] % step
            if first + (count - 1) * step < size:
                path.go("slice", j, first, first + (count - 1) * step + 1, step)
                shape = path.now.shape
                path.go("reshape", (*shape[: j - 1], shape[j - 1] * count, *shape[j + 1 :]))
                return True
    return False


def _in_descending_order(base: LayoutAlgebra) -> _Path:
    """Sort the dimensions of the base by descending stride, negative ones flipped, repetitions dropped."""
    path = _Path(base)
    path.go("flip", base.positive()[1])
    for d, (n, s) in enumerate(zip(base.shape, base.stride, strict=True)):
        if n > 1 and not s:
            path.go("slice", d, 0, 1, 1)
    now = path.now
    path.go("permute", tuple(sorted(range(now.ndim), key=lambda d: (now.shape[d] > 1, -now.stride[d]))))
    return path


class _Steps(NamedTuple):
    """Every `step` elements, `size` times; `sizes` are the wanted dimensions in it, `places` their indices."""

    step: int
    size: int
    sizes: tuple[int, ...]
    places: tuple[int, ...]


class _Cut(NamedTuple):
    """Steps of the wanted layout within one run of the base: every `step` elements, `sizes` times.

    `group` is the number of neighbours in the run that are taken together at each step, `room` how many of them the
    inner dimensions do not need.
    """

    places: tuple[int, ...]
    sizes: tuple[int, ...]
    step: int
    group: int
    room: int


class _RunSlice(NamedTuple):
    """The slice `begin:end:common` of a run, how far it begins before the wanted start, and the cuts inside."""

    begin: int
    end: int
    common: int
    lead: int
    cuts: list[_Cut]


def _express(path: _Path, wanted: LayoutAlgebra) -> _Path | None:
    """Extend a path to a layout without negative strides; None if slices and reshapes of the runs can't."""
    starts = locate(path.now, wanted.offset)
    if starts is None:
        return None
    runs = list(zip(path.now.shape, path.now.stride, strict=True))
    moving = [pair for n, s in zip(wanted.shape, wanted.stride, strict=True) for pair in _within_runs(n, s, runs)]
    slices = []
    for j, (size, stride) in enumerate(runs):
        above = runs[j - 1][1] if j else math.inf
        inside = [(s // stride, n, i) for i, (n, s) in enumerate(moving) if stride <= s < above and s % stride == 0]
        found = _slice_of_run(_merged_steps(sorted(inside, reverse=True)), size, starts[j])
        if found is None:
            return None
        slices.append(found)
    if sum(len(cut.places) for found in slices for cut in found.cuts) != len(moving):
        return None
    _arrange(path, wanted, _take(path, slices))
    return path


def _within_runs(size: int, stride: int, runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return a dimension of the wanted layout as steps within one run each: several if it spans several runs."""
    if size == 1 or not stride:
        return []
    above = min((s for _, s in runs if s > stride), default=0)
    inner = above // stride
    if (size - 1) * stride < above or not above or above % stride or size % inner:
        return [(size, stride)]
    return [*_within_runs(size // inner, above, runs), (inner, stride)]


def _merged_steps(inside: list[tuple[int, int, int]]) -> list[_Steps]:
    """Merge contiguous steps `(step, size, place)`, largest first: they need no groups between them."""
    sizes = [n for _, n, _ in inside]
    return [
        _Steps(run.strides[0], run.size, permuted(sizes, run.dims), tuple(inside[d][2] for d in run.dims))
        for run in coalesce(sizes, [step for step, _, _ in inside])
    ]


def _slice_of_run(inside: list[_Steps], size: int, start: int) -> _RunSlice | None:
    """Return the slices and reshapes of a run that lead to `start` and from there through the steps, largest first.

    The run is first sliced by the greatest common divisor of all steps. Each step but the smallest then needs it in
    groups of a divisor of the step that holds all smaller steps. The room in those groups limits how far before
    `start` the first slice may begin.
    """
    common = math.gcd(*(s.step for s in inside)) or 1
    phase, start = start % common, start // common
    size = -(-(size - phase) // common)
    length, cuts = 1, []
    for step, n, sizes, places in reversed(inside):
        step //= common
        group = min((g for g in _divisors(step) if g >= length), default=0)
        if not group:
            return None
        cuts.append(_Cut(places, sizes, step, group, group - length))
        length = (n - 1) * step + group
    lead = max(0, start + length - size)
    if lead > min(start, sum(c.room for c in cuts)):
        return None
    begin = phase + (start - lead) * common
    return _RunSlice(begin, begin + (length - 1) * common + 1, common, lead, cuts[::-1])


def _divisors(n: int) -> set[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return {*small, *(n // d for d in small)}


def _take(path: _Path, slices: list[_RunSlice]) -> list[int]:
    """Slice and split every run; return the wanted dimension at each place."""
    order: list[int] = []
    for begin, end, common, lead, cuts in slices:
        place = len(order)
        path.go("slice", place, begin, end, common)
        if not cuts:
            path.go("reshape", path.now.shape[:place] + path.now.shape[place + 1 :])
        for cut in cuts:
            shape = path.now.shape
            if cut.group > 1:
                rows = shape[place] // cut.group
                path.go("reshape", (*shape[:place], rows, cut.group, *shape[place + 1 :]))
            path.go("slice", place, 0, path.now.shape[place], cut.step // cut.group)
            path.go("reshape", (*path.now.shape[:place], *cut.sizes, *path.now.shape[place + 1 :]))
            order += cut.places
            place = len(order)
            if cut.group > 1:
                ahead = min(lead, cut.room)
                lead -= ahead
                path.go("slice", place, ahead, ahead + cut.group - cut.room, 1)
    return order


def _arrange(path: _Path, wanted: LayoutAlgebra, order: list[int]) -> None:
    """Permute the steps from memory order to the order of the wanted dimensions."""
    path.go("permute", inverse(order))
    path.go("reshape", tuple(n if s else 1 for n, s in zip(wanted.shape, wanted.stride, strict=True)))
    path.go("expand", wanted.shape)
