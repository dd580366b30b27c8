"""Closure: which atoms are removed together, and which cannot be removed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from sparse_lightning.graph.atoms import Atoms, Ids, Product, Reason

Scalar = TypeVar("Scalar", bound=np.generic)

FREE = np.iinfo(np.int64).max
"""Stands for the reason of a class that can be removed."""

_UNLISTED = 1 << 40
"""Added to reasons that are not shown, so that one that is shown comes first."""


@dataclass(frozen=True)
class Solution:
    """Classes of atoms that are removed together.

    Args:
        labels: the class of each atom.
        reason: for each class the number of the reason why it cannot be removed, or `FREE`.
        kinds: for each class what its coordinates are called.
        reasons: all reasons.
    """

    labels: Ids
    reason: Ids
    kinds: Ids
    reasons: list[Reason]

    def free(self) -> NDArray[np.bool_]:
        """Return for each class whether it can be removed."""
        free: NDArray[np.bool_] = self.reason == FREE
        return free

    def why(self, label: int) -> Reason:
        """Return the reason why a class cannot be removed."""
        return self.reasons[int(self.reason[label]) % _UNLISTED]


def solve(atoms: Atoms, prefer: str) -> Solution:
    """Unify atoms and propagate pins through reshapes until nothing changes.

    In a reshape, an element whose axes are all pinned is pinned, and one with a single free axis is unified with it.
    Where two axes are free, one of them is chosen, the outermost or the innermost, and the others are pinned.

    Args:
        atoms: with their relations.
        prefer: "outer" or "inner".
    """
    labels = _components(atoms.count, atoms.edges)
    reason = _least(labels, _pins(atoms))
    labels, reason = _Closure(atoms, labels, reason, prefer).solved()
    kinds = np.zeros(len(reason), np.int64)
    for ids, kind in atoms.kinds:
        np.bitwise_or.at(kinds, labels[ids], int(kind))
    return Solution(labels, reason, kinds, atoms.reasons)


def _pins(atoms: Atoms) -> list[tuple[Ids, int]]:
    return [(ids, r + (0 if atoms.reasons[r].listed else _UNLISTED)) for ids, r in atoms.pins]


def _components(count: int, edges: list[tuple[Ids, Ids]]) -> Ids:
    """Return the number of the connected component of each of `count` nodes."""
    if not edges:
        return np.arange(count, dtype=np.int64)
    one, other = (np.concatenate(side) for side in zip(*edges, strict=True))
    links = coo_matrix((np.ones(len(one), np.bool_), (one, other)), shape=(count, count))
    labels: Ids = connected_components(links, directed=False)[1].astype(np.int64)
    return labels


def _least(labels: Ids, pins: list[tuple[Ids, int]]) -> Ids:
    """Return for each class the smallest reason of its atoms; `FREE` without one."""
    reason = np.full(int(labels.max(initial=-1)) + 1, FREE)
    for ids, number in pins:
        np.minimum.at(reason, labels[ids], number)
    return reason


@dataclass(frozen=True)
class _Relation:
    """A product over classes: `flat` has the shape of the axes."""

    flat: Ids
    axes: tuple[Ids, ...]
    source: Product

    def spread(self, along: NDArray[Scalar], k: int) -> NDArray[Scalar]:
        """Return values of the coordinates of axis `k`, broadcast to the flat elements."""
        shape = [1] * len(self.axes)
        shape[k] = -1
        return np.broadcast_to(along.reshape(shape), self.flat.shape)


class _Closure:
    """Propagates over the classes that reshapes touch, which are few."""

    def __init__(self, atoms: Atoms, labels: Ids, reason: Ids, prefer: str) -> None:
        self._atoms, self._labels, self._all_reasons = atoms, labels, reason
        self._outer = prefer == "outer"
        arrays = [labels[ids] for product in atoms.products for ids in (product.flat, *product.axes)]
        self._nodes = np.unique(np.concatenate(arrays)) if arrays else np.empty(0, np.int64)
        self._relations = [self._relation(product) for product in atoms.products]
        self._edges: list[tuple[Ids, Ids]] = []
        self._to = np.arange(len(self._nodes))
        self._reason = reason[self._nodes]
        self._boundary = [i for i, each in enumerate(atoms.reasons) if each.operation in ("input", "output")]

    def _relation(self, product: Product) -> _Relation:
        place = [np.searchsorted(self._nodes, self._labels[ids]) for ids in (product.flat, *product.axes)]
        return _Relation(place[0].reshape([len(ids) for ids in product.axes]), tuple(place[1:]), product)

    def solved(self) -> tuple[Ids, Ids]:
        """Return the class of each atom and the reason of each class."""
        self._propagate()
        while self._choose():
            self._propagate()
        merged = np.arange(len(self._all_reasons))
        first = np.full(int(self._to.max(initial=-1)) + 1, FREE)
        np.minimum.at(first, self._to, self._nodes)
        merged[self._nodes] = first[self._to]
        reason = self._all_reasons.copy()
        reason[merged[self._nodes]] = self._reason[self._to]
        return merged[self._labels], reason

    def _propagate(self) -> None:
        while True:
            before = (int((self._reason == FREE).sum()), int(self._to.max(initial=0)))
            edges = [edge for relation in self._relations for edge in self._step(relation)]
            self._merge(edges)
            if before == (int((self._reason == FREE).sum()), int(self._to.max(initial=0))):
                return

    def _merge(self, edges: list[tuple[Ids, Ids]]) -> None:
        """Unify nodes; the reason of a class is the least of its parts."""
        self._edges += edges
        if not edges:
            return
        to = _components(len(self._nodes), self._edges)
        self._edges = [(np.arange(len(to)), _first_of(to))]
        reason = np.full(int(to.max(initial=-1)) + 1, FREE)
        np.minimum.at(reason, to, self._reason[self._to])
        self._to, self._reason = to, reason

    def _step(self, relation: _Relation) -> list[tuple[Ids, Ids]]:
        """Propagate pins through one relation, and return the elements that are unified with their only free axis."""
        flat = self._to[relation.flat]
        axes = [self._to[ids] for ids in relation.axes]
        for k, ids in enumerate(axes):
            others = tuple(j for j in range(len(axes)) if j != k)
            self._pin(ids, self._reason[flat].min(axis=others))
        reasons = np.stack([relation.spread(self._reason[ids], k) for k, ids in enumerate(axes)])
        free = (reasons == FREE).sum(axis=0)
        stuck = free == 0
        self._pin(flat[stuck], self._shown(reasons)[stuck])
        only = [(free == 1) & (reasons[k] == FREE) for k in range(len(axes))]
        return [(relation.flat[chosen], relation.spread(relation.axes[k], k)[chosen]) for k, chosen in enumerate(only)]

    def _pin(self, ids: Ids, numbers: Ids) -> None:
        """Give reasons to classes that are free; others keep theirs."""
        free = self._reason[ids] == FREE
        np.minimum.at(self._reason, ids[free], numbers[free])

    def _shown(self, reasons: Ids) -> Ids:
        """Return one reason along the first axis: an operation rather than an input or output, such as a batch."""
        inside = np.where((reasons < _UNLISTED) & ~np.isin(reasons, self._boundary), reasons, FREE).min(axis=0)
        shown: Ids = np.where(inside < FREE, inside, reasons.min(axis=0))
        return shown

    def _choose(self) -> bool:
        """Choose one axis of each relation with several free ones; at most one of those that touch each other."""
        touched = np.zeros(len(self._nodes) + 1, np.bool_)
        found = False
        for relation in self._relations:
            axes = [self._to[ids] for ids in relation.axes]
            free = [k for k, ids in enumerate(axes) if (self._reason[ids] == FREE).any()]
            nodes = np.concatenate([self._to[relation.flat].ravel(), *axes])
            if len(free) < 2 or touched[nodes].any():
                continue
            touched[nodes] = found = True
            chosen = free[0] if self._outer else free[-1]
            number = self._nested(relation.source, chosen < max(free))
            for k in free:
                if k != chosen:
                    self._reason[axes[k][self._reason[axes[k]] == FREE]] = number
        return found

    def _nested(self, source: Product, outer: bool) -> int:
        """Return the number of the reason for an axis that is not chosen."""
        other = "inner" if outer else "outer"
        why = f"nested with units that are preferred: prefer={other!r} chooses them"
        return self._atoms.reason_id(Reason(source.operation, source.module, why))


def _first_of(to: Ids) -> Ids:
    """Return the first node of each node's component."""
    first = np.full(int(to.max(initial=-1)) + 1, len(to))
    np.minimum.at(first, to, np.arange(len(to)))
    return first[to]
