"""Weights that belong to several blocks, as where rows of one unit cross columns of another: each counts once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sparse_lightning.blocks.sparse_block import SparseBlock
from sparse_lightning.blocks.spec import BlockSpec
from sparse_lightning.layout.crossing import phases

Zeros = tuple[BlockSpec, Tensor]
"""A spec, and which of its blocks are zero."""


def count_zeros(blocks: Iterable[SparseBlock]) -> tuple[int, int]:
    """Return how many weights are in blocks that are entirely zero, and how many are in blocks; each counts once.

    A coupled block is zero if it is zero in all of its parameters. All ranks must call it.

    Example:
        >>> weight = torch.ones(4, 4)
        >>> weight[0], weight[:, 0] = 0, 0
        >>> count_zeros([BlockSpec(weight, (1, -1)), BlockSpec(weight, (-1, 1))])
        (7, 16)
    """
    return count_pruned((block, zero_grid(block)) for block in blocks)


def zero_grid(block: SparseBlock) -> Tensor:
    """Return a grid with True for each block that is entirely zero."""
    return block.norms(p=math.inf) == 0


def count_pruned(found: Iterable[tuple[SparseBlock, Tensor]]) -> tuple[int, int]:
    """Return how many weights are in the blocks that a grid marks, and how many in all blocks; each counts once.

    Weights are not read: parameters may be on the meta device.
    """
    counts = _counts(found).values()
    return sum(zero for zero, _ in counts), sum(total for _, total in counts)


def count_by_parameter(blocks: Iterable[SparseBlock]) -> dict[int, tuple[int, int]]:
    """Return the counts of `count_zeros` for each parameter, by its id."""
    return _counts((block, zero_grid(block)) for block in blocks)


def _counts(found: Iterable[tuple[SparseBlock, Tensor]]) -> dict[int, tuple[int, int]]:
    marked: dict[int, list[Zeros]] = {}
    for block, zero in found:
        for spec in block.blocks():
            marked.setdefault(id(spec.param), []).append((spec, block.grid_of(spec, zero)))
    return {key: _count(zeros) for key, zeros in marked.items()}


def crosses(specs: Iterable[BlockSpec]) -> bool:
    """Whether blocks of one parameter share weights."""
    return any(phases([spec.view.layout for spec in specs]))


def _count(found: Sequence[Zeros]) -> tuple[int, int]:
    return _count_together(found) if crosses(spec for spec, _ in found) else _count_apart(found)


def _count_apart(found: Sequence[Zeros]) -> tuple[int, int]:
    zero = sum(int(spec.sizes()[grid.cpu()].sum()) for spec, grid in found)
    return zero, sum(spec.view.numel() for spec, _ in found)


def _count_together(found: Sequence[Zeros]) -> tuple[int, int]:
    """Count by marks on the weights of the parameter, a byte for each."""
    param = found[0][0].param.detach()
    device = found[0][1].device if param.is_meta else param.device
    zero, total = (torch.ones_like(param, dtype=torch.uint8, device=device) for _ in range(2))
    for spec, grid in found:
        spec.apply_mask(grid, values=zero)
        spec.apply_mask(torch.ones_like(grid), values=total)
    return _marked(zero), _marked(total)


def _marked(marks: Tensor) -> int:
    count = (marks == 0).sum()
    return int(count.full_tensor() if isinstance(count, DTensor) else count)
