"""Contractions: linear layers and matrix products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sparse_lightning.graph.atoms import Ids, Kind
from sparse_lightning.graph.call import Call, rule
from sparse_lightning.graph.rules.broadcasting import broadcast, zeros_of
from sparse_lightning.graph.traced_value import Sign, TracedValue

CHOSEN_BY_NUMBER = "tokens choose their experts by number"


def contract(call: Call, x: TracedValue, dim: int, y: TracedValue, other: int) -> None:
    """Unify the contracted dimensions of two values; pin them where a unit of zero weights would still contribute."""
    if not (x.constant or y.constant):
        why = "it contracts two activations"
    elif not (x.zero[dim] or y.zero[other]):
        why = "it contracts with a tensor that is not zero where the unit's weights are"
    else:
        if x.is_wide(dim):
            call.unify(x.dims[dim], y.dims[other])
        for value, at in ((x, dim), (y, other)):
            ids = value.dims[at]
            if value.constant and value.zero[at] and ids is not None:
                call.atoms.readers.append(ids)
        return
    call.pin(x.dims[dim], why)
    call.pin(y.dims[other], why)


@rule("aten.linear.default")
def linear(call: Call, x: TracedValue, weight: TracedValue, bias: TracedValue | None = None) -> TracedValue:
    """Contract the last dimension with the columns of a weight; its rows are the last dimension of the result."""
    contract(call, x, x.ndim - 1, weight, weight.ndim - 1)
    zero = [known and bias is None for known in x.zero[:-1]]
    dims = list(x.dims[:-1])
    if weight.ndim == 2:
        rows = weight.dims[0] if bias is None else call.unify(weight.dims[0], bias.dims[0])
        dims.append(rows)
        zero.append(weight.zero[0] and (bias is None or bias.zero[0]))
    return TracedValue(tuple(dims), tuple(zero))


@rule("aten.matmul.default", "aten.mm.default", "aten.bmm.default", "aten.mv.default", "aten.dot.default")
def matmul(call: Call, x: TracedValue, y: TracedValue) -> TracedValue:
    """Contract the last dimension of the first with the last but one of the second; unify the batch dimensions."""
    other = max(y.ndim - 2, 0)
    contract(call, x, x.ndim - 1, y, other)
    batches = [_first(value, value.ndim - 2) for value in (x, y) if value.ndim > 2]
    dims = list(broadcast(call, batches)) if batches else []
    zero = [any(known) for known in zeros_of(batches, len(dims))]
    apart = not (x.constant or y.constant)
    for ids in dims[-1:]:
        call.mark(ids, Kind.HEADS if apart else Kind.EXPERTS)
    for value, at in ((x, x.ndim - 2), (y, y.ndim - 1)):
        if value.ndim > 1:
            dims.append(value.dims[at])
            zero.append(value.zero[at])
            if apart and batches:
                call.mark(value.dims[at], Kind.HEAD_DIMENSIONS)
    return TracedValue(tuple(dims), tuple(zero))


@rule("aten.addmm.default", "aten.baddbmm.default")
def addmm(
    call: Call, bias: TracedValue, x: TracedValue, y: TracedValue, beta: float = 1, alpha: float = 1
) -> TracedValue:
    """Add a matrix product to a value that broadcasts."""
    made = matmul(call, x, y)
    dims = broadcast(call, [made, bias])
    zero = tuple(all(known) for known in zeros_of([made, bias], len(dims)))
    return TracedValue(dims, zero)


@rule("aten.outer.default")
def outer(call: Call, x: TracedValue, y: TracedValue) -> TracedValue:
    """Multiply each element of one vector by each of the other."""
    return TracedValue((*x.dims, *y.dims), (*x.zero, *y.zero))


@rule("aten.einsum.default")
def einsum(call: Call, equation: str, operands: list[TracedValue], **kwargs: Any) -> TracedValue:
    """Contract by letters: those of both operands that the result lacks are contracted, others are unified."""
    text = equation.replace(" ", "")
    given, _, made = text.partition("->")
    letters = given.split(",")
    if "..." in text or "->" not in text or len(operands) > 2 or any(len(set(word)) < len(word) for word in letters):
        for value in operands:
            call.pin_all(value, f"the equation {equation!r} has no rule")
        return call.pinned(call.sizes())
    dims: dict[str, Ids | None] = {}
    zero: dict[str, bool] = {}
    for word, value in zip(letters, operands, strict=True):
        for letter, ids, known in zip(word, value.dims, value.zero, strict=True):
            _meet(call, letter, made, letters, operands, dims, ids)
            zero[letter] = zero.get(letter, False) or known
    return TracedValue(tuple(dims[c] for c in made), tuple(zero[c] for c in made))


def _meet(
    call: Call,
    letter: str,
    made: str,
    letters: list[str],
    operands: list[TracedValue],
    dims: dict[str, Ids | None],
    ids: Ids | None,
) -> None:
    """Treat one letter of one operand: contracted, summed, or carried to the result."""
    holders = [(value, word.index(letter)) for word, value in zip(letters, operands, strict=True) if letter in word]
    first = letter not in dims
    if letter in made:
        dims[letter] = ids if first else call.unify(dims[letter], ids)
        if len(holders) == 2:
            call.mark(ids, Kind.EXPERTS if any(value.constant for value, _ in holders) else Kind.HEADS)
    elif first and len(holders) == 2:
        dims[letter] = ids
        contract(call, *holders[0], *holders[1])
    elif first:
        dims[letter] = ids
        value, at = holders[0]
        if not value.zero[at]:
            call.pin(ids, "it sums over them")


def _first(value: TracedValue, count: int) -> TracedValue:
    return replace(value, dims=value.dims[:count], zero=value.zero[:count], sign=Sign.ANY)


@rule("transformers.grouped_mm_fallback.default", "aten._grouped_mm.default")
def grouped_mm(call: Call, x: TracedValue, weight: TracedValue, *args: Any, **kwargs: Any) -> TracedValue:
    """Multiply each group of rows by the matrix of its expert: `(rows, in)`, `(experts, in, out)` → `(rows, out)`."""
    if x.ndim != 2 or weight.ndim != 3:
        call.pin_all(x, "its operands have no rule")
        call.pin_all(weight, "its operands have no rule")
        return call.pinned(call.sizes())
    call.pin(weight.dims[0], CHOSEN_BY_NUMBER)
    contract(call, x, 1, weight, 1)
    return TracedValue((x.dims[0], weight.dims[2]), (x.zero[0], weight.zero[2]))
