"""SemiStructured: 2:4 weights as torch's semi-structured tensors, which sparse tensor cores multiply."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from sparse_lightning.engine.sparsifier import Sparsifier
from sparse_lightning.errors import CheckpointError, SparseLightningError
from sparse_lightning.export.reading import parse_header, read_tensors
from sparse_lightning.export.saving import save_tensors
from sparse_lightning.export.state import first_names, plain, tensors_of, writes

HEADER = "sparse_lightning.semi_structured"
"""The entry of the file's metadata that names the 2:4 weights, and tied tensors."""

FORMAT = 1

KEYS = ("format", "names", "layers")

CAPABILITY = (8, 0)
"""The oldest GPUs with sparse tensor cores."""


class SemiStructured:
    """Saves a model whose 2:4 linear layers run on the sparse tensor cores of a GPU of sm_80 or newer.

    A weight `w` with at most two nonzero values in each four along its inputs is stored as `w/values`, two for each
    four, and `w/places`, their positions. `load` converts them by `torch.sparse.to_sparse_semi_structured`.

    Args:
        file: the name of the file.

    Raises:
        SparseLightningError: when it is called for a model on another device, or without 2:4 weights.

    Example:
        >>> from sparse_lightning import NM, Constant
        >>> model = nn.Linear(64, 64)
        >>> SemiStructured()(Path("."), model, Sparsifier([NM("weight")], Constant(0.5)))
        Traceback (most recent call last):
        sparse_lightning.errors.SparseLightningError: 2:4 weights run faster on CUDA GPUs of sm_80 or newer only, and \
the model is on cpu: move it to such a GPU, or export KeptBlocks or Tiled
    """

    def __init__(self, file: str = "semi_structured.safetensors") -> None:
        self.file = file

    def __call__(self, folder: Path, model: nn.Module, sparsifier: Sparsifier) -> Path:
        """Write the file; see `Exporter`."""
        path = Path(folder) / self.file
        check_device(model)
        layers = [
            name for name, module in model.named_modules() if type(module) is nn.Linear and is_2to4(module.weight)
        ]
        if not layers:
            raise SparseLightningError(
                f"no linear layer of {type(model).__name__} has 2:4 weights: prune it with the pattern NM first"
            )
        state = tensors_of(model)
        names = first_names(state)
        packed = {names[f"{name}.weight" if name else "weight"] for name in layers}
        found: dict[str, Tensor] = {}
        for name in dict.fromkeys(names.values()):
            tensor = plain(state[name])
            if tensor is not None:
                found |= _entries(name, tensor, name in packed)
        header = {"format": FORMAT, "names": names, "layers": layers}
        if writes():
            save_tensors(found, path, {HEADER: json.dumps(header)})
        return path

    @staticmethod
    def load(path: Path | str, into: nn.Module) -> nn.Module:
        """Return a copy of a model with the weights of a file, 2:4 ones as semi-structured tensors.

        Args:
            path: the file.
            into: a model of the exported class, on a CUDA GPU of sm_80 or newer.

        Raises:
            CheckpointError: if the file was not written by `SemiStructured`, is damaged, or belongs to another model.
            SparseLightningError: if the model is on another device.
        """
        check_device(into)
        state, layers = read(path)
        loaded = copy.deepcopy(into)
        try:
            loaded.load_state_dict(state)
            modules = [loaded.get_submodule(name) for name in layers]
        except (RuntimeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} belongs to another model than this {type(into).__name__}: {error}"
            ) from error
        for module in modules:
            if type(module) is not nn.Linear or not is_2to4(module.weight):
                raise CheckpointError(f"{path} names layers that are not 2:4 linear layers: export the model again")
            module.weight = nn.Parameter(torch.sparse.to_sparse_semi_structured(module.weight.detach()), False)
        return loaded


def check_device(model: nn.Module) -> None:
    """Raise an error unless all parameters are on a GPU with sparse tensor cores."""
    for parameter in model.parameters():
        if not parameter.is_cuda or torch.cuda.get_device_capability(parameter.device) < CAPABILITY:
            raise SparseLightningError(
                "2:4 weights run faster on CUDA GPUs of sm_80 or newer only, and the model is on "
                f"{parameter.device}: move it to such a GPU, or export KeptBlocks or Tiled"
            )


def is_2to4(weight: Tensor) -> bool:
    """Whether at most two of each four values along the inputs are nonzero.

    Example:
        >>> is_2to4(torch.tensor([[0.0, 1, 2, 0]])), is_2to4(torch.ones(1, 4))
        (True, False)
    """
    if weight.ndim != 2 or weight.shape[1] % 4 or not weight.numel():
        return False
    return bool(((weight.detach() != 0).view(weight.shape[0], -1, 4).sum(-1) <= 2).all())


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return two values of each four, `(out, in / 2)`, and their positions, two times two bits in one byte.

    Example:
        >>> values, places = pack(torch.tensor([[0.0, 5, 0, 7]]))
        >>> values.tolist(), places.tolist()
        ([[5.0, 7.0]], [[13]])
    """
    groups = weight.view(weight.shape[0], -1, 4)
    chosen = (groups != 0).to(torch.uint8).topk(2, dim=-1).indices.sort(-1).values
    values = groups.gather(-1, chosen).flatten(1)
    return values.contiguous(), (chosen[..., 0] + 4 * chosen[..., 1]).to(torch.uint8)


def unpack(values: Tensor, places: Tensor) -> Tensor:
    """Return the weight from what `pack` returns.

    Raises:
        ValueError: if the shapes do not belong together, or positions are not in order.
    """
    rows, groups = places.shape
    first, second = places.long() % 4, places.long() // 4
    if values.shape != (rows, 2 * groups) or places.dtype != torch.uint8 or not bool((first < second).all()):
        raise ValueError("values and places are not those of a 2:4 weight")
    if bool((second > 3).any()):
        raise ValueError("positions in a group of four are larger than 3")
    weight = values.new_zeros(rows, groups, 4)
    return weight.scatter_(-1, torch.stack([first, second], -1), values.view(rows, groups, 2)).flatten(1)


def read(path: Path | str) -> tuple[dict[str, Tensor], list[str]]:
    """Return the state dict of a file, and the names of its 2:4 layers."""
    try:
        text, found = read_tensors(path, HEADER)
        header = parse_header(text, KEYS, FORMAT)
        whole = {name: _whole(name, found) for name in dict.fromkeys(header["names"].values())}
        return {name: whole[first] for name, first in header["names"].items()}, [str(n) for n in header["layers"]]
    except (SafetensorError, KeyError, AttributeError, TypeError, ValueError, RecursionError, OSError) as error:
        raise CheckpointError(
            f"{path} does not contain 2:4 weights ({type(error).__name__}: {error}): pass a file that "
            "sparse_lightning.export.SemiStructured has written"
        ) from error


def _entries(name: str, tensor: Tensor, packed: bool) -> dict[str, Tensor]:
    if not packed:
        return {name: tensor}
    values, places = pack(tensor)
    return {f"{name}/values": values, f"{name}/places": places}


def _whole(name: str, found: dict[str, Tensor]) -> Tensor:
    return found[name] if name in found else unpack(found[f"{name}/values"], found[f"{name}/places"])
