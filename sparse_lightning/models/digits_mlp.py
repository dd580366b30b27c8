"""DigitsMLP: a multilayer perceptron for small images, such as the handwritten digits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from sparse_lightning.models.classifier import Classifier, OptimizerFactory


class DigitsMLP(Classifier):
    """Two hidden layers on the pixels of an image.

    Args:
        optimizer: builds the optimizer from the parameters.
        hidden: neurons in each hidden layer.
        pixels: pixels of an image; the digits have 64.

    Example:
        >>> DigitsMLP(hidden=32)(torch.randn(5, 1, 8, 8)).shape
        torch.Size([5, 10])
    """

    def __init__(self, optimizer: OptimizerFactory = AdamW, hidden: int = 256, pixels: int = 64) -> None:
        super().__init__(optimizer)
        self.first, self.second, self.head = nn.Linear(pixels, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, 10)
        self.example_input_array = torch.zeros(1, pixels, device="cpu")

    def forward(self, images: Tensor) -> Tensor:
        """Images of `pixels` values each, such as `(batch, 1, 8, 8)` → logits `(batch, 10)`."""
        x = torch.relu(self.first(images.flatten(1)))
        logits: Tensor = self.head(torch.relu(self.second(x)))
        return logits
