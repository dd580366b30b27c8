"""Operations that make new tensors of a given size."""

from __future__ import annotations

from typing import Any

from sparse_lightning.graph.call import Call, Resizing, rule
from sparse_lightning.graph.rules.shapes import resize_list
from sparse_lightning.graph.traced_value import Sign, TracedValue


def _first(change: Resizing) -> None:
    resize_list(change, 0, "size")


def _second(change: Resizing) -> None:
    resize_list(change, 1, "size")


@rule("aten.zeros.default", "aten.ones.default", "aten.full.default", resize=_first)
def filled(call: Call, *args: Any, **kwargs: Any) -> TracedValue:
    """Return a tensor of one number: any of its coordinates can be removed."""
    return _filled(call)


@rule("aten.new_zeros.default", "aten.new_ones.default", "aten.new_full.default", resize=_second)
def filled_as(call: Call, x: TracedValue, *args: Any, **kwargs: Any) -> TracedValue:
    """Return a tensor of one number and a given size."""
    return _filled(call)


@rule("aten.zeros_like.default", "aten.ones_like.default", "aten.full_like.default")
def filled_like(call: Call, x: TracedValue, *args: Any, **kwargs: Any) -> TracedValue:
    """Return a tensor of one number, of the size of another."""
    zeros = "zeros" in call.operation
    return TracedValue(x.dims, (zeros,) * x.ndim, sign=Sign.NONNEGATIVE if zeros else Sign.ANY)


@rule("aten.arange.default", "aten.arange.start", "aten.arange.start_step", "aten.scalar_tensor.default")
def counted(call: Call, *args: Any, **kwargs: Any) -> TracedValue:
    """Return numbers that depend on the coordinate."""
    made = call.pinned(call.sizes())
    return made


def _filled(call: Call) -> TracedValue:
    zeros = "zeros" in call.operation
    dims = tuple(call.free(size) for size in call.sizes())
    sign = Sign.NONNEGATIVE if zeros else Sign.POSITIVE if "ones" in call.operation else Sign.ANY
    return TracedValue(dims, (zeros,) * len(dims), sign=sign)
