"""mask_churn: the fraction of mask entries that changed."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_lightning.metrics.functional.fraction import fraction
from sparse_lightning.metrics.functional.pairs import Masks, pairs


def mask_churn(before: Masks, after: Masks) -> Tensor:
    """Return the fraction of mask entries that changed, in either direction, as an fp32 scalar.

    All entries of all grids have the same weight. The churn of empty masks is 0.

    Args:
        before: a boolean grid, or a mapping from names to grids.
        after: the same grids at a later time.

    Example:
        >>> mask_churn(torch.tensor([True, False, False, True]), torch.tensor([True, True, False, False]))
        tensor(0.5000)
    """
    return _mask_churn_compute(*_mask_churn_update(before, after))


def _mask_churn_update(before: Masks, after: Masks) -> tuple[Tensor, Tensor]:
    """Return the number of changed entries and of all entries."""
    changed = torch.zeros((), dtype=torch.int64)
    found = pairs(before, after)
    for old, new in found:
        changed = changed.to(old.device) + (old ^ new).sum()
    return changed, changed.new_tensor(sum(old.numel() for old, _ in found))


def _mask_churn_compute(changed: Tensor, entries: Tensor) -> Tensor:
    return fraction(changed, entries)
