"""Broadcasting: the dimensions of several values, aligned from the right."""

from __future__ import annotations

from collections.abc import Sequence

from sparse_lightning.graph.atoms import Ids
from sparse_lightning.graph.call import Call
from sparse_lightning.graph.traced_value import TracedValue


def broadcast(call: Call, values: Sequence[TracedValue]) -> tuple[Ids | None, ...]:
    """Unify the dimensions of values that broadcast together, and return those of the result."""
    ndim = max(value.ndim for value in values)
    return tuple(_unified(call, [value.dims[d] for value, d in _at(values, ndim, i)]) for i in range(ndim))


def zeros_of(values: Sequence[TracedValue], ndim: int) -> list[list[bool]]:
    """Return for each dimension of the result whether each value is zero there; a value that is broadcast is not."""
    return [
        [i + value.ndim >= ndim and value.is_wide(i + value.ndim - ndim) and value.zero[i + value.ndim - ndim]
         for value in values]
        for i in range(ndim)
    ]  # fmt: skip


def _at(values: Sequence[TracedValue], ndim: int, i: int) -> list[tuple[TracedValue, int]]:
    return [(value, i + value.ndim - ndim) for value in values if i + value.ndim >= ndim]


def _unified(call: Call, dims: list[Ids | None]) -> Ids | None:
    wide = [ids for ids in dims if ids is None or len(ids) != 1]
    if not wide:
        return dims[0]
    made = wide[0]
    for ids in wide[1:]:
        made = None if made is None and ids is None else call.unify(made, ids)
    return made
