"""Unit scopes: attached scopes whose blocks are the units of a family of the traced model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sparse_lightning.blocks.scope import ScopeSpec
from sparse_lightning.blocks.spec import BlockSpec
from sparse_lightning.graph import Couplings, Family
from sparse_lightning.layout import Layout
from sparse_lightning.layout.coordinates import coordinates_in
from sparse_lightning.layout.cutting import Indices
from sparse_lightning.patterns import Attachment

Slices = dict[tuple[str, int], Indices]
"""The coordinates of each unit, `(units, coordinates)`, by the traced name of a parameter and its dimension."""


@dataclass(frozen=True)
class UnitScope:
    """A scope whose blocks are units.

    Args:
        family: the name of the family of these units.
        units: the number that each block has in the family.
    """

    family: str
    units: Indices


def unit_scopes(found: Sequence[Attachment], model: Couplings, names: Mapping[int, str]) -> dict[str, UnitScope]:
    """Return those scopes whose blocks are the units of a family, with all of their slices; by name.

    Args:
        found: what the patterns attach.
        model: the families of the traced model.
        names: of parameters in the trace, by their id.
    """
    families = [(family, _of_family(family)) for family in model if family.units > 1]
    made = {}
    for attachment in found:
        slices = _of_scope(attachment, names)
        for family, own in families if slices is not None else []:
            units = None if slices is None else _matched(slices, own)
            if units is not None:
                made[attachment.name] = UnitScope(family.name, units)
    return made


def _of_family(family: Family) -> Slices:
    pieces: dict[tuple[str, int], list[Indices]] = {}
    for piece in family.slices:
        pieces.setdefault((piece.name, piece.dim), []).append(_offsets(piece.indices).reshape(family.units, -1))
    return _sorted(pieces)


def _of_scope(attachment: Attachment, names: Mapping[int, str]) -> Slices | None:
    """Return the slices of a scope with a block for each unit; None for other scopes."""
    scope = attachment.scope
    if not attachment.has_units or not isinstance(scope, ScopeSpec) or scope.numscp() != 1:
        return None
    pieces: dict[tuple[str, int], list[Indices]] = {}
    for spec in scope.block.blocks():
        place = _place(spec)
        if place is None or id(spec.param) not in names:
            return None
        dim, indices = place
        pieces.setdefault((names[id(spec.param)], dim), []).append(indices)
    return _sorted(pieces)


def _sorted(pieces: Mapping[tuple[str, int], Sequence[Indices]]) -> Slices:
    return {key: np.sort(np.concatenate(list(each), axis=1), axis=1) for key, each in pieces.items()}


def _place(spec: BlockSpec) -> tuple[int, Indices] | None:
    """Return the dimension of a parameter along which blocks are whole slices, and the coordinates of each block."""
    base, units = Layout.of(spec.param), spec.grid_shape[0]
    found = coordinates_in(spec.view.layout, base)
    if found is None or spec.numblk() != units or spec.shape[0] != 1:
        return None
    along = {digit.dim for digit in found.digits[0] if digit.size > 1}
    digits = [digit for run in found.digits for digit in run if digit.size > 1]
    if len(along) != 1 or len([digit for digit in found.digits[0] if digit.size > 1]) != 1:
        return None
    [dim] = along
    for d, size in enumerate(base.shape):
        reached = int(np.prod([digit.size for digit in digits if digit.dim == d]))
        if d != dim and reached != size:
            return None
    own = [digit for digit in digits if digit.dim == dim]
    layout = Layout([digit.size for digit in own], [digit.step for digit in own], found.start[dim])
    return dim, _offsets(layout).reshape(units, -1)


def _offsets(layout: Layout) -> Indices:
    """Return all offsets of a layout, in its shape."""
    found = np.asarray(layout.offset, dtype=np.int64)
    for n, stride in zip(layout.shape, layout.stride, strict=True):
        found = found[..., None] + stride * np.arange(n)
    return found


def _matched(scope: Slices, family: Slices) -> Indices | None:
    """Return the number in the family of each block of a scope; None if they do not have the same slices."""
    if scope.keys() != family.keys():
        return None
    first = next(iter(scope))
    if scope[first].shape != family[first].shape:
        return None
    mine, theirs = (np.argsort(each[first][:, 0], kind="stable") for each in (scope, family))
    for key, indices in scope.items():
        if indices.shape != family[key].shape or (indices[mine] != family[key][theirs]).any():
            return None
    numbers = np.empty_like(theirs)
    numbers[mine] = theirs
    return numbers
