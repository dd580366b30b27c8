"""CompactHeader: what a file of `Compact` says about its tensors, checked before it is believed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sparse_lightning.compaction.size_attributes import Sizes
from sparse_lightning.compaction.zero_units import KeptUnits
from sparse_lightning.export.reading import parse_header

FORMAT = 1

KEYS = ("format", "tied", "shapes", "attributes", "units", "unregistered")


@dataclass(frozen=True)
class CompactHeader:
    """How a fresh model is resized.

    Args:
        tied: the first name of each tensor that has several, by its other names.
        shapes: of the tensors that were cut, before that, by name.
        attributes: the new values of size attributes, by the name of their module.
        units: what is left of each family.
        unregistered: the names of tensors in the file that are not in the state dict.
    """

    tied: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    attributes: dict[str, Sizes]
    units: dict[str, KeptUnits]
    unregistered: list[str]

    def to_text(self) -> str:
        """Return the header as it is stored."""
        units = {name: {"total": left.total, "kept": left.kept} for name, left in self.units.items()}
        values = (FORMAT, self.tied, self.shapes, self.attributes, units, self.unregistered)
        return json.dumps(dict(zip(KEYS, values, strict=True)), separators=(",", ":"))

    @staticmethod
    def from_text(text: str) -> CompactHeader:
        """Return the header of a file.

        Raises:
            ValueError: if anything in it is not as `to_text` writes it.
        """
        stored = parse_header(text, KEYS, FORMAT)
        unregistered = stored["unregistered"]
        if not isinstance(unregistered, list) or not all(isinstance(name, str) for name in unregistered):
            raise ValueError("its unregistered tensors are not a list of names")
        return CompactHeader(
            {name: _name(first) for name, first in _mapping("tied", stored["tied"]).items()},
            {name: _shape(name, shape) for name, shape in _mapping("shapes", stored["shapes"]).items()},
            {name: _sizes(name, sizes) for name, sizes in _mapping("attributes", stored["attributes"]).items()},
            {name: _units(name, left) for name, left in _mapping("units", stored["units"]).items()},
            unregistered,
        )


def _mapping(key: str, stored: Any) -> dict[str, Any]:
    if not isinstance(stored, dict):
        raise ValueError(f"{key} in its header is not a mapping")
    return stored


def _name(stored: Any) -> str:
    if not isinstance(stored, str):
        raise ValueError(f"it has {stored!r} in the place of a name")
    return stored


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _shape(name: str, stored: Any) -> tuple[int, ...]:
    if not isinstance(stored, list) or not all(map(_is_size, stored)):
        raise ValueError(f"the shape {stored!r} of {name} is not a list of positive whole numbers")
    return tuple(stored)


def _sizes(module: str, stored: Any) -> Sizes:
    for name, value in _mapping(f"attributes of {module}", stored).items():
        if not all(map(_is_size, value if isinstance(value, list) and value else [value])):
            raise ValueError(f"{name}={value!r} of {module or 'the model'} is not a size")
    return dict(stored)


def _units(family: str, stored: Any) -> KeptUnits:
    entry = _mapping(f"units of {family}", stored)
    total: Any = entry.get("total")
    kept: Any = entry.get("kept")
    if set(entry) != {"total", "kept"} or not _is_size(total) or not isinstance(kept, list) or not kept:
        raise ValueError(f"the units of {family} are not a total and a list of those that are kept")
    if not all(isinstance(unit, int) and not isinstance(unit, bool) and 0 <= unit < total for unit in kept):
        raise ValueError(f"{family} keeps a unit that is not one of its {total}")
    if any(b <= a for a, b in pairwise(kept)):
        raise ValueError(f"{family} keeps a unit twice, or its units are not in order")
    return KeptUnits(total, kept)
