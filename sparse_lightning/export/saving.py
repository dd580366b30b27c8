"""Saving tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, in a folder that is made if it is not there.

    Others may read it as far as they may read any new file: safetensors alone keeps files to their owner.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, dict(metadata))
    path.chmod(mode)
