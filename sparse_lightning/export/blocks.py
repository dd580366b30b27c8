"""Blocks: only the blocks that are not zero, and a bit for each block that says which they are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from sparse_lightning import masks
from sparse_lightning.errors import CheckpointError, LayoutError
from sparse_lightning.export.places import NOWHERE, Places
from sparse_lightning.export.saving import save_tensors
from sparse_lightning.export.state import first_names, plain, tensors_of, writes
from sparse_lightning.patterns import resolve
from sparse_lightning.sparsifier import Sparsifier

HEADER = "sparse_lightning.blocks"
"""The entry of the file's metadata that says how its tensors become a state dict."""

FORMAT = 1


class Blocks:
    """Saves the kept blocks and the masks in one safetensors file, from which `load` restores the exact state dict.

    A block is left out where each of its bits is 0 in the weights, so nothing is lost, whatever the masks say. Of a
    parameter `w` that patterns have cut into blocks the file has, for each of its views `i`:

    - `w/blocks.i`: the kept blocks, `(kept, *block)`; in one row, where blocks at the edge are smaller.
    - `w/mask.i`: a bit for each block, True = left out, as `sparse_lightning.masks.pack` has it.
    - `w/rest`: the elements that lie in no view, if there are any.

    All other tensors are there as they are, tied ones once.

    Args:
        file: the name of the file.

    Example:
        >>> import tempfile
        >>> from sparse_lightning import Constant, patterns
        >>> model = nn.Linear(8, 8)
        >>> with torch.no_grad():
        ...     _ = model.weight[:4].zero_()
        >>> sparsifier = Sparsifier([patterns.Blocks("weight", (4, 4))], Constant(0.5))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     state = Blocks.load(Blocks()(Path(folder), model, sparsifier))
        >>> all(torch.equal(state[name], model.state_dict()[name]) for name in state), list(state)
        (True, ['weight', 'bias'])
    """

    def __init__(self, file: str = "blocks.safetensors") -> None:
        self.file = file

    def __call__(self, folder: Path, model: nn.Module, sparsifier: Sparsifier) -> Path:
        """Write the file; see `Exporter`."""
        path = Path(folder) / self.file
        state = tensors_of(model)
        names = first_names(state)
        cut = _places(sparsifier, model, state, names)
        found: dict[str, Tensor] = {}
        for name in dict.fromkeys(names.values()):
            tensor = plain(state[name])
            if tensor is not None:
                found |= _parts(name, tensor, cut[name]) if name in cut else {name: tensor}
        header = {"format": FORMAT, "names": names, "cut": {name: [asdict(p) for p in ps] for name, ps in cut.items()}}
        if writes():
            save_tensors(found, path, {HEADER: json.dumps(header)})
        return path

    @staticmethod
    def load(path: Path | str) -> dict[str, Tensor]:
        """The state dict that was saved, bit for bit, its names in the same order; tied ones are one tensor.

        Args:
            path: the file.

        Raises:
            CheckpointError: where the file was not written by `Blocks`, or has been cut short.
        """
        try:
            with safe_open(path, framework="pt") as file:
                header = json.loads((file.metadata() or {})[HEADER])
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            cut = {name: [_read_places(entry) for entry in entries] for name, entries in header["cut"].items()}
            whole = {
                name: _joined(name, found, cut[name]) if name in cut else found[name]
                for name in dict.fromkeys(header["names"].values())
            }
        except (SafetensorError, KeyError, IndexError, TypeError, ValueError, LayoutError, RuntimeError) as error:
            raise CheckpointError(
                f"{path} does not hold the blocks of a model ({type(error).__name__}: {error}): give a file that "
                "sparse_lightning.export.Blocks has written"
            ) from error
        return {name: whole[first] for name, first in header["names"].items()}


def _places(
    sparsifier: Sparsifier, model: nn.Module, state: Mapping[str, Tensor], names: Mapping[str, str]
) -> dict[str, list[Places]]:
    """The places of all blocks, by the first name of their parameter in the state dict."""
    name_of = {id(tensor): names[name] for name, tensor in state.items()}
    found: dict[str, list[Places]] = {}
    for attachment in resolve(sparsifier.settings.patterns, model):
        for block in attachment.scope.blocks():
            for spec in block.blocks():
                if id(spec.param) in name_of:
                    found.setdefault(name_of[id(spec.param)], []).append(Places.of(spec))
    return found


def _parts(name: str, tensor: Tensor, cut: Iterable[Places]) -> dict[str, Tensor]:
    """What the file holds of a parameter that is cut into blocks."""
    values = tensor.flatten()
    is_set = values.view(torch.uint8).view(values.numel(), values.element_size()).ne(0).any(-1)
    rest = torch.ones_like(is_set)
    found = {}
    for i, places in enumerate(cut):
        indices = places.indices()
        rest[indices[indices != NOWHERE]] = False
        pruned = ~(is_set[indices.clamp(min=0)] & (indices != NOWHERE)).any(-1)
        found[f"{name}/mask.{i}"] = masks.pack(pruned)
        found[f"{name}/blocks.{i}"] = _kept(values, indices[~pruned], places)
    return found | ({f"{name}/rest": values[rest]} if rest.any() else {})


def _kept(values: Tensor, indices: Tensor, places: Places) -> Tensor:
    if (indices == NOWHERE).any():
        return values[indices[indices != NOWHERE]]
    return values[indices].view(-1, *places.block)


def _joined(name: str, found: Mapping[str, Tensor], cut: list[Places]) -> Tensor:
    """A parameter from what the file holds of it: what was left out is zero."""
    values = torch.zeros(cut[0].param, dtype=found[f"{name}/blocks.0"].dtype).flatten()
    rest = torch.ones(values.shape, dtype=torch.bool)
    for i, places in enumerate(cut):
        indices = places.indices()
        rest[indices[indices != NOWHERE]] = False
        kept = indices[~masks.unpack(found[f"{name}/mask.{i}"], (len(indices),))]
        values[kept[kept != NOWHERE]] = found[f"{name}/blocks.{i}"].flatten()
    if rest.any():
        values[rest] = found[f"{name}/rest"]
    return values.view(cut[0].param)


def _read_places(entry: dict[str, Any]) -> Places:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    return Places(**values)
