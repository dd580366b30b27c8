"""block_apply for CPUs: a fill in integer arithmetic on the bits of the weights.

`x & 0` and `x − x·1` are zero for any bits x, so the weight becomes +0.0 whatever it was. Both run at memory speed;
`masked_fill_` takes several times as long. They also rewrite the weights that are kept, so a few blocks among many are
written one by one instead. They need an operand in memory order: if blocks are short along the innermost dimension, the
mask is first expanded to its elements, in cache-sized chunks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sparse_lightning.kernels.block_apply.reference import spread
from sparse_lightning.kernels.chunks import chunks

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

LONG = 16
"""From this many contiguous elements of a block on, one mask value is broadcast over them."""

FEW = 16
"""If fewer than one block in this many is filled, they are written by index, and the others are not touched."""


def fill_(window: Tensor, mask: Tensor) -> None:
    """Zero the blocks where the mask is True."""
    if mask.ndim and int(mask.count_nonzero()) * FEW < mask.numel():
        places = iter(mask.nonzero(as_tuple=True))
        window[tuple(next(places) if d % 2 == 0 else slice(None) for d in range(window.ndim))] = 0
        return
    bits = window.view(INTEGERS[window.element_size()])
    if is_long(window):
        for part, keep in _operands(bits, mask):
            part.bitwise_and_(keep)
        return
    length = window.shape[-1]
    rows = bits.flatten(-2)  # blocks are contiguous along the innermost dimension: this is a view
    for piece in chunks((*mask.shape[:-1], rows.shape[-1]), mask.device):
        *outer, last = piece
        low, high, _ = last.indices(rows.shape[-1])
        first, end = low // length, -(-high // length)
        pruned, sign = _repeat(mask[(*outer, slice(first, end))], length)
        pruned = pruned[..., low - first * length : high - first * length].to(bits.dtype)
        part = rows[(*_blocks(tuple(outer)), last)]
        part.addcmul_(part, spread(pruned).squeeze(-1), value=sign)


def is_long(window: Tensor) -> bool:
    """Whether one mask value covers enough contiguous elements."""
    return window.ndim == 0 or window.shape[-1] >= LONG


def _operands(bits: Tensor, mask: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parts of a window with the operand of their bitwise AND."""
    for piece in chunks(mask.shape, mask.device):
        keep = torch.sub(mask[piece].view(torch.int8), 1)  # True → 0, False → −1: all bits set
        yield bits[_blocks(piece)], spread(keep.to(bits.dtype))


def _blocks(piece: tuple[slice, ...]) -> tuple[slice, ...]:
    """Return slices of a grid as slices of its window: all elements of each block."""
    return tuple(s for n in piece for s in (n, slice(None)))


def _repeat(mask: Tensor, times: int) -> tuple[Tensor, int]:
    """Repeat a mask along its last dimension, `(…, n)` → `(…, n·times)`, in bytes: 0, and 1 or −1 where True.

    The second result is the factor that makes −1 of such a byte. 0 and −1 keep all their bits when they are converted
    to a longer integer, whose bytes are then the repetitions: this conversion is vectorized, a copy of single bytes is
    not.
    """
    pruned = mask.view(torch.int8)
    if times == 1:
        return pruned, -1
    if times in INTEGERS:
        wide = pruned.neg().to(INTEGERS[times], memory_format=torch.contiguous_format)
        return wide.view(torch.int8), 1
    return pruned.unsqueeze(-1).expand(*pruned.shape, times).flatten(-2), -1
