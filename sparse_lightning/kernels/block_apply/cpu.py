"""block_apply for CPUs: a fill in integer arithmetic on the bits of the weights.

`x & 0` and `x − x·1` are zero for any bits x, so the weight becomes +0.0 whatever it was. Both run at the speed
of memory, where `masked_fill_` takes several times as long; they write what stays as it was, too, so a few blocks
among many are written one by one instead. They want an operand in the order of memory: where
blocks are short along the fastest dimension, the mask is first widened to its elements, chunk by chunk, in the
cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from sparse_lightning.chunk import chunks
from sparse_lightning.kernels.block_apply.reference import spread

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

LONG = 16
"""From this many elements on, a run of one block is long enough to broadcast one mask value over it."""


FEW = 16
"""Where not one block in this many is filled, each is written by its index, and the others are not touched."""


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
    rows = bits.flatten(-2)  # neighbouring blocks count on along the fastest dimension: this is a view
    for piece in chunks((*mask.shape[:-1], rows.shape[-1]), mask.device):
        *outer, last = piece
        low, high, _ = last.indices(rows.shape[-1])
        first, end = low // length, -(-high // length)
        pruned, sign = _repeat(mask[(*outer, slice(first, end))], length)
        pruned = pruned[..., low - first * length : high - first * length].to(bits.dtype)
        part = rows[(*_blocks(tuple(outer)), last)]
        part.addcmul_(part, spread(pruned).squeeze(-1), value=sign)


def is_long(window: Tensor) -> bool:
    """Whether one mask value covers enough of the memory in a row."""
    return window.ndim == 0 or window.shape[-1] >= LONG


def filler(window: Tensor, mask: Tensor) -> Callable[[], None]:
    """`fill_` on a window of long runs, to be repeated: what follows from the mask is worked out once."""
    pairs = list(_operands(window.view(INTEGERS[window.element_size()]), mask))

    def fill() -> None:
        for part, keep in pairs:
            part.bitwise_and_(keep)

    return fill


def _operands(bits: Tensor, mask: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of a window, and what they are to be ANDed with."""
    for piece in chunks(mask.shape, mask.device):
        keep = torch.sub(mask[piece].view(torch.int8), 1)  # True → 0, False → −1: all bits set
        yield bits[_blocks(piece)], spread(keep.to(bits.dtype))


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
