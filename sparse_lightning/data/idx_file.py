"""read_idx: the bytes of an idx file, the format of MNIST and its relatives."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sparse_lightning.data.missing import MissingError

UNSIGNED_BYTES = 0x08
"""The code of the element type in the third byte of a file."""


def read_idx(path: Path) -> Tensor:
    """Return an idx file of bytes as a tensor of its shape, from the plain file or from the one with `.gz`.

    A file starts with two zero bytes, the element type, and the number of dimensions; then come the sizes, four bytes
    each with the highest first, and the elements in C order.

    Args:
        path: the file, without `.gz`.

    Raises:
        MissingError: where there is no such file, or it is not an idx file of bytes.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "pairs-idx2-ubyte")
        ...     _ = file.write_bytes(bytes([0, 0, 8, 2, 0, 0, 0, 3, 0, 0, 0, 2, *range(6)]))
        ...     read_idx(file).tolist()
        [[0, 1], [2, 3], [4, 5]]
    """
    data = _bytes(path)
    dims = data[3] if len(data) > 3 else 0
    start = 4 + 4 * dims
    shape = [int.from_bytes(data[i : i + 4], "big") for i in range(4, start, 4)]
    if data[:3] != bytes([0, 0, UNSIGNED_BYTES]) or not dims or len(data) != start + math.prod(shape):
        raise MissingError(f"{path} of {len(data)} bytes is not an idx file of bytes: download it again")
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=start).reshape(shape).copy())


def _bytes(path: Path) -> bytes:
    packed = path.with_name(f"{path.name}.gz")
    if path.is_file():
        return path.read_bytes()
    try:
        return gzip.decompress(packed.read_bytes())
    except FileNotFoundError:
        raise MissingError(
            f"{path.parent} has no {path.name} and no {packed.name}: set data.folder to theirs"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise MissingError(f"{packed} is not a complete gzip file ({error}): download it again") from error
