"""SizeChanges: the size attributes of modules that go with removed units, such as `out_features` and `num_heads`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sparse_lightning.compaction.head_attributes import head_attributes
from sparse_lightning.compaction.size_attributes import Sizes, size_attributes
from sparse_lightning.compaction.zero_units import KeptUnits
from sparse_lightning.graph import Couplings, Removal


@dataclass(frozen=True)
class _Known:
    """A module of the model.

    Args:
        name: of the module.
        module: the module.
        own: the traced names of its own tensors, by their keys.
        others: the shapes of those that are not traced.
        near: the traced names of its own tensors and those of its children.
    """

    name: str
    module: nn.Module
    own: dict[str, str]
    others: dict[str, tuple[int, ...]]
    near: frozenset[str]


class SizeChanges:
    """Computes size attributes from those that modules have in the whole model.

    Args:
        model: the whole model, or one with the same modules.
        found: the families of the model.
        names: of tensors in the trace, by the id of the tensor.
        shapes: of whole tensors, by these names.
    """

    def __init__(
        self,
        model: nn.Module,
        found: Couplings,
        names: Mapping[int, str],
        shapes: Mapping[str, Sequence[int]],
    ) -> None:
        self._found, self._shapes = found, shapes
        own = {module: _named(module, names) for module in model.modules()}
        self._known = [
            _Known(name, module, own[module], _unnamed(module, names), _near(module, own))
            for name, module in model.named_modules()
        ]

    def attributes(self, removal: Removal, units: Mapping[str, KeptUnits]) -> dict[str, Sizes]:
        """Return the new size attributes of each module that has some, by its name.

        Args:
            removal: of units.
            units: what is left of each family of which units are removed.
        """
        small = {name: _small_shape(removal, name) for name in self._shapes}
        cut = {name for name, shape in small.items() if shape != tuple(self._shapes[name])}
        families: dict[str, dict[str, KeptUnits]] = {}
        for family, left in units.items():
            for piece in self._found[family].slices:
                if not piece.reads and piece.name in cut:
                    families.setdefault(piece.name, {})[family] = left
        found = {}
        for known in self._known:
            near = known.near & cut
            touching = {name: left for each in sorted(near) for name, left in families.get(each, {}).items()}
            if near:
                found[known.name] = self._changed(known, removal, small, touching)
        return {name: changed for name, changed in found.items() if changed}

    def _changed(
        self,
        known: _Known,
        removal: Removal,
        small: Mapping[str, tuple[int, ...]],
        touching: Mapping[str, KeptUnits],
    ) -> Sizes:
        sizes: Sizes = {}
        if any(small[name] != tuple(self._shapes[name]) for name in known.own.values()):
            groups = self._groups(known, removal)
            shapes = {**known.others, **{key: small[name] for key, name in known.own.items()}}
            sizes |= size_attributes(known.module, shapes, groups)
        families = [(family, touching[family.name]) for family in self._found if family.name in touching]
        sizes |= head_attributes(known.module, families)
        held = {key: _plain(getattr(known.module, key, None)) for key in sizes}
        return {key: value for key, value in sizes.items() if held[key] is not None and held[key] != value}

    def _groups(self, known: _Known, removal: Removal) -> int:
        """Return how many groups of a convolution have rows that are left."""
        groups, name = int(getattr(known.module, "groups", 1)), known.own.get("weight")
        if groups == 1 or name is None:
            return groups
        rows = removal.kept(name)[0]
        return len({row // (self._shapes[name][0] // groups) for row in rows.tolist()})


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module itself."""
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def set_sizes(module: nn.Module, sizes: Sizes) -> None:
    """Set size attributes; a list becomes a tuple."""
    for name, value in sizes.items():
        setattr(module, name, tuple(value) if isinstance(value, list) else value)


def _named(module: nn.Module, names: Mapping[int, str]) -> dict[str, str]:
    return {key: names[id(tensor)] for key, tensor in own_tensors(module).items() if id(tensor) in names}


def _unnamed(module: nn.Module, names: Mapping[int, str]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in own_tensors(module).items() if id(tensor) not in names}


def _near(module: nn.Module, own: Mapping[nn.Module, Mapping[str, str]]) -> frozenset[str]:
    return frozenset(name for each in (module, *module.children()) for name in own[each].values())


def _small_shape(removal: Removal, name: str) -> tuple[int, ...]:
    return tuple(len(kept) for kept in removal.kept(name))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
