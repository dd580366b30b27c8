"""Classifier: a network that names classes, with its loss, its accuracy and its optimizer."""

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
"""Makes an optimizer of parameters: a class of torch.optim, or a partial of one."""


class Classifier(Shardable):
    """Trains `forward`, which subclasses give, to name the classes of a batch `(inputs, labels)`.

    Args:
        optimizer: makes the optimizer of the parameters.
        classes: how many there are.
        label_smoothing: the part of a target that is spread over all classes.
    """

    metric: ClassVar[str] = "val_accuracy"
    """What tells how good the model is; higher is better."""

    def __init__(self, optimizer: OptimizerFactory = AdamW, classes: int = 10, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.optimizer_factory = optimizer
        self.label_smoothing = label_smoothing
        self.accuracy = MulticlassAccuracy(classes, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The cross entropy."""
        images, labels = batch
        loss = cross_entropy(self(images), labels, label_smoothing=self.label_smoothing)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """The cross entropy and the accuracy."""
        images, labels = batch
        scores = self(images)
        self.accuracy(scores, labels)
        self.log("val_loss", cross_entropy(scores, labels), sync_dist=True)
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer that was asked for."""
        return self.optimizer_factory(self.parameters())
