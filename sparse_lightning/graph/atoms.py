"""Atoms: one integer for each coordinate of each dimension of a value, and what is known about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntFlag

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
"""Atoms of the coordinates of one dimension, in order."""


class Kind(IntFlag):
    """What the coordinates of a dimension are called in the names of families."""

    UNITS = 0
    CHANNELS = 1
    HEADS = 2
    EXPANDED = 4
    EXPERTS = 8
    HEAD_DIMENSIONS = 16


@dataclass(frozen=True)
class Reason:
    """Why coordinates cannot be removed.

    Args:
        operation: the operation that pins them, such as `aten.layer_norm`.
        module: the module that calls it.
        why: a clause that explains it.
        listed: whether it is shown in the table of refusals; positions of a kernel, for example, are not.
    """

    operation: str
    module: str
    why: str
    listed: bool = True

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return f"{self.operation}{where}: {self.why}"


@dataclass(frozen=True)
class Product:
    """A reshape: an element of the flat dimension is removed exactly if one of its coordinates on the axes is.

    Args:
        flat: atoms of the flat dimension, as many as the product of the sizes of the axes.
        axes: atoms of each axis, outermost first; two or more.
        operation: the operation that reshapes.
        module: the module that calls it.
    """

    flat: Ids
    axes: tuple[Ids, ...]
    operation: str
    module: str


@dataclass
class Atoms:
    """All atoms of a traced model, and the relations between them.

    Atoms that are unified are removed together or not at all. A pinned atom is never removed.

    Example:
        >>> atoms = Atoms()
        >>> rows, columns = atoms.fresh(3), atoms.fresh(3)
        >>> atoms.unify(rows, columns)
        >>> rows.tolist(), columns.tolist(), len(atoms.edges)
        ([0, 1, 2], [3, 4, 5], 1)
    """

    count: int = 0
    edges: list[tuple[Ids, Ids]] = field(default_factory=list)
    pins: list[tuple[Ids, int]] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    kinds: list[tuple[Ids, Kind]] = field(default_factory=list)
    readers: list[Ids] = field(default_factory=list)
    _reason_ids: dict[Reason, int] = field(default_factory=dict)

    def fresh(self, size: int) -> Ids:
        """Return atoms for a new dimension."""
        start, self.count = self.count, self.count + size
        return np.arange(start, self.count, dtype=np.int64)

    def unify(self, one: Ids, other: Ids) -> None:
        """Record that the coordinates of two dimensions are removed together."""
        if one is not other:
            self.edges.append((one, other))

    def pin(self, ids: Ids, reason: Reason) -> None:
        """Record that coordinates cannot be removed; the first listed reason is the one that is shown."""
        if reason not in self._reason_ids:
            self._reason_ids[reason] = len(self.reasons)
            self.reasons.append(reason)
        self.pins.append((ids, self._reason_ids[reason]))

    def reason_id(self, reason: Reason) -> int:
        """Return the number of a reason, which is added if it is new."""
        self.pin(np.empty(0, np.int64), reason)
        return self._reason_ids[reason]

    def product(self, flat: Ids, axes: Sequence[Ids], operation: str, module: str) -> None:
        """Record that a flat dimension consists of axes; axes of size 1 are left out."""
        wide = tuple(axis for axis in axes if len(axis) > 1)
        if len(wide) == 1:
            self.unify(flat, wide[0])
        elif wide:
            self.products.append(Product(flat, wide, operation, module))
