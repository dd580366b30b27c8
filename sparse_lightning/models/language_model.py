"""LanguageModel: a network that foretells the next token, with its loss and its optimizer."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer

from sparse_lightning.models.classifier import OptimizerFactory
from sparse_lightning.models.sharding import Shardable


class LanguageModel(Shardable):
    """Trains `forward`, which subclasses give, to foretell each token of a batch `(batch, tokens)` from those before.

    Args:
        optimizer: makes the optimizer of the parameters.
    """

    metric: ClassVar[str] = "val_loss"
    """What tells how good the model is; lower is better."""

    def __init__(self, optimizer: OptimizerFactory = AdamW) -> None:
        super().__init__()
        self.optimizer_factory = optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The cross entropy of the next token."""
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """The cross entropy of the next token."""
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def _loss(self, tokens: Tensor) -> Tensor:
        return cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> Optimizer:
        """The optimizer that was asked for."""
        return self.optimizer_factory(self.parameters())
