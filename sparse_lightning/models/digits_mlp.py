"""DigitsMLP: a multilayer perceptron for the handwritten digits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from sparse_lightning.models.classifier import Classifier, OptimizerFactory


class DigitsMLP(Classifier):
    """Two hidden layers on the 64 pixels of a digit.

    Args:
        optimizer: builds the optimizer from the parameters.
        hidden: neurons in each hidden layer.

    Example:
        >>> DigitsMLP(hidden=32)(torch.randn(5, 1, 8, 8)).shape
        torch.Size([5, 10])
    """

    def __init__(self, optimizer: OptimizerFactory = AdamW, hidden: int = 256) -> None:
        super().__init__(optimizer)
        self.first, self.second, self.head = nn.Linear(64, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Images `(batch, 1, 8, 8)` → logits `(batch, 10)`."""
        x = torch.relu(self.first(images.flatten(1)))
        logits: Tensor = self.head(torch.relu(self.second(x)))
        return logits
