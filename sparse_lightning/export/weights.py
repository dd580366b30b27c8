"""Weights: the dense state dict of the plain model, including all zeros."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from sparse_lightning.engine.sparsifier import Sparsifier
from sparse_lightning.export.saving import save_tensors
from sparse_lightning.export.state import plain, tensors_of, writes


class Weights:
    """Saves the state dict as a safetensors file that the plain model loads without this package.

    The file has every name of the state dict, including all names of tied weights, as
    `model.load_state_dict(safetensors.torch.load_file("model.safetensors"))` expects.

    Args:
        file: the name of the file.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import load_file
        >>> from sparse_lightning import Blocks, Constant
        >>> model = nn.Linear(8, 8)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Weights()(Path(folder), model, Sparsifier([Blocks("weight", (4, 4))], Constant(0.5)))
        ...     model.load_state_dict(load_file(path))
        <All keys matched successfully>
    """

    def __init__(self, file: str = "model.safetensors") -> None:
        self.file = file

    def __call__(self, folder: Path, model: nn.Module, sparsifier: Sparsifier) -> Path:
        """Write the file; see `Exporter`."""
        path = Path(folder) / self.file
        found = {name: plain(tensor) for name, tensor in tensors_of(model).items()}
        whole = {name: tensor for name, tensor in found.items() if tensor is not None}
        if writes():
            save_tensors(whole, path, {"format": "pt"})
        return path
