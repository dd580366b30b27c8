"""BlockSparsity: the fraction of weights in blocks that are entirely zero."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparse_lightning.metrics.fraction import FractionMetric
from sparse_lightning.metrics.functional.sparsity import ScopesOrBlocks, _block_sparsity_compute, _block_sparsity_update


class BlockSparsity(FractionMetric):
    """The fraction of weights in blocks that are entirely zero (1 − density), counted from the weights.

    See `block_sparsity` for what is counted. Weights are read by `update`, and not kept.

    Args:
        kwargs: arguments of `torchmetrics.Metric`, such as `dist_sync_on_step`.

    Example:
        >>> import torch
        >>> from sparse_lightning import BlockSpec
        >>> tiles = BlockSpec(torch.nn.Parameter(torch.ones(4, 4)), (2, 2))
        >>> tiles.apply_mask(torch.tensor([[True, False], [False, False]]))
        >>> sparsity = BlockSparsity()
        >>> sparsity.update(tiles)
        >>> sparsity.compute()
        tensor(0.2500)
    """

    zero_weights: Tensor
    all_weights: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_count("zero_weights")
        self.add_count("all_weights")

    def update(self, blocks: ScopesOrBlocks) -> None:
        """Count the weights of a scope, a block, or several of them."""
        zero, total = _block_sparsity_update(blocks)
        self.zero_weights += zero.to(self.zero_weights.device)
        self.all_weights += total.to(self.all_weights.device)

    def compute(self) -> Tensor:
        """Return the fraction over all updates."""
        return _block_sparsity_compute(self.zero_weights, self.all_weights)
