"""MaskChurn: the fraction of mask entries that changed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparse_lightning.metrics.fraction import FractionMetric
from sparse_lightning.metrics.functional.churn import _mask_churn_compute, _mask_churn_update
from sparse_lightning.metrics.functional.pairs import Masks


class MaskChurn(FractionMetric):
    """The fraction of mask entries that changed, in either direction; see `mask_churn`.

    Args:
        kwargs: arguments of `torchmetrics.Metric`, such as `dist_sync_on_step`.

    Example:
        >>> import torch
        >>> churn = MaskChurn()
        >>> churn.update({"fc": torch.tensor([True, False])}, {"fc": torch.tensor([True, True])})
        >>> churn.compute()
        tensor(0.5000)
    """

    changed_entries: Tensor
    all_entries: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_count("changed_entries")
        self.add_count("all_entries")

    def update(self, before: Masks, after: Masks) -> None:
        """Count the entries that differ between two grids, or between two mappings from names to grids."""
        changed, entries = _mask_churn_update(before, after)
        self.changed_entries += changed.to(self.changed_entries.device)
        self.all_entries += entries.to(self.all_entries.device)

    def compute(self) -> Tensor:
        """Return the fraction over all updates."""
        return _mask_churn_compute(self.changed_entries, self.all_entries)
