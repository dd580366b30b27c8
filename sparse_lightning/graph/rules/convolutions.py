"""Convolutions, pooling and other operations over positions."""

from __future__ import annotations

from typing import Any

from sparse_lightning.graph.atoms import Ids, Kind
from sparse_lightning.graph.call import Call, Resizing, rule
from sparse_lightning.graph.rules.contractions import contract
from sparse_lightning.graph.traced_value import TracedValue

POSITIONS = "positions are not units"


def _resize_groups(change: Resizing) -> None:
    """Rewrite `groups`: inputs over inputs of each group."""
    if change.argument(6, "groups", 1) == 1:
        return
    x, weight = change.input(0), change.input(1)
    inputs, each = change.kept(x.dims[x.ndim - weight.ndim + 1]), change.kept(weight.dims[1])
    change.replace(6, "groups", max(1, int(inputs.sum()) // max(1, int(each.sum()))))


@rule("aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default", resize=_resize_groups)
@rule("aten.conv1d.padding", "aten.conv2d.padding", "aten.conv3d.padding", resize=_resize_groups)
def conv(
    call: Call,
    x: TracedValue,
    weight: TracedValue,
    bias: TracedValue | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> TracedValue:
    """Contract input channels with a weight `(outputs, inputs of a group, …)`; groups are an axis of both."""
    rows = weight.dims[0]
    if bias is not None:
        rows = call.unify(rows, bias.dims[0])
    at = x.ndim - weight.ndim + 1
    if groups == 1:
        contract(call, x, at, weight, 1)
    else:
        _group(call, x.dims[at], weight.dims[1], rows, groups)
    return _convolved(call, x, weight, rows, bias)


def _group(call: Call, inputs: Ids | None, each: Ids | None, rows: Ids | None, groups: int) -> None:
    """Relate channels to groups and to the channels within each: a whole group goes, or the same channel of all."""
    if inputs is None or each is None or rows is None:
        for ids in (inputs, each, rows):
            call.pin(ids, "a grouped convolution over a dynamic size")
        return
    axis, within = call.atoms.fresh(groups), call.free(len(rows) // groups)
    assert within is not None
    call.product(inputs, [axis, each])
    call.product(rows, [axis, within])


@rule("aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input")
def conv_transpose(
    call: Call,
    x: TracedValue,
    weight: TracedValue,
    bias: TracedValue | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> TracedValue:
    """Contract input channels with a weight `(inputs, outputs, …)`; groups would have to stay even."""
    rows = weight.dims[1]
    if groups != 1:
        why = "groups of a transposed convolution would become uneven"
        call.pin(x.dims[x.ndim - weight.ndim + 1], why)
        call.pin_all(weight, why)
        if bias is not None:
            call.pin_all(bias, why)
        rows = call.fixed(call.sizes()[-weight.ndim + 1])
        return _convolved(call, x, weight, rows, bias)
    if bias is not None:
        rows = call.unify(rows, bias.dims[0])
    contract(call, x, x.ndim - weight.ndim + 1, weight, 0)
    return _convolved(call, x, weight, rows, bias, made=1)


def _convolved(
    call: Call, x: TracedValue, weight: TracedValue, rows: Ids | None, bias: TracedValue | None, made: int = 0
) -> TracedValue:
    at = x.ndim - weight.ndim + 1
    for ids in (*x.dims[at + 1 :], *weight.dims[2:]):
        call.pin(ids, POSITIONS, listed=False)
    call.mark(rows, Kind.CHANNELS)
    call.mark(x.dims[at], Kind.CHANNELS)
    zero = weight.zero[made] and (bias is None or bias.zero[0])
    positions = [call.fixed(size) for size in call.sizes()[at + 1 :]]
    return TracedValue((*x.dims[:at], rows, *positions), (*(False,) * at, zero, *(False,) * len(positions)))


def _over_positions(count: int, names: list[str]) -> None:
    """Register operations that treat each channel by itself, with this many dimensions of positions at the end."""

    @rule(*names)
    def positions(call: Call, x: TracedValue, *args: Any, **kwargs: Any) -> Any:
        at = x.ndim - count
        for ids in x.dims[at:]:
            call.pin(ids, POSITIONS, listed=False)
        several = isinstance(call.node.meta["val"], tuple | list)
        sizes = call.sizes(0) if several else call.sizes()
        made = TracedValue(
            (*x.dims[:at], *(call.fixed(size) for size in sizes[at:])), (*x.zero[:at], *(False,) * count)
        )
        return (made, made) if several else made


for _n in (1, 2, 3):
    _over_positions(
        _n,
        [
            *(f"aten.{kind}_pool{_n}d.default" for kind in ("max", "avg", "adaptive_avg", "adaptive_max")),
            *(f"aten.max_pool{_n}d_with_indices.default", f"aten.upsample_nearest{_n}d.vec"),
            f"aten.upsample_nearest{_n}d.default",
            *((f"aten.reflection_pad{_n}d.default", f"aten.replication_pad{_n}d.default")),
        ],
    )
_over_positions(2, ["aten.upsample_bilinear2d.vec", "aten.upsample_bicubic2d.vec", "aten.upsample_bilinear2d.default"])
