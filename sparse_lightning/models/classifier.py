"""Classifier: the base class of classifiers: loss, accuracy and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar

from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer
from torchmetrics.classification import MulticlassAccuracy

from sparse_lightning.models.sharding import Shardable

OptimizerFactory = Callable[[Iterable[Parameter]], Optimizer]
"""Builds an optimizer from parameters: a class of torch.optim, or a partial of one."""


class Classifier(Shardable):
    """Train `forward`, which subclasses implement, to classify a batch `(inputs, labels)`.

    Args:
        optimizer: builds the optimizer from the parameters.
        classes: the number of classes.
        label_smoothing: the fraction of a target that is spread over all classes.
    """

    metric: ClassVar[str] = "val_accuracy"
    """The metric that a run returns; higher is better."""

    def __init__(self, optimizer: OptimizerFactory = AdamW, classes: int = 10, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.optimizer_factory = optimizer
        self.label_smoothing = label_smoothing
        self.accuracy = MulticlassAccuracy(classes, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the cross entropy."""
        inputs, labels = batch
        loss = cross_entropy(self(inputs), labels, label_smoothing=self.label_smoothing)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the cross entropy and the accuracy."""
        inputs, labels = batch
        logits = self(inputs)
        self.accuracy(logits, labels)
        self.log("val_loss", cross_entropy(logits, labels), sync_dist=True)
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer."""
        return self.optimizer_factory(self.parameters())
