"""GPT: a small decoder-only transformer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from sparse_lightning.models.classifier import OptimizerFactory
from sparse_lightning.models.language_model import LanguageModel
from sparse_lightning.models.sharding import TensorPlan, block_plan
from sparse_lightning.models.transformer import Block


class GPT(LanguageModel):
    """A pre-norm transformer with fused QKV projections, on bytes.

    Args:
        optimizer: builds the optimizer from the parameters.
        vocabulary: the number of tokens; 256 for bytes.
        context: the longest sequence, in tokens.
        width: features of a token.
        depth: transformer blocks.
        heads: attention heads of each block.

    Example:
        >>> GPT(width=32, depth=1)(torch.zeros(2, 7, dtype=torch.long)).shape
        torch.Size([2, 7, 256])
    """

    def __init__(
        self,
        optimizer: OptimizerFactory = AdamW,
        vocabulary: int = 256,
        context: int = 128,
        width: int = 128,
        depth: int = 3,
        heads: int = 8,
    ) -> None:
        super().__init__(optimizer)
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.example_input_array = torch.zeros(1, context, dtype=torch.int64, device="cpu")

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids `(batch, tokens)` → logits of the next ones `(batch, tokens, vocabulary)`."""
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits

    def shards(self) -> Iterable[nn.Module]:
        """Return the transformer blocks."""
        return self.blocks

    def tensor_plan(self, size: int) -> TensorPlan:
        """Return the plan of the transformer blocks; embeddings and head are replicated."""
        return block_plan("blocks.*")
