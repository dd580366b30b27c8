"""Views: permutations, reshapes and expansions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from sparse_lightning.graph.atoms import Ids, Kind
from sparse_lightning.graph.call import Call, Resizing, plain_sizes, rule
from sparse_lightning.graph.rules.elementwise import identity
from sparse_lightning.graph.traced_value import TracedValue

WITH_DYNAMIC = "it is reshaped together with a dynamic size"


def resize_list(change: Resizing, index: int, name: str, first: int = 0) -> None:
    """Rewrite a list of sizes, whose first entry is dimension `first` of the result."""
    sizes = list(change.argument(index, name))
    left = change.sizes(change.result())[first : first + len(sizes)]
    result = change.result()
    inner = (result.inner or (None,) * result.ndim)[first : first + len(sizes)]
    cut = [ids is not None and not change.kept(ids).all() for ids in inner]
    change.replace(
        index,
        name,
        [(-1 if less else old) if new is None else new for old, new, less in zip(sizes, left, cut, strict=True)],
    )


def _resize_view(change: Resizing) -> None:
    resize_list(change, 1, "size")


def _resize_unflatten(change: Resizing) -> None:
    resize_list(change, 2, "sizes", int(change.argument(1, "dim")) % change.input(0).ndim)


def _resize_squeeze(change: Resizing) -> None:
    """Name the dimensions of size 1: others may get that size when units are removed."""
    node = change.node
    x = change.input(0)
    given = change.argument(1, "dim", list(range(x.ndim)))
    dims = [d % x.ndim for d in (given if isinstance(given, Sequence) else [given])]
    node.target = torch.ops.aten.squeeze.dims
    node.args, node.kwargs = (node.args[0], [d for d in dims if not x.is_wide(d)]), {}


@rule("aten.permute.default")
def permute(call: Call, x: TracedValue, dims: list[int]) -> TracedValue:
    """Reorder dimensions."""
    return x.permuted([d % x.ndim for d in dims])


@rule("aten.transpose.int", "aten.swapaxes.default", "aten.swapdims.default")
def transpose(call: Call, x: TracedValue, one: int, other: int) -> TracedValue:
    """Swap two dimensions."""
    order = list(range(x.ndim))
    order[one], order[other] = order[other], order[one]
    return x.permuted(order)


@rule("aten.t.default", "aten.numpy_T.default", "aten.mT.default", "aten.matrix_H.default")
def reverse(call: Call, x: TracedValue) -> TracedValue:
    """Reverse dimensions; `mT` swaps the last two."""
    order = list(range(x.ndim))
    last = order[:-2] + order[-2:][::-1]
    return x.permuted(last if "mT" in call.operation else order[::-1])


@rule("aten.movedim.int", "aten.movedim.intlist")
def movedim(call: Call, x: TracedValue, source: Any, target: Any) -> TracedValue:
    """Move dimensions."""
    moved = [d % x.ndim for d in (source if isinstance(source, Sequence) else [source])]
    places = [d % x.ndim for d in (target if isinstance(target, Sequence) else [target])]
    order = [d for d in range(x.ndim) if d not in moved]
    for place, d in sorted(zip(places, moved, strict=True)):
        order.insert(place, d)
    return x.permuted(order)


@rule("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", resize=_resize_view)
@rule("aten.flatten.using_ints", "aten.unsqueeze.default", "aten.view_as.default", "aten.reshape_as.default")
@rule("aten.ravel.default")
@rule("aten.unflatten.int", resize=_resize_unflatten)
@rule("aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims", resize=_resize_squeeze)
def reshape(call: Call, x: TracedValue, *args: Any, **kwargs: Any) -> TracedValue:
    """Relate the dimensions of two shapes: each group with the same number of elements is merged, then split."""
    source = call.node.args[0]
    assert isinstance(source, torch.fx.Node)
    old, new = plain_sizes(source.meta["val"]), call.sizes()
    dims: list[Ids | None] = [None] * len(new)
    inner: list[Ids | None] = [None] * len(new)
    zero = [False] * len(new)
    for left, right in matching_groups(old, new):
        made, known, repeated = _regroup(call, x, left, [new[d] for d in right])
        for d, ids in zip(right, made, strict=True):
            dims[d], zero[d] = ids, known
        if repeated is not None:
            inner[right[repeated[0]]] = repeated[1]
    for d, size in enumerate(new):
        if isinstance(size, int) and size == 1:
            dims[d] = call.fixed(1)
    some = any(ids is not None for ids in inner)
    return replace(x, dims=tuple(dims), zero=tuple(zero), inner=tuple(inner) if some else ())


Regrouped = tuple[list[Ids | None], bool, tuple[int, Ids] | None]


def _regroup(call: Call, x: TracedValue, left: list[int], sizes: list[Any]) -> Regrouped:
    """Merge dimensions of a value into one, and split it into others.

    Returns:
        The new dimensions, whether they are zero where units are, and the number of the dynamic one in which atoms
        repeat, with these atoms.
    """
    olds = [x.dims[d] for d in left]
    known = all(x.zero[d] for d in left)
    axes = [ids for ids in olds if ids is not None]
    if len(axes) < len(olds) or not all(isinstance(size, int) for size in sizes):
        return _regroup_dynamic(call, x, left, sizes)
    if len(olds) == len(sizes) == 1:
        return olds, known, None
    flat = axes[0]
    if len(axes) > 1:
        flat = call.atoms.fresh(math.prod(len(ids) for ids in axes))
        call.product(flat, axes)
    if len(sizes) == 1:
        return [flat], known, None
    made = [call.atoms.fresh(size) for size in sizes]
    call.product(flat, made)
    return list(made), known, None


def _regroup_dynamic(call: Call, x: TracedValue, left: list[int], sizes: list[Any]) -> Regrouped:
    """Regroup fixed sizes that follow dynamic ones: batch × heads keeps the heads as atoms that repeat."""
    inner = [x.inner[d] if x.inner else None for d in left]
    dynamic = [i for i, d in enumerate(left) if x.dims[d] is None]
    axes = [ids for i, d in enumerate(left) for ids in (inner[i] if i in dynamic else x.dims[d],) if ids is not None]
    if len(left) == len(sizes) == 1:
        return [None], False, None if inner[0] is None else (0, inner[0])
    fixed = [size for size in sizes if isinstance(size, int)]
    total, last = math.prod(map(len, axes)), len(sizes) - len(fixed) - 1
    leading = dynamic == list(range(len(dynamic))) and not any(ids is not None for ids in inner[: len(dynamic) - 1])
    at_end = sizes[last + 1 :] == fixed and last >= 0
    rest = total // math.prod(fixed) if total % math.prod(fixed) == 0 else 0
    if not (leading and at_end and rest and _divides(rest, sizes[last])):
        for ids in axes:
            call.pin(ids, WITH_DYNAMIC)
        return [call.fixed(size) for size in sizes], False, None
    made = [call.atoms.fresh(size) for size in ([rest] if rest > 1 else []) + fixed]
    flat = call.atoms.fresh(total)
    call.product(flat, axes)
    call.product(flat, made)
    repeated = (last, made.pop(0)) if rest > 1 else None
    return [*([None] * (last + 1)), *made], False, repeated


def _divides(number: int, size: Any) -> bool:
    """Whether a dynamic size is a multiple of a number for all values of its symbols."""
    quotient = _expression(size) / number
    return number == 1 or all(value.is_integer for value in quotient.expand().as_coefficients_dict().values())


def matching_groups(old: Sequence[Any], new: Sequence[Any]) -> list[tuple[list[int], list[int]]]:
    """Return the smallest groups of consecutive dimensions of two shapes with equal products; sizes of 1 are left out.

    Example:
        >>> matching_groups((2, 5, 12), (10, 1, 3, 4))
        [([0, 1], [0]), ([2], [2, 3])]
    """
    left = [d for d, size in enumerate(old) if not (isinstance(size, int) and size == 1)]
    right = [d for d, size in enumerate(new) if not (isinstance(size, int) and size == 1)]
    groups = []
    while left or right:
        a, b = left[:1], right[:1]
        del left[:1], right[:1]
        while not _equal(_product(old, a), _product(new, b)) and (left or right):
            shorter = _hint(_product(old, a)) < _hint(_product(new, b))
            side, rest = (a, left) if (shorter and left) or not right else (b, right)
            side.append(rest.pop(0))
        groups.append((a, b))
    return groups


def _product(sizes: Sequence[Any], dims: list[int]) -> Any:
    return math.prod((_expression(sizes[d]) for d in dims), start=1)


def _expression(size: Any) -> Any:
    return size if isinstance(size, int) else size.node.expr


def _hint(size: Any) -> float:
    """Return a number for a size, to decide which side of a group is shorter; symbols count as large primes."""
    if isinstance(size, int):
        return size
    symbols = sorted(size.free_symbols, key=str)
    return float(size.subs({symbol: 10007 + 2 * i for i, symbol in enumerate(symbols)}))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    return bool((one - other).expand() == 0) if not isinstance(one, int) else bool((other - one).expand() == 0)


@rule("aten.expand.default", "aten.broadcast_to.default", "aten.expand_as.default", resize=lambda c: _resize_expand(c))
def expand(call: Call, x: TracedValue, *args: Any, **kwargs: Any) -> TracedValue:
    """Repeat what has size 1: each copy can be removed."""
    sizes = call.sizes()
    new = len(sizes) - x.ndim
    dims, zero = [], []
    for i, size in enumerate(sizes):
        if i >= new and (x.is_wide(i - new) or (isinstance(size, int) and size == 1)):
            dims.append(x.dims[i - new])
            zero.append(x.zero[i - new])
        else:
            dims.append(call.free(size))
            zero.append(False)
            call.mark(dims[-1], Kind.EXPANDED)
    return replace(x, dims=tuple(dims), zero=tuple(zero))


def _resize_expand(change: Resizing) -> None:
    if "expand_as" not in str(change.node.target):
        resize_list(change, 1, "size")


def _resize_repeat(change: Resizing) -> None:
    """Repeat as often as copies are left."""
    x = change.input(0)
    repeats = list(change.argument(1, "repeats"))
    before = [1] * (len(repeats) - x.ndim) + change.sizes(x)
    after = change.sizes(change.result())
    change.node.update_arg(
        1, [n if a is None or b is None else b // max(1, a) for n, a, b in zip(repeats, before, after, strict=True)]
    )


@rule("aten.repeat.default", resize=_resize_repeat)
def repeat(call: Call, x: TracedValue, repeats: list[Any]) -> TracedValue:
    """Repeat dimensions as a whole: a copy is an outer axis."""
    new = len(repeats) - x.ndim
    dims: list[Ids | None] = []
    for i, count in enumerate(repeats):
        old = x.dims[i - new] if i >= new else call.fixed(1)
        dims.append(_repeated(call, old, count, call.sizes()[i], outer=True))
    zero = [i >= new and x.zero[i - new] and repeats[i] == 1 for i in range(len(repeats))]
    return replace(x, dims=tuple(dims), zero=tuple(zero))


def _repeated(call: Call, old: Ids | None, count: Any, size: Any, outer: bool) -> Ids | None:
    if isinstance(count, int) and count == 1:
        return old
    if old is None or not isinstance(count, int):
        call.pin(old, "it is repeated by a dynamic number")
        return call.fixed(size)
    copies, flat = call.free(count), call.atoms.fresh(count * len(old))
    call.mark(copies, Kind.EXPANDED)
    assert copies is not None
    call.product(flat, [copies, old] if outer else [old, copies])
    return flat


def _resize_interleave(change: Resizing) -> None:
    x, dim = change.input(0), change.argument(2, "dim")
    if dim is not None:
        before, after = change.sizes(x)[dim], change.sizes(change.result())[dim]
        if before is not None and after is not None:
            change.node.update_arg(1, after // max(1, before))
            change.node.kwargs = {k: v for k, v in change.node.kwargs.items() if k != "output_size"}


@rule("aten.repeat_interleave.self_int", resize=_resize_interleave)
def repeat_interleave(call: Call, x: TracedValue, repeats: Any, dim: int | None = None, **kwargs: Any) -> TracedValue:
    """Repeat each coordinate: a copy is an inner axis."""
    if dim is None:
        call.pin_all(x, "it is flattened and repeated")
        return call.pinned(call.sizes())
    dim %= x.ndim
    ids = _repeated(call, x.dims[dim], repeats, call.sizes()[dim], outer=False)
    zero = tuple(known and (d != dim or repeats == 1) for d, known in enumerate(x.zero))
    return replace(x, dims=(*x.dims[:dim], ids, *x.dims[dim + 1 :]), zero=zero)


KEEPS_INNER = (permute, transpose, reverse, movedim, reshape, identity)
"""Rules that move atoms that repeat in a dynamic dimension; other operations pin them."""
