"""Movements: a layout written as ordinary view operations on another one.

`as_strided` does not exist for every kind of tensor (DTensor, tensor subclasses, traced values). Reshape,
permute, slice, flip and expand do, and they are all that most views need.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from sparse_lightning.layout import Layout


class Movement(NamedTuple):
    """One view operation: `reshape`, `permute`, `slice`, `flip`, `expand` or `as_strided`, and its arguments.

    On a plain tensor all are views but `flip`, which copies: torch has no negative strides. On a DTensor a `slice` of a
    sharded dimension copies too: it gathers that dimension first.
    """

    name: str
    args: tuple[Any, ...]

    def of_layout(self, layout: Layout) -> Layout:
        """The layout after the movement."""
        if self.name == "as_strided":
            return type(layout)(*self.args)
        moved: Layout = getattr(layout, self.name)(*self.args)
        return moved

    def of_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor after the movement: a view where the class says so."""
        if self.name == "slice":
            dim, start, stop, step = self.args
            return tensor[(slice(None),) * dim + (slice(start, stop, step),)]
        method = "view" if self.name == "reshape" else self.name
        moved: torch.Tensor = getattr(tensor, method)(*self.args)
        return moved


@lru_cache(maxsize=4096)
def movements(layout: Layout, base: Layout) -> tuple[Movement, ...]:
    """View operations that turn `base` into `layout`, `as_strided` only where nothing else can.

    Example:
        >>> from sparse_lightning import Layout
        >>> qkv = Layout((12, 4))
        >>> keys = Layout((2, 2, 4), (8, 4, 1), offset=16)
        >>> [m.name for m in movements(keys, qkv)]
        ['slice', 'reshape']
    """
    if layout == base:
        return ()
    upright, flipped = layout.positive()
    ways = (_apart, _merged, _woven) if layout.numel else (_empty,)
    path = next((found for way in ways if (found := way(base, upright)) is not None), None)
    if path is None:
        path = _Path(base)
        path.go("as_strided", upright.shape, upright.stride, upright.offset)
    if flipped:
        path.go("flip", flipped)
    return tuple(path.steps)


class _Path:
    """The steps so far and the layout after each; steps that cancel out or change nothing are dropped."""

    def __init__(self, base: Layout) -> None:
        self.steps: list[Movement] = []
        self.layouts = [base]

    @property
    def now(self) -> Layout:
        return self.layouts[-1]

    def go(self, name: str, *args: Any) -> None:
        if self.steps and self.steps[-1].name == name:
            if name == "reshape":
                self._undo()
            elif name == "permute":
                args = (tuple(self.steps[-1].args[0][d] for d in args[0]),)
                self._undo()
            elif name == "slice" and self.steps[-1].args[0] == args[0]:
                dim, start, stop, step = self.steps[-1].args
                self._undo()
                part = range(self.now.shape[dim])[start:stop:step][args[1] : args[2] : args[3]]
                args = (dim, part.start, part.stop, part.step)
        step = Movement(name, args)
        after = step.of_layout(self.now)
        if after != self.now:
            self.steps.append(step)
            self.layouts.append(after)

    def _undo(self) -> None:
        self.steps.pop()
        self.layouts.pop()


def _empty(base: Layout, wanted: Layout) -> _Path:
    path = _Path(base)
    if base.numel:
        path.go("reshape", (base.shape or (1,)))
        path.go("slice", 0, 0, 0, 1)
    path.go("reshape", wanted.shape)
    return path


def _apart(base: Layout, wanted: Layout) -> _Path | None:
    """From the base's dimensions as they are; sharded tensors take this more gladly than a merge."""
    path = _in_falling_order(base)
    path.go("reshape", tuple(n for n in path.now.shape if n != 1))
    return _express(path, wanted)


def _merged(base: Layout, wanted: Layout) -> _Path | None:
    """From the base with dimensions merged that count on through one another."""
    path = _in_falling_order(base)
    path.go("reshape", tuple(n for n, _ in path.now._runs()[1:]))
    return _express(path, wanted)


def _woven(base: Layout, wanted: Layout) -> _Path | None:
    """From the base with each run that a wanted dimension leaves in mid-row thinned to its step, then merged."""
    path = _in_falling_order(base)
    path.go("reshape", tuple(n for n, _ in path.now._runs()[1:]))
    for _ in range(path.now.ndim):
        if not _weave(path, wanted):
            break
    return _express(path, wanted)


def _weave(path: _Path, wanted: Layout) -> bool:
    """Merge one run with the next larger one, such that a wanted dimension steps through both evenly."""
    now = path.now
    starts = _coordinates(list(zip(now.shape, now.stride, strict=True)), wanted.offset - now.offset)
    for j in range(1, now.ndim) if starts is not None else ():
        above, stride, size = now.stride[j - 1], now.stride[j], now.shape[j]
        for n, s in zip(wanted.shape, wanted.stride, strict=True):
            if n == 1 or not stride <= s < above or above % s or s % stride:
                continue
            step, count = s // stride, above // s
            first = starts[j] % step if starts is not None else 0
            if first + (count - 1) * step < size:
                path.go("slice", j, first, first + (count - 1) * step + 1, step)
                shape = path.now.shape
                path.go("reshape", (*shape[: j - 1], shape[j - 1] * count, *shape[j + 1 :]))
                return True
    return False


def _in_falling_order(base: Layout) -> _Path:
    """Bring the base into falling order of its strides, negative ones flipped, repetitions dropped."""
    path = _Path(base)
    path.go("flip", base.positive()[1])
    for d, (n, s) in enumerate(zip(base.shape, base.stride, strict=True)):
        if n > 1 and not s:
            path.go("slice", d, 0, 1, 1)
    now = path.now
    path.go("permute", tuple(sorted(range(now.ndim), key=lambda d: (now.shape[d] > 1, -now.stride[d]))))
    return path


class _Cut(NamedTuple):
    """Steps of the wanted layout within one run of the base: every `step` elements, `sizes` times.

    `group` is how many neighbours of the run are taken together at each step, `room` how many of them
    the dimensions inside do not need.
    """

    places: tuple[int, ...]
    sizes: tuple[int, ...]
    step: int
    group: int
    room: int


class _Plan(NamedTuple):
    """The slice `begin:end:common` of a run, how far it begins before the wanted start, and the cuts inside."""

    begin: int
    end: int
    common: int
    lead: int
    cuts: list[_Cut]


def _express(path: _Path, wanted: Layout) -> _Path | None:
    """Go on to a layout without negative strides; None where these movements can't."""
    runs = list(zip(path.now.shape, path.now.stride, strict=True))
    starts = _coordinates(runs, wanted.offset - path.now.offset)
    if starts is None:
        return None
    moving = [pair for n, s in zip(wanted.shape, wanted.stride, strict=True) for pair in _within_runs(n, s, runs)]
    plans = []
    for j, (size, stride) in enumerate(runs):
        above = runs[j - 1][1] if j else math.inf
        inside = [(s // stride, n, i) for i, (n, s) in enumerate(moving) if stride <= s < above and s % stride == 0]
        plan = _plan(_chained(sorted(inside, reverse=True)), size, starts[j])
        if plan is None:
            return None
        plans.append(plan)
    if sum(len(cut.places) for plan in plans for cut in plan.cuts) != len(moving):
        return None
    _arrange(path, wanted, _take(path, plans))
    return path


def _within_runs(size: int, stride: int, runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """A dimension of the wanted layout as steps that stay within one run: several where it counts on across some."""
    if size == 1 or not stride:
        return []
    above = min((s for _, s in runs if s > stride), default=0)
    inner = above // stride
    if (size - 1) * stride < above or not above or above % stride or size % inner:
        return [(size, stride)]
    return [*_within_runs(size // inner, above, runs), (inner, stride)]


def _coordinates(runs: Sequence[tuple[int, int]], offset: int) -> list[int] | None:
    """Where an offset lies in nested runs; None where it does not, or where the runs do not nest."""
    extent = 0
    for size, stride in reversed(runs):
        if stride <= extent:
            return None
        extent += (size - 1) * stride
    place = []
    for size, stride in runs:
        place.append(offset // stride)
        offset -= place[-1] * stride
        if not 0 <= place[-1] < size:
            return None
    return None if offset else place


class _Steps(NamedTuple):
    """Every `step` elements, `size` times; seen as dimensions of the sizes, for the places in the wanted order."""

    step: int
    size: int
    sizes: tuple[int, ...]
    places: tuple[int, ...]


def _chained(inside: list[tuple[int, int, int]]) -> list[_Steps]:
    """Steps, largest first, as one where they count on through one another: they need no groups between them."""
    found: list[_Steps] = []
    for step, n, place in inside:
        if found and found[-1].step == n * step:
            _, size, sizes, places = found[-1]
            found[-1] = _Steps(step, size * n, (*sizes, n), (*places, place))
        else:
            found.append(_Steps(step, n, (n,), (place,)))
    return found


def _plan(inside: list[_Steps], size: int, start: int) -> _Plan | None:
    """How slices and reshapes of a run reach `start` and from there the given steps, largest first.

    The run is first thinned to what all steps have in common. Each step but the smallest then needs it in
    groups of a divisor of the step that holds all smaller steps. The room in those groups says how far before
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
    return _Plan(begin, begin + (length - 1) * common + 1, common, lead, cuts[::-1])


def _divisors(n: int) -> set[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return {*small, *(n // d for d in small)}


def _take(path: _Path, plans: list[_Plan]) -> list[int]:
    """Slice and split every run by its plan; which steps then stand where."""
    order: list[int] = []
    for begin, end, common, lead, cuts in plans:
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


def _arrange(path: _Path, wanted: Layout, order: list[int]) -> None:
    """From the steps in memory order to the dimensions in the wanted one."""
    path.go("permute", tuple(order.index(i) for i in range(len(order))))
    path.go("reshape", tuple(n if s else 1 for n, s in zip(wanted.shape, wanted.stride, strict=True)))
    path.go("expand", wanted.shape)
