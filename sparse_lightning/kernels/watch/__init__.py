"""Watch: where tensors are in memory, looked at before every write of a kernel that takes addresses.

A tensor keeps its identity when its data is replaced, by `.data = …`, `.to()` or a change of memory format. Kernels
that use an address or strides of before would write to memory that is not the tensor's any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Protocol

import torch
from torch import Tensor

from sparse_lightning.kernels.watch import native

_nbytes = attrgetter("nbytes")


class Watch(Protocol):
    """How some tensors lie in memory.

    Attributes:
        tensors: what is watched.
        pointers: the address of each tensor, as of the last look; the same list as long as none has moved.
    """

    tensors: list[Tensor]
    pointers: list[int]

    def look(self) -> bool:
        """Whether all tensors lie as they did when the watch was made; `pointers` follow those that have moved."""

    def notify(self) -> None:
        """Tell autograd that the tensors were written to."""


class TorchWatch:
    """A watch by calls of Python for each tensor.

    Args:
        tensors: what is watched.

    Example:
        >>> weight = torch.zeros(2, 3)
        >>> watch = TorchWatch([weight])
        >>> watch.look()
        True
        >>> weight.data = torch.zeros(3, 2)
        >>> watch.look()
        False
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors, self.pointers = list(tensors), list(map(Tensor.data_ptr, tensors))
        self._devices, self._lies = [tensor.device for tensor in tensors], _how_they_lie(tensors)

    def look(self) -> bool:
        """Whether all tensors lie as they did when the watch was made."""
        if _how_they_lie(self.tensors) != self._lies:
            return False
        pointers = list(map(Tensor.data_ptr, self.tensors))
        if pointers != self.pointers:
            self.pointers = pointers
            return [tensor.device for tensor in self.tensors] == self._devices
        return True

    def notify(self) -> None:
        """Tell autograd that the tensors were written to."""
        torch.autograd.graph.increment_version([tensor for tensor in self.tensors if not tensor.is_inference()])


def _how_they_lie(tensors: Sequence[Tensor]) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return what a table of blocks depends on: strides, and bytes, which change with the shape and with the dtype."""
    return list(map(Tensor.stride, tensors)), list(map(_nbytes, tensors))


def watch(tensors: Sequence[Tensor]) -> Watch:
    """Return a watch of tensors: in C++ where it can be built, otherwise in Python."""
    return native.NativeWatch(tensors) if native.can_watch(tensors) else TorchWatch(tensors)


def are_same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether two lists hold the same tensors."""
    return some is others or (len(some) == len(others) and all(map(is_, some, others)))
