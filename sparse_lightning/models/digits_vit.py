"""DigitsViT: a small vision transformer for the handwritten digits."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from sparse_lightning.models.classifier import Classifier, OptimizerFactory
from sparse_lightning.models.sharding import Plan, block_plan
from sparse_lightning.models.transformer import Block

PATCH = 2
"""Pixels of a patch in each direction: 8×8 pixels are 16 patches."""


class DigitsViT(Classifier):
    """A transformer on the patches of a digit; the class is read from the mean of all patches.

    Args:
        optimizer: makes the optimizer of the parameters.
        width: of the tokens.
        depth: transformer blocks.
        heads: of each attention.

    Example:
        >>> DigitsViT(width=32, depth=1)(torch.randn(5, 1, 8, 8)).shape
        torch.Size([5, 10])
    """

    def __init__(self, optimizer: OptimizerFactory = AdamW, width: int = 64, depth: int = 3, heads: int = 4) -> None:
        super().__init__(optimizer)
        self.embed = nn.Linear(PATCH * PATCH, width)
        self.position = nn.Parameter(0.02 * torch.randn(64 // PATCH**2, width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Images `(batch, 1, 8, 8)` → scores `(batch, 10)`."""
        patches = images.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH).flatten(1, 3).flatten(2)
        x = self.blocks(self.embed(patches) + self.position)
        scores: Tensor = self.head(self.norm(x).mean(1))
        return scores

    def shards(self) -> Iterable[nn.Module]:
        """The transformer blocks."""
        return self.blocks

    def tensor_plan(self, size: int) -> Plan:
        """That of the transformer blocks; embeddings and head stay whole."""
        return block_plan("blocks.*")
