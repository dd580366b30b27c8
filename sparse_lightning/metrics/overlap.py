"""MaskOverlap: how much two masks prune the same blocks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparse_lightning.metrics.fraction import FractionMetric
from sparse_lightning.metrics.functional.overlap import _mask_overlap_compute, _mask_overlap_update
from sparse_lightning.metrics.functional.pairs import Masks


class MaskOverlap(FractionMetric):
    """The blocks that both masks prune, as a fraction of those that at least one prunes; see `mask_overlap`.

    Counts are summed over updates before the division, so large masks weigh more than small ones.

    Args:
        kwargs: arguments of `torchmetrics.Metric`, such as `dist_sync_on_step`.

    Example:
        >>> import torch
        >>> overlap = MaskOverlap()
        >>> overlap.update(torch.tensor([True, True, False]), torch.tensor([True, False, False]))
        >>> overlap.compute()
        tensor(0.5000)
    """

    pruned_by_both: Tensor
    pruned_by_either: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_count("pruned_by_both")
        self.add_count("pruned_by_either")

    def update(self, a: Masks, b: Masks) -> None:
        """Count the pruned blocks of two grids, or of two mappings from names to grids."""
        both, either = _mask_overlap_update(a, b)
        self.pruned_by_both += both.to(self.pruned_by_both.device)
        self.pruned_by_either += either.to(self.pruned_by_either.device)

    def compute(self) -> Tensor:
        """Return the fraction over all updates."""
        return _mask_overlap_compute(self.pruned_by_both, self.pruned_by_either)
