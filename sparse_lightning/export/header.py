"""Header: what a file of `KeptBlocks` says about its tensors, checked before anything is allocated by it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from sparse_lightning.errors import CheckpointError
from sparse_lightning.export.geometry import BlockGeometry
from sparse_lightning.layout import Layout

FORMAT = 1

MOST_PER_BYTE = 4096
"""The most elements that a file may declare for each of its bytes: zeros are not stored, and allocated by `load`."""


@dataclass(frozen=True)
class Header:
    """How the tensors of a file form a state dict.

    Args:
        names: for each name of the state dict the first name of its tensor, which differs for tied ones.
        cut: the views of each parameter that is divided into blocks, by its first name.
    """

    names: dict[str, str]
    cut: dict[str, list[BlockGeometry]]

    def to_text(self) -> str:
        """Return the header as it is stored."""
        cut = {name: [asdict(geometry) for geometry in listed] for name, listed in self.cut.items()}
        return json.dumps({"format": FORMAT, "names": self.names, "cut": cut})

    @staticmethod
    def from_text(text: str, size: int) -> Header:
        """Return the header of a file of a size in bytes.

        Raises:
            CheckpointError: if anything in it is not as `to_text` writes it, or more than the file can stand for.
        """
        stored = json.loads(text)
        if not isinstance(stored, dict) or set(stored) != {"format", "names", "cut"}:
            raise CheckpointError("its header does not have the keys format, names and cut")
        if stored["format"] != FORMAT or isinstance(stored["format"], bool):
            raise CheckpointError(f"it has the format {stored['format']!r}, and this version reads {FORMAT}")
        header = Header(_names(stored["names"]), _cut(stored["cut"]))
        unknown = set(header.cut) - set(header.names.values())
        if unknown:
            raise CheckpointError(f"it has blocks of {min(unknown)}, which is not in its state dict")
        header._check_size(size)
        return header

    def entries(self) -> Iterator[str]:
        """Yield the names of the tensors that the file must have; `rest` is there only for elements outside views."""
        for name in dict.fromkeys(self.names.values()):
            if name in self.cut:
                yield from (f"{name}/{kind}.{i}" for i in range(len(self.cut[name])) for kind in ("mask", "blocks"))
            else:
                yield name

    def _check_size(self, size: int) -> None:
        declared = sum(_extent(geometry) for listed in self.cut.values() for geometry in listed)
        if declared > MOST_PER_BYTE * size:
            raise CheckpointError(f"it declares {declared} elements, more than its {size} bytes can stand for")
        for name, listed in self.cut.items():
            if not all(Layout(geometry.param, geometry.stride).is_injective() for geometry in listed):
                raise CheckpointError(f"the strides of {name} have an element twice")


def _names(stored: Any) -> dict[str, str]:
    if not isinstance(stored, dict) or not all(isinstance(name, str) for name in stored.values()):
        raise CheckpointError("its names are not a mapping of names")
    for name, first in stored.items():
        if stored.get(first) != first:
            raise CheckpointError(f"it has {name} tied to {first}, which is not in its state dict")
    return stored


def _cut(stored: Any) -> dict[str, list[BlockGeometry]]:
    if not isinstance(stored, dict) or not all(isinstance(listed, list) and listed for listed in stored.values()):
        raise CheckpointError("its blocks are not a mapping of lists")
    cut = {name: [_geometry(name, entry) for entry in listed] for name, listed in stored.items()}
    for name, listed in cut.items():
        if any(each.param != listed[0].param for each in listed):
            raise CheckpointError(f"the views of {name} are of parameters of different shapes")
    return cut


def _geometry(name: str, entry: Any) -> BlockGeometry:
    known = [field.name for field in fields(BlockGeometry)]
    if not isinstance(entry, dict) or set(entry) != set(known):
        raise CheckpointError(f"the blocks of {name} do not have the keys {', '.join(known)}")
    shapes = {key: entry[key] for key in known if key != "offset"}
    if not all(
        isinstance(shape, list) and all(map(_is_whole, shape)) for shape in (*shapes.values(), [entry["offset"]])
    ):
        raise CheckpointError(f"the blocks of {name} have sizes that are not whole numbers")
    made = BlockGeometry(**{key: tuple(shape) for key, shape in shapes.items()}, offset=entry["offset"])
    _check_fit(name, made)
    return made.fitted()


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


LARGEST = 1 << 62
"""No stride is as large, not even one that is never used, and no size of a block."""


def _check_fit(name: str, made: BlockGeometry) -> None:
    """Raise an error unless strides fit shapes, and the view has no more elements than exist.

    A block may be larger than its view, where it is the smaller one at the edge: nothing is allocated for the excess.
    """
    is_fitting = (
        min((*made.param, *made.stride, *made.view, 0)) == 0
        and len(made.param) == len(made.stride)
        and len(made.view) == len(made.view_stride) == len(made.block)
        and all(abs(n) <= _extent(made) for n in (*_steps(made), made.offset))
        and all(abs(n) < LARGEST for n in (*made.stride, *made.view_stride))
        and math.prod(made.view) <= math.prod(made.param)
        and all(1 <= b < LARGEST for b in made.block)
    )
    if not is_fitting:
        raise CheckpointError(f"view {made.view} and block {made.block} do not fit {name} of shape {made.param}")


def _steps(made: BlockGeometry) -> list[int]:
    """Return the strides of a view along which it has more than one element: others are never used."""
    return [stride for n, stride in zip(made.view, made.view_stride, strict=True) if n > 1]


def _extent(made: BlockGeometry) -> int:
    """Return how many elements the memory of a parameter spans."""
    return max(math.prod(made.param), 1 + sum((n - 1) * s for n, s in zip(made.param, made.stride, strict=False)))


def check_entries(found: Mapping[str, Any], header: Header) -> None:
    """Raise an error unless a file has exactly the tensors of its header."""
    expected = set(header.entries())
    optional = {f"{name}/rest" for name in header.cut}
    missing, extra = expected - set(found), set(found) - expected - optional
    if missing or extra:
        what = f"no {min(missing)}" if missing else f"{min(extra)}, which its header does not name"
        raise CheckpointError(f"it has {what}")
