"""block_apply in plain torch operations: the definition, and the fallback for any device."""

from __future__ import annotations

from torch import Tensor

from sparse_lightning.kernels.chunks import chunks


def fill_(window: Tensor, mask: Tensor) -> None:
    """Zero the blocks where the mask is True."""
    window.masked_fill_(spread(mask), 0)


def scale_(window: Tensor, multiplier: Tensor) -> None:
    """Multiply each block by its grid value.

    In chunks: for a multiplier of a wider dtype than the window, torch converts the operands.
    """
    for piece in chunks(window.shape, window.device):
        window[piece].mul_(spread(multiplier[piece[0::2]]))


def spread(grid: Tensor) -> Tensor:
    """Return a grid `(n0, n1, …)` as `(n0, 1, n1, 1, …)`, which broadcasts against its window."""
    return grid.view([x for n in grid.shape for x in (n, 1)])
