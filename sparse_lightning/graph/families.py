"""Families: the units of one kind in one place, with every slice of every parameter that belongs to each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from sparse_lightning.compat.plain_names import is_of_adapter, plain_name
from sparse_lightning.graph.affine import affine_layouts
from sparse_lightning.graph.analysis import Analysis
from sparse_lightning.graph.atoms import Ids, Kind, Reason
from sparse_lightning.graph.naming import Places, possible_names, unique_names
from sparse_lightning.graph.solve import FREE, Solution
from sparse_lightning.layout import Layout


@dataclass(frozen=True)
class UnitSlices:
    """The slices of one parameter along one dimension that belong to the units of a family.

    Args:
        name: of the parameter.
        shape: of the parameter.
        dim: the dimension along which units lie.
        indices: the coordinates of each unit on that dimension: `(units, …)`.
        reads: whether the slices read the unit: it contributes nothing while they are zero.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    indices: Layout
    reads: bool

    def layout(self, parameter: Layout) -> Layout:
        """Return the elements of each unit, `(units, …)`, in a parameter with this layout.

        Example:
            >>> columns = UnitSlices("down.weight", (2, 6), 1, Layout((3, 2)), reads=True)
            >>> columns.layout(Layout((2, 6)))
            Layout((3, 2, 2), stride=(2, 1, 6), offset=0)
        """
        stride = parameter.stride[self.dim]
        others = [d for d in range(len(self.shape)) if d != self.dim]
        return Layout(
            (*self.indices.shape, *(self.shape[d] for d in others)),
            (*(s * stride for s in self.indices.stride), *(parameter.stride[d] for d in others)),
            parameter.offset + self.indices.offset * stride,
        )

    def __str__(self) -> str:
        """Show the slices of the first unit in the notation of indexing."""
        first = _first_unit(self.indices)
        places = [first if d == self.dim else ":" for d in range(len(self.shape))]
        return f"{plain_name(self.name)}[{', '.join(places)}]"


def _first_unit(indices: Layout) -> str:
    """Return the coordinates of the first unit as ranges.

    Example:
        >>> _first_unit(Layout((4, 3, 2), stride=(2, 8, 1)))
        '0:2+8:10+16:18'
    """
    shape, stride = indices.shape[1:], indices.stride[1:]
    length = shape[-1] if shape and stride[-1] == 1 else 1
    outer = len(shape) - (length > 1)
    steps = [[i * s for i in range(n)] for n, s in zip(shape[:outer], stride[:outer], strict=True)]
    starts = sorted(indices.offset + sum(each) for each in product(*steps))
    shown = [str(low) if length == 1 else f"{low}:{low + length}" for low in starts[:3]]
    return "+".join(shown) + ("+…" if len(starts) > 3 else "")


@dataclass(frozen=True)
class Family:
    """Units that can be removed, each with its slices of parameters.

    Args:
        name: the innermost module that has all slices, and what the units are.
        units: how many there are.
        slices: of each parameter that a unit touches.
        labels: the class of atoms of each unit.
    """

    name: str
    units: int
    slices: tuple[UnitSlices, ...]
    labels: Ids

    def parameters(self) -> list[str]:
        """Return the names of the parameters, each once."""
        return list(dict.fromkeys(piece.name for piece in self.slices))


@dataclass(frozen=True)
class Refusal:
    """Units that cannot be removed.

    Args:
        name: as a family would be called.
        units: how many there are.
        parameters: the parameters that the units touch.
        reason: the operation and the module that pin them, and why.
    """

    name: str
    units: int
    parameters: tuple[str, ...]
    reason: Reason


@dataclass(frozen=True)
class _Group:
    """Classes with the same slices: `places` has `(units, coordinates)` for each parameter and dimension."""

    labels: Ids
    places: dict[tuple[str, int], Ids]
    kind: Kind


def find_families(analysis: Analysis, solution: Solution) -> tuple[list[Family], list[Refusal]]:
    """Return the families of a model, in the order of their parameters, and the refusals."""
    readers = _readers(analysis)
    ndim = {name: analysis.tensors[name].ndim for name in analysis.parameters}
    families, names, refusals = [], [], []
    for group in _groups(analysis, solution):
        possible = possible_names(group.kind, *_plain(group.places, readers, ndim))
        made = _made(analysis, solution, possible[0], group, readers)
        if isinstance(made, Family):
            families.append(made)
            names.append(possible)
        elif made.reason.listed:
            refusals.append(made)
    return [replace(f, name=name) for f, name in zip(families, unique_names(names), strict=True)], refusals


def _plain(
    places: Places, readers: set[tuple[str, int]], ndim: Mapping[str, int]
) -> tuple[Places, set[tuple[str, int]], dict[str, int]]:
    """Return the slices of a family by plain names, without those of adapters: it is named as without PEFT."""
    own = {place: ids for place, ids in places.items() if not is_of_adapter(place[0])} or places
    named = {(plain_name(name), dim): ids for (name, dim), ids in own.items()}
    read = {(plain_name(name), dim) for name, dim in own if (name, dim) in readers}
    return named, read, {plain_name(name): ndim[name] for name, _ in own}


def _readers(analysis: Analysis) -> set[tuple[str, int]]:
    """Return the dimensions of parameters that are contracted: they read units."""
    ids = analysis.atoms.readers
    read = np.zeros(analysis.atoms.count, np.bool_)
    for some in ids:
        read[some] = True
    return {
        (name, d)
        for name in analysis.parameters
        for d, own in enumerate(analysis.tensors[name].dims)
        if own is not None and read[own].any()
    }


def _made(
    analysis: Analysis, solution: Solution, name: str, group: _Group, readers: set[tuple[str, int]]
) -> Family | Refusal:
    """Return a group as a family, or why it cannot be one."""
    names = [parameter for parameter, _ in group.places]
    why = None if solution.reason[group.labels[0]] == FREE else solution.why(int(group.labels[0]))
    twice = next((n for n in names if names.count(n) > 1), None)
    if why is None and all(map(is_of_adapter, names)):
        why = Reason("adapter", name.rpartition(" (")[0], "its rank is not a unit of the model")
    if why is None and twice is not None:
        why = _layout_reason(twice, f"a unit is both a row and a column of {twice}, which share weights")
    slices: list[UnitSlices] = []
    for (parameter, dim), indices in group.places.items() if why is None else ():
        layouts = affine_layouts(indices)
        if layouts is None:
            why = _layout_reason(parameter, f"units are not evenly spaced in {parameter}: strides cannot express them")
            break
        shape = tuple(len(ids) for ids in analysis.tensors[parameter].dims if ids is not None)
        slices += [UnitSlices(parameter, shape, dim, layout, (parameter, dim) in readers) for layout in layouts]
    if why is not None:
        return Refusal(name, len(group.labels), tuple(dict.fromkeys(names)), why)
    slices.sort(key=lambda piece: piece.reads)
    return Family(name, len(group.labels), tuple(slices), group.labels)


def _layout_reason(parameter: str, why: str) -> Reason:
    return Reason("layout", parameter.rpartition(".")[0], why)


def _groups(analysis: Analysis, solution: Solution) -> Iterator[_Group]:
    """Group classes by the parameters and dimensions that they touch, and how often; in the order of parameters."""
    places = [(n, d) for n in analysis.parameters for d in range(analysis.tensors[n].ndim)]
    ids = [analysis.tensors[n].dims[d] for n, d in places]
    arrays = [solution.labels[own] for own in ids if own is not None]
    if not arrays:
        return
    label = np.concatenate(arrays)
    place = np.repeat(np.arange(len(arrays)), [len(own) for own in arrays])
    index = np.concatenate([np.arange(len(own)) for own in arrays])
    order = np.lexsort((index, place, label))
    label, place, index = label[order], place[order], index[order]
    signature = _signatures(label, place, solution)
    classes, starts, counts = np.unique(label, return_index=True, return_counts=True)
    by_signature = np.lexsort((index[starts], place[starts], signature))
    cuts = np.flatnonzero(np.diff(signature[by_signature])) + 1
    groups = np.split(by_signature, cuts)
    for members in sorted(groups, key=lambda g: (place[starts[g[0]]], index[starts[g[0]]])):
        rows = starts[members][:, None] + np.arange(counts[members[0]])
        where = place[rows[0]]
        split = {places[p]: index[rows[:, where == p]] for p in np.unique(where)}
        kind = Kind(int(solution.kinds[classes[members[0]]]))
        yield _Group(classes[members], split, kind)


def _signatures(label: Ids, place: Ids, solution: Solution) -> Ids:
    """Return a number for each class: equal where classes touch the same places equally often, for one reason."""
    pairs = label * (int(place.max()) + 1) + place
    _, first, counts = np.unique(pairs, return_index=True, return_counts=True)
    mixed = _mix(_mix(place[first].astype(np.uint64)) + counts.astype(np.uint64))
    classes, starts = np.unique(label[first], return_index=True)
    total = np.add.reduceat(mixed, starts)
    total = _mix(total + _mix(solution.reason[classes].astype(np.uint64)))
    return total.astype(np.int64)


def _mix(numbers: np.ndarray[tuple[int, ...], np.dtype[np.uint64]]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    """Return well-mixed 64-bit numbers, so that sums of them tell sets apart (the finaliser of splitmix64)."""
    z = numbers + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
