"""mask_overlap: how far two masks prune the same blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_lightning.metrics.functional.pairs import Masks, pairs
from sparse_lightning.metrics.functional.share import share


def mask_overlap(a: Masks, b: Masks) -> Tensor:
    """The blocks that both masks prune, as a share of those that either prunes: an fp32 scalar.

    This is the intersection over the union of the pruned sets, over all grids together. It is 1 where neither
    mask prunes anything.

    Args:
        a: a boolean grid, or a mapping from names to grids.
        b: a mask of the same grids.

    Example:
        >>> mask_overlap(torch.tensor([True, False, False, True]), torch.tensor([True, True, False, False]))
        tensor(0.3333)
    """
    return _mask_overlap_compute(*_mask_overlap_update(a, b))


def _mask_overlap_update(a: Masks, b: Masks) -> tuple[Tensor, Tensor]:
    """Blocks that both prune, and blocks that either prunes."""
    both = either = torch.zeros((), dtype=torch.int64)
    for left, right in pairs(a, b):
        both = both.to(left.device) + (left & right).sum()
        either = either.to(left.device) + (left | right).sum()
    return both, either


def _mask_overlap_compute(both: Tensor, either: Tensor) -> Tensor:
    return share(both, either, of_nothing=1.0)
