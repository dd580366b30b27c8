"""SafetensorsFolder: the tensors of a model in the safetensors files of a folder, read in slices."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from sparse_lightning.data.missing import MissingError

Box = Sequence[tuple[int, int]]
"""Start and stop along each dimension."""

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


class SafetensorsFolder:
    """The tensors that `save_pretrained` has written, in one file or in several with an index.

    Opening it reads the headers only. `read` reads the requested slice, and no other part of a tensor.

    Args:
        folder: with `model.safetensors` or `model.safetensors.index.json`.

    Attributes:
        files: the file of each tensor, by name.
        bytes_read: the bytes of all slices that were read.

    Raises:
        MissingError: where a file is missing, or is named outside of the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.files = _files(folder)
        self.bytes_read = 0
        self._open: dict[Path, Any] = {}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, from its header."""
        return tuple(self._file(name).get_slice(name).get_shape())

    def is_float(self, name: str) -> bool:
        """Whether a tensor holds plain floating-point weights, from its header."""
        return self._file(name).get_slice(name).get_dtype() in ("F64", "F32", "F16", "BF16")

    def read(self, name: str, box: Box) -> Tensor:
        """Return a slice of a tensor, in the dtype of the file."""
        file = self._file(name)
        found: Tensor = file.get_slice(name)[tuple(slice(lo, hi) for lo, hi in box)] if box else file.get_tensor(name)
        self.bytes_read += found.nbytes
        return found

    def close(self) -> None:
        """Close all files; the next read opens them again."""
        self._open.clear()

    def _file(self, name: str) -> Any:
        path = self.files[name]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": {}}


def _files(folder: Path) -> dict[str, Path]:
    if (folder / ONE_FILE).is_file():
        with safe_open(folder / ONE_FILE, framework="pt") as file:
            return dict.fromkeys(file.keys(), folder / ONE_FILE)
    if not (folder / INDEX).is_file():
        raise MissingError(
            f"{folder} has no {ONE_FILE} and no {INDEX}: write the model with save_pretrained(folder), which saves "
            "safetensors"
        )
    files = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
    for file in sorted(set(files.values())):
        if Path(file).name != file or not (folder / file).is_file():
            raise MissingError(f"{file} of {folder / INDEX} is not a file of that folder: copy the whole folder")
    return {name: folder / file for name, file in files.items()}
