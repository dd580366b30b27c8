"""block_apply: fill or scale the blocks of a strided window in place.

A window is `(n0, l0, n1, l1, …)`: blocks and their elements in turn, strides falling. A grid is `(n0, n1, …)`.
"""

from __future__ import annotations

from torch import Tensor

from sparse_lightning.kernels.block_apply import cpu, reference


def fill_(window: Tensor, mask: Tensor) -> None:
    """Zero the blocks where the mask is True."""
    if window.device.type == "cpu" and window.element_size() in cpu.INTEGERS:
        cpu.fill_(window, mask)
    else:
        reference.fill_(window, mask)


def scale_(window: Tensor, multiplier: Tensor) -> None:
    """Multiply each block by its grid value."""
    reference.scale_(window, multiplier)
