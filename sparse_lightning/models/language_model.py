"""LanguageModel: the base class of causal language models: loss and optimizer."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer

from sparse_lightning.models.classifier import OptimizerFactory
from sparse_lightning.models.sharding import Shardable


class LanguageModel(Shardable):
    """Train `forward`, which subclasses implement, to predict each token of a batch `(batch, tokens)`.

    Args:
        optimizer: builds the optimizer from the parameters.
    """

    metric: ClassVar[str] = "val_loss"
    """The metric that a run returns; lower is better."""

    def __init__(self, optimizer: OptimizerFactory = AdamW) -> None:
        super().__init__()
        self.optimizer_factory = optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the cross entropy of the next token."""
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the cross entropy of the next token."""
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def loss(self, tokens: Tensor) -> Tensor:
        """Token ids `(batch, tokens)` → the mean cross entropy of all but the first."""
        return cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> Optimizer:
        """Return the optimizer."""
        return self.optimizer_factory(self.parameters())
