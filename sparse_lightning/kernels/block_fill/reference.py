"""block_fill in plain torch operations: the definition, and the fallback for any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from sparse_lightning.compat.torch import multiply_all_
from sparse_lightning.kernels import block_apply
from sparse_lightning.kernels.block_apply import cpu
from sparse_lightning.kernels.block_apply.reference import spread
from sparse_lightning.kernels.block_fill.windows import Window


class TorchFill:
    """One fill for each window. Operands are prepared when the mask or a tensor changes, and used at every step.

    Args:
        windows: the blocks.
    """

    def __init__(self, windows: Sequence[Window]) -> None:
        self._windows = windows
        self._prepared: tuple[Sequence[int], Tensor, list[Callable[[], None]]] = ([], torch.empty(0), [])

    def fill(self, tensors: Sequence[Tensor | None], pointers: Sequence[int], mask: Tensor) -> None:
        """Zero the blocks where the flat mask is True; None is passed over."""
        known, drawn, _ = self._prepared
        if (known is not pointers and known != pointers) or drawn is not mask:
            self._prepared = pointers, mask, _fills(self._windows, tensors, mask)
        for fill in self._prepared[2]:
            fill()


def _fills(windows: Sequence[Window], tensors: Sequence[Tensor | None], mask: Tensor) -> list[Callable[[], None]]:
    pairs = [(_on(w, t.detach()), _values(w, mask)) for w in windows if (t := tensors[w.tensor]) is not None]
    pruned = [(window, here) for window, here in pairs if here.any()]
    long = [(window, here) for window, here in pruned if _is_long(window)]
    fills: list[Callable[[], None]] = [
        partial(block_apply.fill_, window, here) for window, here in pruned if not _is_long(window)
    ]
    return [*fills, *_batched(long)]


def _is_long(window: Tensor) -> bool:
    return window.device.type == "cpu" and window.element_size() in cpu.INTEGERS and cpu.is_long(window)


def _batched(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Callable[[], None]]:
    """Return one operation for the windows of each dtype: bits are multiplied, as integers, with 0 or 1."""
    groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for window, mask in pairs:
        bits = window.view(cpu.INTEGERS[window.element_size()])
        bits_of, keep_of = groups.setdefault(bits.dtype, ([], []))
        bits_of.append(bits)
        keep_of.append(spread(mask.logical_not().to(bits.dtype)))
    return [partial(multiply_all_, bits, keep) for bits, keep in groups.values()]


def _on(window: Window, tensor: Tensor) -> Tensor:
    """Return the elements of a window of a tensor: `(n0, l0, n1, l1, …)`."""
    shape = [n for pair in window.pairs for n in (pair.blocks, pair.elements)]
    stride = [s for pair in window.pairs for s in (pair.block_stride, pair.element_stride)]
    return tensor.as_strided(shape, stride, tensor.storage_offset() + window.offset)


def _values(window: Window, mask: Tensor) -> Tensor:
    """Return the mask of the blocks of a window: `(n0, n1, …)`, a copy only where the mask is read backwards."""
    sizes, strides = [pair.blocks for pair in window.pairs], [pair.mask_stride for pair in window.pairs]
    backwards = [d for d, s in enumerate(strides) if s < 0]
    first = window.mask + sum((sizes[d] - 1) * strides[d] for d in backwards)
    here = mask.as_strided(sizes, [abs(s) for s in strides], mask.storage_offset() + first)
    return here.flip(backwards) if backwards else here
