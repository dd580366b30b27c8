"""block_fill: zero the pruned blocks of all tensors of a device by one call.

A table says where the blocks of each tensor lie, and where their values of one flat mask are. It depends on shapes and
strides only. Addresses and the mask are passed to each call, so that an update of the masks changes no table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from sparse_lightning.kernels.availability import has_triton
from sparse_lightning.kernels.block_fill import native
from sparse_lightning.kernels.block_fill.reference import TorchFill
from sparse_lightning.kernels.block_fill.windows import Window
from sparse_lightning.kernels.watch import Watch


class Table(Protocol):
    """Fills the blocks of tensors at these addresses; 0 is passed over."""

    def fill(self, pointers: Sequence[int], mask: Tensor) -> None:
        """Zero the blocks where the flat mask is True."""


class BlockFill:
    """Zeroes the pruned blocks of tensors on one device.

    Args:
        windows: the blocks of all tensors.
        tensors: what is filled. Others may be passed to `fill` if shapes, strides and dtypes are the same.
    """

    def __init__(self, windows: Sequence[Window], tensors: Sequence[Tensor]) -> None:
        device = tensors[0].device
        self._table: Table | None = None
        self._torch = TorchFill(windows)
        if device.type == "cpu" and native.is_available():
            self._table = native.NativeFill(windows, [tensor.element_size() for tensor in tensors])
        elif device.type == "cuda" and has_triton():
            from sparse_lightning.kernels.block_fill import triton

            self._table = triton.TritonFill(windows, [tensor.element_size() for tensor in tensors], device)

    def fill(self, tensors: Sequence[Tensor], pointers: Sequence[int], mask: Tensor) -> None:
        """Zero the blocks where the flat mask is True, exactly +0.0 whatever they held.

        Args:
            tensors: in the order of the windows.
            pointers: the address of each tensor.
            mask: boolean and contiguous, on the device of the tensors.
        """
        self._fill(tensors, pointers, mask)
        self._notify(_tracked(tensors))

    def fill_watched(self, watched: Watch, mask: Tensor) -> None:
        """Do the same for tensors whose addresses are known from a watch, which has just looked."""
        self._fill(watched.tensors, watched.pointers, mask)
        if self._table is not None:
            watched.notify()

    def fill_some(self, tensors: Sequence[Tensor | None], mask: Tensor) -> None:
        """Do the same for tensors of which some are missing."""
        self._fill(tensors, [0 if tensor is None else tensor.data_ptr() for tensor in tensors], mask)
        self._notify(_tracked(tensors))

    def _fill(self, tensors: Sequence[Tensor | None], pointers: Sequence[int], mask: Tensor) -> None:
        if self._table is None:
            self._torch.fill(tensors, pointers, mask)
        else:
            self._table.fill(pointers, mask)

    def _notify(self, written: Sequence[Tensor]) -> None:
        """Tell autograd, which does not see what kernels write."""
        if self._table is not None:
            torch.autograd.graph.increment_version(written)


def _tracked(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the tensors whose versions autograd counts."""
    return [tensor for tensor in tensors if tensor is not None and not tensor.is_inference()]
