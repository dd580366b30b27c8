"""mask_overlap: how much two masks prune the same blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_lightning.metrics.functional.fraction import fraction
from sparse_lightning.metrics.functional.pairs import Masks, pairs


def mask_overlap(a: Masks, b: Masks) -> Tensor:
    """Return the intersection over union (Jaccard index) of the pruned blocks, as an fp32 scalar.

    The blocks of all grids are counted together. The overlap is 1 if neither mask prunes anything.

    Args:
        a: a boolean grid, or a mapping from names to grids.
        b: a mask of the same grids.

    Example:
        >>> mask_overlap(torch.tensor([True, False, False, True]), torch.tensor([True, True, False, False]))
        tensor(0.3333)
    """
    return _mask_overlap_compute(*_mask_overlap_update(a, b))


def _mask_overlap_update(a: Masks, b: Masks) -> tuple[Tensor, Tensor]:
    """Return the number of blocks that both prune, and of blocks that at least one prunes."""
    both = either = torch.zeros((), dtype=torch.int64)
    for left, right in pairs(a, b):
        both = both.to(left.device) + (left & right).sum()
        either = either.to(left.device) + (left | right).sum()
    return both, either


def _mask_overlap_compute(both: Tensor, either: Tensor) -> Tensor:
    return fraction(both, either, if_empty=1.0)
