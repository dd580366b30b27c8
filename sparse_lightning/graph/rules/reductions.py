"""Reductions: they pin the dimensions that they run over; a sum does not where the terms are zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparse_lightning.graph.call import Call, rule
from sparse_lightning.graph.traced_value import Sign, TracedValue

_DIMS = "mean.dim var.correction var.dim std.correction std.dim amax.default amin.default logsumexp.default "
_DIMS += "linalg_vector_norm.default norm.ScalarOpt_dim prod.dim_int all.dim any.dim argmax.default argmin.default"
_NONNEGATIVE = ("var", "std", "norm", "linalg_vector_norm")


@rule("aten.sum.dim_IntList")
def sums(call: Call, x: TracedValue, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> TracedValue:
    """Sum: a removed unit contributes nothing where its terms are zero."""
    over = _dims(x, dim)
    for d in over:
        if not x.zero[d]:
            call.pin(x.dims[d], "it sums over them")
    return _reduced(call, x, over, keepdim, x.sign)


@rule(*(f"aten.{name}" for name in _DIMS.split()))
def reduction(call: Call, x: TracedValue, *args: Any, **kwargs: Any) -> TracedValue:
    """Pin the dimensions that are reduced: without some of them the result would differ."""
    first = 1 if any(name in call.operation for name in ("norm",)) else 0
    given = list(args[first:])
    over = _dims(x, kwargs.get("dim", given[0] if given else None))
    for d in over:
        call.pin(x.dims[d], f"it takes the {call.operation.split('.')[1]} over them")
    keepdim = len(call.sizes()) == x.ndim
    name = call.operation.split(".")[1]
    sign = Sign.NONNEGATIVE if name in _NONNEGATIVE else x.sign if name in ("mean", "amax", "amin") else Sign.ANY
    return _reduced(call, x, over, keepdim, sign)


@rule("aten.cumsum.default", "aten.cumprod.default", "aten.logcumsumexp.default")
def scan(call: Call, x: TracedValue, dim: int, **kwargs: Any) -> TracedValue:
    """Pin the dimension that is accumulated."""
    call.pin(x.dims[dim], "it accumulates over them")
    return x.nonzero()


@rule("aten.sum.default", "aten.mean.default", "aten.max.default", "aten.min.default")
def total(call: Call, x: TracedValue, **kwargs: Any) -> TracedValue:
    """Pin everything."""
    call.pin_all(x, f"it takes the {call.operation.split('.')[1]} over them")
    return TracedValue((), (), sign=x.sign)


def _dims(x: TracedValue, dim: Any) -> list[int]:
    if dim is None or dim == []:
        return list(range(x.ndim))
    return [d % x.ndim for d in (dim if isinstance(dim, Sequence) else [dim])]


def _reduced(call: Call, x: TracedValue, over: list[int], keepdim: bool, sign: Sign) -> TracedValue:
    name = call.operation.split(".")[1]
    dims, zero = [], []
    for d in range(x.ndim):
        if d not in over:
            dims.append(x.dims[d])
            zero.append(x.zero[d] and name in ("sum", "mean", "amax", "amin", *_NONNEGATIVE))
        elif keepdim:
            dims.append(call.fixed(1))
            zero.append(False)
    return TracedValue(tuple(dims), tuple(zero), sign=sign)
