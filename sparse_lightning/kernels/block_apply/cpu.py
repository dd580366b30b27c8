"""block_apply for CPUs: a fill in integer arithmetic on the bits of the weights.

`x & 0` and `x − x·1` are zero for any bits x, so the weight becomes +0.0 whatever it was. Both run at the speed
of memory, where `masked_fill_` takes several times as long. They want an operand in the order of memory: where
blocks are short along the fastest dimension, the mask is first widened to its elements, chunk by chunk, in the
cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_lightning.chunk import chunks
from sparse_lightning.kernels.block_apply.reference import spread

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

LONG = 16
"""From this many elements on, a run of one block is long enough to broadcast one mask value over it."""


def fill_(window: Tensor, mask: Tensor) -> None:
    """Zero the blocks where the mask is True."""
    bits = window.view(INTEGERS[window.element_size()])
    length = window.shape[-1] if window.ndim else LONG
    if length >= LONG:
        for piece in chunks(mask.shape, mask.device):
            keep = torch.sub(mask[piece].view(torch.int8), 1)  # True → 0, False → −1: all bits set
            bits[_blocks(piece)].bitwise_and_(spread(keep.to(bits.dtype)))
        return
    rows = bits.flatten(-2)  # neighbouring blocks count on along the fastest dimension: this is a view
    for piece in chunks((*mask.shape[:-1], rows.shape[-1]), mask.device):
        *outer, last = piece
        low, high, _ = last.indices(rows.shape[-1])
        first, end = low // length, -(-high // length)
        pruned, sign = _repeat(mask[(*outer, slice(first, end))], length)
        pruned = pruned[..., low - first * length : high - first * length].to(bits.dtype)
        part = rows[(*_blocks(tuple(outer)), last)]
        part.addcmul_(part, spread(pruned).squeeze(-1), value=sign)


def _blocks(piece: tuple[slice, ...]) -> tuple[slice, ...]:
    """Slices of a grid as slices of its window: the elements of a block are taken whole."""
    return tuple(s for n in piece for s in (n, slice(None)))


def _repeat(mask: Tensor, times: int) -> tuple[Tensor, int]:
    """A mask repeated along its last dimension, `(…, n)` → `(…, n·times)`, in bytes: 0, or 1 and −1 where True.

    The second value is what makes −1 of such a byte. 0 and −1 keep all their bits when they are widened to
    a longer integer, whose bytes are then the repetitions: a conversion that runs on vectors, where a copy
    of single bytes does not.
    """
    pruned = mask.view(torch.int8)
    if times == 1:
        return pruned, -1
    if times in INTEGERS:
        wide = pruned.neg().to(INTEGERS[times], memory_format=torch.contiguous_format)
        return wide.view(torch.int8), 1
    return pruned.unsqueeze(-1).expand(*pruned.shape, times).flatten(-2), -1
