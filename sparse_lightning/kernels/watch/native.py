"""Watch in C++: one call for all tensors, with their descriptions as torch itself holds them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from sparse_lightning.compat.torch import descriptors
from sparse_lightning.kernels.native import library, torch_options

SOURCE = Path(__file__).with_suffix(".cpp")

PLAIN = (Tensor, nn.Parameter)
"""The classes whose descriptions are complete: a subclass may compute strides in Python."""


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    return library(SOURCE, torch_options())


def can_watch(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors are strided ones of torch itself, and the library is built or can be built now."""
    are_plain = all(type(tensor) in PLAIN and tensor.layout == torch.strided for tensor in tensors)
    return are_plain and _library() is not None


class NativeWatch:
    """See `Watch`. Some 10 ns for each tensor, and 40 ns to see that none was exchanged by `swap_tensors`.

    Args:
        tensors: what is watched.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        built = _library()
        assert built is not None, "`can_watch` was checked"
        self._library, self.tensors = built, list(tensors)
        self._descriptors = descriptors(self.tensors)
        sizes = len(self.tensors), sum(4 + 2 * tensor.ndim for tensor in self.tensors), len(self.tensors)
        self._kept = [torch.empty(size, dtype=torch.int64) for size in sizes]
        self._kept[0].copy_(torch.tensor(self._descriptors, dtype=torch.int64))
        self._where, self._noted, self._addresses = (ctypes.c_void_p(kept.data_ptr()) for kept in self._kept)
        self._count = ctypes.c_int64(len(self.tensors))
        self._library.note(self._where, self._count, self._noted, self._addresses)
        self.pointers: list[int] = self._kept[2].tolist()

    def look(self) -> bool:
        """Whether all tensors lie as they did when the watch was made."""
        if descriptors(self.tensors) != self._descriptors:
            return False
        found = self._library.look(self._where, self._count, self._noted, self._addresses)
        if found == 1:
            self.pointers = self._kept[2].tolist()
        return bool(found != 2)

    def notify(self) -> None:
        """Tell autograd that the tensors were written to."""
        self._library.bump(self._where, self._count)
