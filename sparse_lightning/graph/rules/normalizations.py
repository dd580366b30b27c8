"""Normalisations: batch norm treats each channel by itself; others pin the dimensions that they run over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sparse_lightning.graph.call import Call, rule
from sparse_lightning.graph.traced_value import Sign, TracedValue


@rule("aten.batch_norm.default", "aten.instance_norm.default")
def batch_norm(
    call: Call,
    x: TracedValue,
    weight: TracedValue | None = None,
    bias: TracedValue | None = None,
    mean: TracedValue | None = None,
    variance: TracedValue | None = None,
    *args: Any,
    **kwargs: Any,
) -> TracedValue:
    """Unify the channels with those of the weight, the bias and the running statistics."""
    channels = x.dims[1]
    for value in (weight, bias, mean, variance):
        if value is not None:
            channels = call.unify(channels, value.dims[0])
    for ids in x.dims[2:]:
        call.pin(ids, "it takes statistics over positions", listed=False)
    known = weight is not None and weight.zero[0] and (bias is None or bias.zero[0])
    return TracedValue((x.dims[0], channels, *x.dims[2:]), (False, known, *(False,) * (x.ndim - 2)))


@rule("aten._native_batch_norm_legit_no_training.default")
def decomposed_batch_norm(call: Call, x: TracedValue, *args: Any, **kwargs: Any) -> tuple[TracedValue, ...]:
    """Treat it as batch norm, which becomes this operation where those in place are replaced."""
    return batch_norm(call, x, *args, **kwargs), call.pinned(call.sizes(1)), call.pinned(call.sizes(2))


@rule("aten.layer_norm.default", "aten.rms_norm.default")
def layer_norm(
    call: Call,
    x: TracedValue,
    shape: list[int],
    weight: TracedValue | None = None,
    bias: Any = None,
    *args: Any,
    **kwargs: Any,
) -> TracedValue:
    """Pin the dimensions that are normalised."""
    count = len(shape)
    shift = bias if isinstance(bias, TracedValue) else None
    _pin(call, [x.dims[d] for d in range(x.ndim - count, x.ndim)], "it normalises over them")
    for value in (weight, shift):
        for d, ids in enumerate(() if value is None else value.dims):
            call.unify(x.dims[x.ndim - count + d], ids)
    zero = [known and shift is None for known in x.zero[:-count]]
    return TracedValue(x.dims, (*zero, *(False,) * count))


@rule("aten.group_norm.default")
def group_norm(
    call: Call,
    x: TracedValue,
    groups: int,
    weight: TracedValue | None = None,
    bias: TracedValue | None = None,
    *args: Any,
) -> TracedValue:
    """Pin channels: a group would have other statistics without one of its channels."""
    _pin(call, x.dims[1:2], "it normalises over groups of them")
    for ids in x.dims[2:]:
        call.pin(ids, "it takes statistics over positions", listed=False)
    for value in (weight, bias):
        if value is not None:
            call.unify(x.dims[1], value.dims[0])
    return TracedValue(x.dims, (False,) * x.ndim)


@rule("aten.softmax.int", "aten._softmax.default", "aten.log_softmax.int", "aten._log_softmax.default")
def softmax(call: Call, x: TracedValue, dim: int, *args: Any, **kwargs: Any) -> TracedValue:
    """Pin the dimension that is normalised."""
    _pin(call, [x.dims[dim]], "it normalises over them")
    sign = Sign.ANY if "log" in call.operation else Sign.NONNEGATIVE
    return TracedValue(x.dims, (False,) * x.ndim, sign=sign)


def _pin(call: Call, dims: Iterable[Any], why: str) -> None:
    for ids in dims:
        call.pin(ids, why)
