"""Attention: heads are unified; the head dimension and the sequence are pinned."""

from __future__ import annotations

from typing import Any

from sparse_lightning.graph.atoms import Ids, Kind
from sparse_lightning.graph.call import Call, rule
from sparse_lightning.graph.rules.broadcasting import broadcast
from sparse_lightning.graph.traced_value import TracedValue


@rule("aten.scaled_dot_product_attention.default")
def attention(
    call: Call,
    q: TracedValue,
    k: TracedValue,
    v: TracedValue,
    mask: TracedValue | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
    **kwargs: Any,
) -> TracedValue:
    """Unify batch dimensions and heads of `(…, heads, tokens, head dimension)`; a mask broadcasts."""
    for value in (q, k, v):
        call.pin(value.dims[-1], "it contracts the head dimension, which also sets the scale")
        call.pin(value.dims[-2], "it normalises over tokens", listed=False)
    heads = _shared(call, q, k, v) if enable_gqa else None
    batches = [_leading(value) for value in ((q,) if enable_gqa else (q, k, v))]
    if mask is not None:
        batches.append(_leading(mask))
        for ids in mask.dims[-2:]:
            call.pin(ids, "it normalises over tokens", listed=False)
    dims = list(broadcast(call, batches))
    if heads is not None:
        dims[-1] = heads
    if q.ndim > 3:
        call.mark(dims[-1], Kind.HEADS)
    same = q.ndim == v.ndim and not enable_gqa
    zero = [same and v.is_wide(d) and v.zero[d] for d in range(len(dims))]
    return TracedValue((*dims, q.dims[-2], v.dims[-1]), (*zero, False, False))


def _leading(value: TracedValue) -> TracedValue:
    return TracedValue(value.dims[:-2], value.zero[:-2])


def _shared(call: Call, q: TracedValue, k: TracedValue, v: TracedValue) -> Ids | None:
    """Relate query heads to the key-value heads that groups of them share, and to their place in the group."""
    many, few = q.dims[-3], call.unify(k.dims[-3], v.dims[-3])
    for values in zip(q.dims[:-3], k.dims[:-3], v.dims[:-3], strict=True):
        broadcast(call, [TracedValue((ids,), (False,)) for ids in values])
    if many is None or few is None:
        call.pin(many, "the number of heads is dynamic")
        return many
    place = call.free(len(many) // len(few))
    call.mark(place, Kind.EXPANDED)
    if place is not None:
        call.product(many, [few, place])
    return many
