"""Tiled: the model with the kept tiles of its linear layers, in a file that runs faster than the dense one."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn

from sparse_lightning.blocks.shards import is_sharded
from sparse_lightning.engine.sparsifier import Sparsifier
from sparse_lightning.errors import CheckpointError, SparseLightningError
from sparse_lightning.export.reading import parse_header, read_tensors
from sparse_lightning.export.saving import save_tensors
from sparse_lightning.export.state import first_names, plain, tensors_of, writes
from sparse_lightning.graph.inputs import Inputs
from sparse_lightning.tiles import TileLinear, tiled

HEADER = "sparse_lightning.tiled"
"""The entry of the file's metadata that names the tiled layers, and tied tensors."""

FORMAT = 1

KEYS = ("format", "names", "layers")

_log = logging.getLogger(__name__)

PARTS = ("tiles", "pointers", "columns", "bias")
"""The tensors of a tiled layer."""


class Tiled:
    """Saves a model with tiled linear layers as a safetensors file, which `load` puts into a fresh model.

    Layers are tiled by `tiled`: those that are faster so on the inputs, on the machine that exports. Nothing in the
    file is executed, and all of it is checked before the model changes.

    Args:
        inputs: a tuple of positional or a dict of keyword arguments of the model; None takes its
            `example_input_array` or `dummy_inputs`.
        tile: the outputs × inputs of a tile; None finds a shape for each layer.
        file: the name of the file.

    Example:
        >>> import tempfile, torch
        >>> from sparse_lightning import Blocks, Constant
        >>> model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
        >>> with torch.no_grad():
        ...     _ = model[0].weight[:960].zero_()
        >>> sparsifier, inputs = Sparsifier([Blocks("0.weight", (32, 32))], Constant(0.9)), torch.randn(1, 1024)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Tiled((inputs,))(Path(folder), model, sparsifier)
        ...     fresh = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
        ...     loaded = Tiled.load(path, into=fresh)
        >>> torch.allclose(loaded(inputs), model(inputs), atol=1e-5), type(loaded[0]).__name__
        (True, 'TileLinear')
    """

    def __init__(
        self, inputs: Inputs = None, tile: tuple[int, int] | None = None, file: str = "tiled.safetensors"
    ) -> None:
        self.inputs, self.file = inputs, file
        self.tile = None if tile is None else (int(tile[0]), int(tile[1]))

    def __call__(self, folder: Path, model: nn.Module, sparsifier: Sparsifier) -> Path:
        """Write the file; see `Exporter`.

        Raises:
            SparseLightningError: if parameters are sharded: layers are timed in one process.
        """
        path = Path(folder) / self.file
        sharded = next((name for name, parameter in model.named_parameters() if is_sharded(parameter)), None)
        if sharded is not None:
            raise SparseLightningError(
                f"{sharded} is sharded over processes, and layers are timed in one: export `Weights` instead, load "
                "them into the plain model, and call Tiled there"
            )
        if writes():
            small = tiled(model, self.inputs, self.tile)
            _log.info("tiles of %s:\n%s", path.name, small.tile_table)
            save_tensors(*_entries(small, path))
        return path

    @staticmethod
    def load(path: Path | str, into: nn.Module) -> nn.Module:
        """Return a model with the tiled layers and all other tensors of a file.

        Args:
            path: the file.
            into: a model of the exported class and dtype; its layers are replaced.

        Raises:
            CheckpointError: if the file was not written by `Tiled`, is damaged, or belongs to another model.
        """
        try:
            text, found = read_tensors(path, HEADER)
            header = parse_header(text, KEYS, FORMAT)
            state = {name: found[first] for name, first in header["names"].items()}
            layers = {name: _layer(name, into, state) for name in dict.fromkeys(header["layers"].values())}
            replaced = {name: layers[first] for name, first in header["layers"].items()}
            _check(state, into, replaced)
        except (SafetensorError, KeyError, AttributeError, TypeError, ValueError, RecursionError, OSError) as error:
            raise CheckpointError(
                f"{path} does not contain the tiles of this {type(into).__name__} ({type(error).__name__}: {error}): "
                "pass a file that sparse_lightning.export.Tiled has written, and a model of the class that was exported"
            ) from error
        return _placed(into, replaced, state)


def _entries(model: nn.Module, path: Path) -> tuple[dict[str, Tensor], Path, dict[str, str]]:
    """Return the tensors of a tiled model, the file, and its header."""
    state = tensors_of(model)
    names = first_names(state)
    found = {name: plain(state[name]) for name in dict.fromkeys(names.values())}
    known: dict[nn.Module, str] = {}
    modules = model.named_modules(remove_duplicate=False)
    layers = {name: known.setdefault(module, name) for name, module in modules if isinstance(module, TileLinear)}
    header = dict(zip(KEYS, (FORMAT, names, layers), strict=True))
    return {name: t for name, t in found.items() if t is not None}, path, {HEADER: json.dumps(header)}


def _layer(name: str, model: nn.Module, state: Mapping[str, Tensor]) -> TileLinear:
    """Return a tiled layer with the features of the layer of the model whose place it takes."""
    dense = model.get_submodule(name)
    if type(dense) is not nn.Linear:
        raise ValueError(f"{name or 'the model'} is a {type(dense).__name__}, not a Linear")
    tiles, pointers, columns = (state[_join(name, part)] for part in PARTS[:3])
    return TileLinear(
        dense.in_features, dense.out_features, tiles, pointers, columns, state.get(_join(name, "bias"))
    ).train(dense.training)


def _check(state: Mapping[str, Tensor], model: nn.Module, layers: Mapping[str, TileLinear]) -> None:
    """Check names, shapes and dtypes of everything before the model changes."""
    expected: dict[str, Any] = dict(tensors_of(model))
    for name, layer in layers.items():
        dense = expected.pop(_join(name, "weight"))
        if (layer.bias is None) == (_join(name, "bias") in expected) or layer.tiles.dtype != dense.dtype:
            raise ValueError(f"{name or 'the model'} has a bias or a dtype of {layer.tiles.dtype} that does not fit")
        expected |= {_join(name, part): tensor for part, tensor in layer.named_buffers()}
    if set(expected) != set(state):
        odd = sorted(set(expected) ^ set(state))
        raise ValueError(f"{odd[0]} is in the file or in the model only")
    for name, tensor in expected.items():
        if tensor.shape != state[name].shape or tensor.dtype != state[name].dtype:
            raise ValueError(
                f"{name} is {tuple(state[name].shape)} {state[name].dtype}, not {tuple(tensor.shape)} {tensor.dtype}"
            )


def _placed(model: nn.Module, layers: Mapping[str, TileLinear], state: Mapping[str, Tensor]) -> nn.Module:
    device = next((tensor.device for tensor in model.parameters()), None)
    if "" in layers:
        return layers[""].to(device)
    for name, layer in layers.items():
        model.set_submodule(name, layer.to(device))
    model.load_state_dict(dict(state))
    return model


def _join(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part
