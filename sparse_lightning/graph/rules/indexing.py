"""Cutting, joining and indexing: the atoms move with the coordinates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sparse_lightning.graph.atoms import Ids
from sparse_lightning.graph.call import Call, Resizing, rule
from sparse_lightning.graph.traced_value import TracedValue


@rule("aten.cat.default")
def cat(call: Call, tensors: list[TracedValue], dim: int = 0) -> TracedValue:
    """Join values along one dimension, and unify the others."""
    values = [
        value for value in tensors if not (value.ndim == 1 and value.dims[0] is not None and not len(value.dims[0]))
    ]
    dim %= values[0].ndim
    dims = list(values[0].dims)
    for value in values[1:]:
        for d in range(value.ndim):
            if d != dim and not (dims[d] is None and value.dims[d] is None):
                dims[d] = call.unify(dims[d], value.dims[d])
    joined = [value.dims[dim] for value in values]
    if any(ids is None for ids in joined):
        for ids in joined:
            call.pin(ids, "it is joined with a dynamic size")
        dims[dim] = None
    else:
        dims[dim] = np.concatenate([ids for ids in joined if ids is not None])
    zero = tuple(all(value.zero[d] for value in values) for d in range(len(dims)))
    return TracedValue(tuple(dims), zero, sign=min(value.sign for value in values))


def _resize_parts(change: Resizing) -> None:
    """Cut at the sizes that are left."""
    node = change.node
    at, name = (2, "dim")
    dim = int(change.argument(at, name, 0))
    parts = change.result()
    if any(part.dims[dim] is None for part in parts):
        return
    sizes = [int(change.kept(part.dims[dim]).sum()) for part in parts]
    node.target = torch.ops.aten.split_with_sizes.default
    node.args, node.kwargs = (node.args[0], sizes, dim), {}


@rule(
    "aten.split.Tensor",
    "aten.split.sizes",
    "aten.split_with_sizes.default",
    "aten.chunk.default",
    "aten.tensor_split.sections",
    resize=_resize_parts,
)
def split(call: Call, x: TracedValue, sizes: Any, dim: int = 0) -> tuple[TracedValue, ...]:
    """Cut a dimension into consecutive parts."""
    dim %= x.ndim
    count = len(call.node.meta["val"])
    lengths = [call.sizes(i)[dim] for i in range(count)]
    ids = x.dims[dim]
    if ids is None or not all(isinstance(length, int) for length in lengths):
        call.pin(ids, "it is cut at dynamic places")
        return tuple(_with_dim(x, dim, call.fixed(length)) for length in lengths)
    ends = np.cumsum(lengths)
    return tuple(_with_dim(x, dim, ids[end - n : end]) for n, end in zip(lengths, ends, strict=True))


def _resize_slice(change: Resizing) -> None:
    """Start and end at the coordinates that are left."""
    node = change.node
    x = change.input(0)
    dim = int(change.argument(1, "dim", 0)) % x.ndim
    ids = x.dims[dim]
    if ids is None or change.result().dims[dim] is None:
        return
    start, end, _ = slice(change.argument(2, "start"), change.argument(3, "end")).indices(len(ids))
    kept = change.kept(ids)
    change.node.args = (node.args[0], dim, int(kept[:start].sum()), int(kept[:end].sum()), *node.args[4:])


@rule("aten.slice.Tensor", resize=_resize_slice)
def slices(call: Call, x: TracedValue, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> TracedValue:
    """Take consecutive coordinates of a dimension."""
    dim %= x.ndim
    ids = x.dims[dim]
    if ids is None:
        return _with_dim(x, dim, call.fixed(call.sizes()[dim]))
    if not all(bound is None or type(bound) is int for bound in (start, end)):
        call.pin(ids, "it is cut at dynamic places")
        return _with_dim(x, dim, call.fixed(call.sizes()[dim]))
    if step != 1:
        call.pin(ids, "it takes each coordinate but a few")
    return _with_dim(x, dim, ids[slice(start, end, step)])


def _resize_select(change: Resizing) -> None:
    node = change.node
    x = change.input(0)
    dim, index = int(change.argument(1, "dim")) % x.ndim, change.argument(2, "index")
    ids = x.dims[dim]
    if ids is not None and isinstance(index, int):
        node.update_arg(2, int(change.kept(ids)[: index % len(ids)].sum()))


@rule("aten.select.int", resize=_resize_select)
def select(call: Call, x: TracedValue, dim: int, index: Any) -> TracedValue:
    """Take one coordinate of a dimension, and pin it."""
    dim %= x.ndim
    ids = x.dims[dim]
    if ids is not None:
        call.pin(ids if type(index) is not int else ids[[index]], "it takes one of them by its number")
    return replace(x, dims=_without(x.dims, dim), zero=_without(x.zero, dim))


@rule("aten.unbind.int")
def unbind(call: Call, x: TracedValue, dim: int = 0) -> tuple[TracedValue, ...]:
    """Take each coordinate of a dimension, and pin them."""
    dim %= x.ndim
    call.pin(x.dims[dim], "it takes each of them by its number")
    part = replace(x, dims=_without(x.dims, dim), zero=_without(x.zero, dim))
    return (part,) * len(call.node.meta["val"])


@rule("aten.stack.default")
def stack(call: Call, tensors: list[TracedValue], dim: int = 0) -> TracedValue:
    """Join values along a new dimension, which is fixed."""
    dims = list(tensors[0].dims)
    for value in tensors[1:]:
        dims = [a if a is None and b is None else call.unify(a, b) for a, b in zip(dims, value.dims, strict=True)]
    zero = [all(value.zero[d] for value in tensors) for d in range(len(dims))]
    dim %= len(dims) + 1
    dims.insert(dim, call.fixed(len(tensors)))
    zero.insert(dim, False)
    return TracedValue(tuple(dims), tuple(zero))


@rule("aten.embedding.default")
def embedding(call: Call, weight: TracedValue, indices: TracedValue, *args: Any, **kwargs: Any) -> TracedValue:
    """Look up rows by number, which pins them."""
    call.pin(weight.dims[0], "rows are looked up by their number")
    for ids in indices.dims:
        call.pin(ids, "it is a dimension of indices", listed=False)
    return TracedValue((*indices.dims, weight.dims[1]), (*(False,) * indices.ndim, weight.zero[1]))


@rule("aten.index.Tensor")
def index(call: Call, x: TracedValue, indices: list[TracedValue | None]) -> TracedValue:
    """Index dimensions by tensors, which pins them; the other dimensions are kept."""
    where = [d for d, given in enumerate(indices) if given is not None]
    for d in where:
        call.pin(x.dims[d], "it is indexed by numbers")
        given = indices[d]
        if given is not None:
            call.pin_all(given, "it is a dimension of indices", listed=False)
    rest = [d for d in range(x.ndim) if d not in where]
    sizes = call.sizes()
    new = len(sizes) - len(rest)
    joint = where == list(range(where[0], where[-1] + 1))
    at = where[0] if joint else 0
    before, after = [d for d in rest if d < at], [d for d in rest if d >= at]
    if not joint:
        before, after = [], rest
    middle = [call.fixed(size) for size in sizes[len(before) : len(before) + new]]
    return TracedValue(
        (*(x.dims[d] for d in before), *middle, *(x.dims[d] for d in after)),
        (*(x.zero[d] for d in before), *(False,) * new, *(x.zero[d] for d in after)),
    )


@rule("aten.flip.default")
def flip(call: Call, x: TracedValue, dims: list[int]) -> TracedValue:
    """Reverse the order of coordinates."""
    turned = {d % x.ndim for d in dims}
    return replace(
        x, dims=tuple(ids[::-1].copy() if d in turned and ids is not None else ids for d, ids in enumerate(x.dims))
    )


@rule("aten.constant_pad_nd.default", "aten.pad.default")
def pad(call: Call, x: TracedValue, padding: list[Any], *args: Any, **kwargs: Any) -> TracedValue:
    """Add coordinates at the ends of dimensions, which pins these."""
    padded = {x.ndim - 1 - i // 2 for i, n in enumerate(padding) if not (isinstance(n, int) and n == 0)}
    for d in padded:
        call.pin(x.dims[d], "it is padded", listed=False)
    sizes = call.sizes()
    plain = "constant_pad" in call.operation or (not args and not kwargs) or (args[:1] or ["constant"])[0] == "constant"
    value = (args or [0])[-1] if plain else 0
    return TracedValue(
        tuple(call.fixed(sizes[d]) if d in padded else x.dims[d] for d in range(x.ndim)),
        tuple(d not in padded and x.zero[d] and value in (0, 0.0, None, "constant") for d in range(x.ndim)),
    )


@rule("aten.unfold.default")
def unfold(call: Call, x: TracedValue, dim: int, size: int, step: int) -> TracedValue:
    """Cut a dimension into windows, which pins it."""
    dim %= x.ndim
    call.pin(x.dims[dim], "it is cut into windows", listed=False)
    sizes = call.sizes()
    dims = [call.fixed(sizes[d]) if d == dim else ids for d, ids in enumerate(x.dims)]
    zero = [d != dim and known for d, known in enumerate(x.zero)]
    return TracedValue((*dims, call.fixed(size)), (*zero, False))


def _is_empty(x: TracedValue) -> bool:
    """Whether a value has the shape (0,), which `cat` accepts beside any other."""
    return x.ndim == 1 and x.dims[0] is not None and not len(x.dims[0])


def _with_dim(x: TracedValue, dim: int, ids: Ids | None) -> TracedValue:
    return replace(x, dims=(*x.dims[:dim], ids, *x.dims[dim + 1 :]))


def _without(items: tuple[Any, ...], dim: int) -> tuple[Any, ...]:
    return (*items[:dim], *items[dim + 1 :])
