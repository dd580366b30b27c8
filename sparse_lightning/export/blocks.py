"""KeptBlocks: only the blocks that are not zero, and a bit mask of all blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from sparse_lightning.engine.masks import pack, unpack
from sparse_lightning.engine.sparsifier import Sparsifier
from sparse_lightning.errors import CheckpointError
from sparse_lightning.export.geometry import PADDING, BlockGeometry
from sparse_lightning.export.header import Header, check_entries
from sparse_lightning.export.reading import read_tensors
from sparse_lightning.export.saving import save_tensors
from sparse_lightning.export.state import first_names, plain, tensors_of, writes
from sparse_lightning.patterns import resolve

HEADER = "sparse_lightning.blocks"
"""The entry of the file's metadata that describes how its tensors form a state dict."""


class KeptBlocks:
    """Saves the kept blocks and their masks in one safetensors file, from which `load` restores the exact state dict.

    A block is omitted if all of its bits are 0 in the weights, whatever the masks of the Sparsifier are: the export is
    lossless. For each view `i` of a parameter `w` that is divided into blocks, the file has:

    - `w/blocks.i`: the kept blocks, `(kept, *block)`; flattened if blocks at the edge are smaller. No block is larger
      than its view.
    - `w/mask.i`: a bit for each block, 1 = omitted, packed by `sparse_lightning.engine.masks.pack`.
    - `w/rest`: the elements outside all views, if there are any.

    All other tensors are stored unchanged, tied ones once.

    Args:
        file: the name of the file.

    Example:
        >>> import tempfile
        >>> from sparse_lightning import Blocks, Constant
        >>> model = nn.Linear(8, 8)
        >>> with torch.no_grad():
        ...     _ = model.weight[:4].zero_()
        >>> sparsifier = Sparsifier([Blocks("weight", (4, 4))], Constant(0.5))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     state = KeptBlocks.load(KeptBlocks()(Path(folder), model, sparsifier))
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
        geometries = _geometries(sparsifier, model, state, names)
        found: dict[str, Tensor] = {}
        for name in dict.fromkeys(names.values()):
            tensor = plain(state[name])
            if tensor is not None:
                found |= _split(name, tensor, geometries[name]) if name in geometries else {name: tensor}
        if writes():
            save_tensors(found, path, {HEADER: Header(names, geometries).to_text()})
        return path

    @staticmethod
    def load(path: Path | str) -> dict[str, Tensor]:
        """Return the exact state dict that was exported, with its names in the same order; tied ones are one tensor.

        Args:
            path: the file.

        Shapes, counts and indices are checked, and nothing is allocated that the size of the file does not justify.

        Raises:
            CheckpointError: if the file was not written by `KeptBlocks`, or is truncated or changed.
        """
        try:
            text, found = read_tensors(path, HEADER)
            header = Header.from_text(text, Path(path).stat().st_size)
            check_entries(found, header)
            whole = {
                name: _join(name, found, header.cut[name]) if name in header.cut else found[name]
                for name in dict.fromkeys(header.names.values())
            }
        except (SafetensorError, KeyError, ValueError, RecursionError, CheckpointError) as error:
            raise CheckpointError(
                f"{path} does not contain the blocks of a model ({type(error).__name__}: {error}): pass a file that "
                "sparse_lightning.export.KeptBlocks has written"
            ) from error
        return {name: whole[first] for name, first in header.names.items()}


def _geometries(
    sparsifier: Sparsifier, model: nn.Module, state: Mapping[str, Tensor], names: Mapping[str, str]
) -> dict[str, list[BlockGeometry]]:
    """Return the geometry of each view, by the first name of its parameter in the state dict."""
    name_of = {id(tensor): names[name] for name, tensor in state.items()}
    found: dict[str, list[BlockGeometry]] = {}
    for attachment in resolve(sparsifier.configuration.patterns, model):
        for block in attachment.scope.blocks():
            for spec in block.blocks():
                if id(spec.param) in name_of:
                    found.setdefault(name_of[id(spec.param)], []).append(BlockGeometry.of(spec))
    return found


def _split(name: str, tensor: Tensor, geometries: Iterable[BlockGeometry]) -> dict[str, Tensor]:
    """Return the entries of the file for a parameter that is divided into blocks."""
    values = tensor.flatten()
    is_set = values.view(torch.uint8).view(values.numel(), values.element_size()).ne(0).any(-1)
    rest = torch.ones_like(is_set)
    found = {}
    for i, geometry in enumerate(geometries):
        indices = geometry.indices()
        rest[indices[indices != PADDING]] = False
        pruned = ~(is_set[indices.clamp(min=0)] & (indices != PADDING)).any(-1)
        found[f"{name}/mask.{i}"] = pack(pruned)
        found[f"{name}/blocks.{i}"] = _kept(values, indices[~pruned], geometry)
    return found | ({f"{name}/rest": values[rest]} if rest.any() else {})


def _kept(values: Tensor, indices: Tensor, geometry: BlockGeometry) -> Tensor:
    if (indices == PADDING).any():
        return values[indices[indices != PADDING]]
    return values[indices].view(-1, *geometry.block)


def _join(name: str, found: Mapping[str, Tensor], geometries: list[BlockGeometry]) -> Tensor:
    """Return a parameter from its entries in the file; omitted blocks are zero."""
    dtype = found[f"{name}/blocks.0"].dtype
    values = torch.zeros(geometries[0].param, dtype=dtype).flatten()
    rest = torch.ones(values.shape, dtype=torch.bool)
    for i, geometry in enumerate(geometries):
        indices = geometry.indices()
        rest[indices[indices != PADDING]] = False
        mask = _checked(found, f"{name}/mask.{i}", torch.uint8, -(-len(indices) // 8))
        kept = indices[~unpack(mask, (len(indices),))]
        kept = kept[kept != PADDING]
        values[kept] = _checked(found, f"{name}/blocks.{i}", dtype, len(kept))
    if rest.any() or f"{name}/rest" in found:
        values[rest] = _checked(found, f"{name}/rest", dtype, int(rest.sum()))
    return values.view(geometries[0].param)


def _checked(found: Mapping[str, Tensor], name: str, dtype: torch.dtype, count: int) -> Tensor:
    """Return an entry, flat; raise an error if it has another dtype or number of elements."""
    entry = found.get(name)
    if entry is None or entry.dtype != dtype or entry.numel() != count:
        has = "is missing" if entry is None else f"has {entry.numel()} elements of {entry.dtype}"
        raise CheckpointError(f"{name} {has}, and its header needs {count} of {dtype}")
    return entry.flatten()
