"""DigitsViT: a small vision transformer for the handwritten digits."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from sparse_lightning.models.classifier import Classifier, OptimizerFactory
from sparse_lightning.models.sharding import TensorPlan, block_plan
from sparse_lightning.models.transformer import Block

PATCH = 2
"""Pixels of a patch in each direction: 8×8 pixels are 16 patches."""


class DigitsViT(Classifier):
    """A transformer on the patches of a digit; the classifier reads the mean over all patches.

    Args:
        optimizer: builds the optimizer from the parameters.
        width: features of a token.
        depth: transformer blocks.
        heads: attention heads of each block.

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
        self.example_input_array = torch.zeros(1, 1, 8, 8, device="cpu")

    def forward(self, images: Tensor) -> Tensor:
        """Images `(batch, 1, 8, 8)` → logits `(batch, 10)`."""
        patches = images.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH).flatten(1, 3).flatten(2)
        x = self.blocks(self.embed(patches) + self.position)
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits

    def shards(self) -> Iterable[nn.Module]:
        """Return the transformer blocks."""
        return self.blocks

    def tensor_plan(self, size: int) -> TensorPlan:
        """Return the plan of the transformer blocks; embeddings and head are replicated."""
        return block_plan("blocks.*")
