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
    counts = count_by_parameter(blocks).values()
    return sum(zero for zero, _ in counts), sum(total for _, total in counts)


def count_by_parameter(blocks: Iterable[SparseBlock]) -> dict[int, tuple[int, int]]:
    """Return the counts of `count_zeros` for each parameter, by its id."""
    found: dict[int, list[Zeros]] = {}
    for block in blocks:
        zero = block.norms(p=math.inf) == 0
        for spec in block.blocks():
            found.setdefault(id(spec.param), []).append((spec, block.grid_of(spec, zero)))
    return {key: _count(zeros) for key, zeros in found.items()}


def count_weights(blocks: Iterable[SparseBlock]) -> int:
    """Return how many weights are in blocks; each counts once."""
    found: dict[int, list[BlockSpec]] = {}
    for spec in [spec for block in blocks for spec in block.blocks()]:
        found.setdefault(id(spec.param), []).append(spec)
    return sum(_count([(s, torch.zeros(s.grid_shape, dtype=torch.bool)) for s in own])[1] for own in found.values())


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
    zero, total = torch.ones_like(param, dtype=torch.uint8), torch.ones_like(param, dtype=torch.uint8)
    for spec, grid in found:
        spec.apply_mask(grid, values=zero)
        spec.apply_mask(torch.ones_like(grid), values=total)
    return _marked(zero), _marked(total)


def _marked(marks: Tensor) -> int:
    count = (marks == 0).sum()
    return int(count.full_tensor() if isinstance(count, DTensor) else count)
