"""save_tensors: write a safetensors file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file; its folder is created if it does not exist.

    Raises:
        OSError: where the file cannot be written, as of a full disk; safetensors has an error of its own for it.

    The file gets the default permissions of new files: safetensors itself makes it readable by its owner only.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, dict(metadata))
    except SafetensorError as error:
        if found := re.search(r"os error (\d+)|code: (\d+)", str(error)):
            number = int(found[1] or found[2])
            raise OSError(number, os.strerror(number), str(path)) from error
        raise
    path.chmod(mode)
