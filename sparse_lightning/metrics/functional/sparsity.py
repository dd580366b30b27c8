"""block_sparsity: the fraction of weights in blocks that are entirely zero."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from sparse_lightning.blocks.scope import SparseScope
from sparse_lightning.blocks.sparse_block import SparseBlock
from sparse_lightning.blocks.union import count_zeros
from sparse_lightning.errors import LayoutError
from sparse_lightning.metrics.functional.fraction import fraction

ScopesOrBlocks: TypeAlias = SparseScope | SparseBlock | Iterable[SparseScope | SparseBlock]
"""A scope, a block, or several of them."""


def block_sparsity(blocks: ScopesOrBlocks) -> Tensor:
    """Return the fraction of weights in blocks that are entirely zero (1 − density), as an fp32 scalar.

    A block counts if all of its weights are exactly zero, in all parameters that it couples; NaN is not zero. Blocks
    are weighted by their size; a weight in several of them counts once. The sparsity of no blocks is 0.

    Args:
        blocks: a scope, a block, or an iterable of them.

    Example:
        >>> from sparse_lightning import BlockSpec
        >>> block_sparsity(BlockSpec(torch.tensor([[0.0, 0.0, 0.0, 4.0, 0.0]]), (1, 2), edge="partial"))
        tensor(0.6000)
    """
    return _block_sparsity_compute(*_block_sparsity_update(blocks))


def _block_sparsity_update(blocks: ScopesOrBlocks) -> tuple[Tensor, Tensor]:
    """Return the number of weights in zero blocks and of all weights."""
    listed = list(_each_block(blocks))
    device = listed[0].blocks()[0].param.device if listed else None
    zero, total = (torch.tensor(n, dtype=torch.int64, device=device) for n in count_zeros(listed))
    return zero, total


def _block_sparsity_compute(zero: Tensor, total: Tensor) -> Tensor:
    return fraction(zero, total)


def _each_block(blocks: object) -> Iterator[SparseBlock]:
    if isinstance(blocks, SparseScope):
        yield from blocks.blocks()
    elif isinstance(blocks, SparseBlock):
        yield blocks
    elif isinstance(blocks, Iterable) and not isinstance(blocks, Tensor | str):
        for one in blocks:
            yield from _each_block(one)
    else:
        raise LayoutError(
            f"cannot compute the sparsity of a {type(blocks).__name__}: pass a scope, a block, or several of them; for "
            "a mapping, pass its values()"
        )
