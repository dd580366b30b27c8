"""block_sparsity: the share of weights that lie in blocks that are wholly zero."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from sparse_lightning.errors import LayoutError
from sparse_lightning.metrics.functional.share import share
from sparse_lightning.scope import SparseScope
from sparse_lightning.sparse_block import SparseBlock

Blocks: TypeAlias = SparseScope | SparseBlock | Iterable[SparseScope | SparseBlock]
"""Whose weights are counted: a scope, a block, or several of them."""


def block_sparsity(blocks: Blocks) -> Tensor:
    """The share of weights that lie in blocks that are wholly zero, counted from the weights: an fp32 scalar.

    A block counts when all of its weights are exactly zero, in all parameters that it is coupled over; a NaN is
    not zero. Blocks weigh by their size. The sparsity of nothing is 0. What is given twice counts twice.

    Args:
        blocks: a scope, a block, or an iterable of them.

    Example:
        >>> from sparse_lightning import BlockSpec
        >>> block_sparsity(BlockSpec(torch.tensor([[0.0, 0.0, 0.0, 4.0, 0.0]]), (1, 2), edge="partial"))
        tensor(0.6000)
    """
    return _block_sparsity_compute(*_block_sparsity_update(blocks))


def _block_sparsity_update(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Weights in zero blocks, and all weights."""
    zero = total = torch.zeros((), dtype=torch.int64)
    for block in _each_block(blocks):
        found = block.zeros()
        zero = zero.to(found.device) + found
        total = total.to(found.device) + block.numel()
    return zero, total


def _block_sparsity_compute(zero: Tensor, total: Tensor) -> Tensor:
    return share(zero, total)


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
            f"the sparsity of a {type(blocks).__name__}: give a scope, a block, or several of them; of a mapping its "
            "values()"
        )
