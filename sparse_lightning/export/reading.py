"""Read a safetensors file: its tensors, and the header that its exporter has written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor


def read_tensors(path: Path | str, entry: str) -> tuple[str, dict[str, Tensor]]:
    """Return an entry of the metadata of a file, and its tensors by name.

    Raises:
        ValueError: if it is not a regular file: a pipe is never read to its end.
        KeyError: if its metadata has no such entry.
        SafetensorError, OSError: if it cannot be read.
    """
    if Path(path).exists() and not Path(path).is_file():
        raise ValueError("it is a folder, a pipe or a device, not a file")
    with safe_open(path, framework="pt") as file:
        text = (file.metadata() or {})[entry]
        return text, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping


def parse_header(text: str, keys: Sequence[str], version: int) -> dict[str, Any]:
    """Return a header that is a JSON mapping with exactly these keys, one of them the version as `format`.

    Raises:
        ValueError: if it is not.

    Example:
        >>> parse_header('{"format": 1, "names": {}}', ["format", "names"], 1)["names"]
        {}
    """
    stored = json.loads(text)
    if not isinstance(stored, dict) or set(stored) != set(keys):
        raise ValueError(f"its header does not have the keys {', '.join(keys)}")
    if type(stored["format"]) is not int or stored["format"] != version:
        raise ValueError(f"it has the format {stored['format']!r}, and this version reads {version}")
    return stored
