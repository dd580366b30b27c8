"""block_apply: fill or scale the blocks of a strided window in place.

A window is `(n0, l0, n1, l1, …)`: blocks and their elements alternating, strides descending. A grid is `(n0, n1, …)`.
Triton is optional, so its kernels are imported on first use.
"""

from __future__ import annotations

from torch import Tensor

from sparse_lightning.kernels.availability import TRITON_DTYPES, takes_triton
from sparse_lightning.kernels.block_apply import cpu, reference


def fill_(window: Tensor, mask: Tensor) -> None:
    """Zero the blocks where the mask is True."""
    if window.device.type == "cpu" and window.element_size() in cpu.INTEGERS:
        cpu.fill_(window, mask)
    elif takes_triton(window):
        from sparse_lightning.kernels.block_apply import triton

        triton.fill_(window, mask)
    else:
        reference.fill_(window, mask)


def scale_(window: Tensor, multiplier: Tensor) -> None:
    """Multiply each block by its grid value."""
    if takes_triton(window) and multiplier.dtype in TRITON_DTYPES:
        from sparse_lightning.kernels.block_apply import triton

        triton.scale_(window, multiplier)
    else:
        reference.scale_(window, multiplier)
