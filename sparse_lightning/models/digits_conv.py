"""DigitsConv: a convolutional network in channels_last for small grey images, such as the handwritten digits."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from sparse_lightning.models.classifier import Classifier, OptimizerFactory


class ConvStage(nn.Module):
    """Two convolutions with norms and a residual connection.

    Only `conv2` reads the channels between the two: a filter of `conv1` can be pruned with its norm and with the
    inputs of `conv2`.

    Args:
        width: channels in and out.
        hidden: channels between the convolutions.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, hidden, 3, padding=1, bias=False), nn.BatchNorm2d(hidden)
        self.conv2, self.norm2 = nn.Conv2d(hidden, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, width, height, width)` → the same."""
        inner = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(x + self.norm2(self.conv2(inner)))


class DigitsConv(Classifier):
    """A stem and stages of two convolutions, all weights in channels_last.

    Args:
        optimizer: builds the optimizer from the parameters.
        width: channels between stages.
        hidden: channels inside a stage.
        depth: stages; each but the last halves the image.

    Example:
        >>> DigitsConv(width=8, hidden=16)(torch.randn(5, 1, 8, 8)).shape
        torch.Size([5, 10])
    """

    def __init__(self, optimizer: OptimizerFactory = AdamW, width: int = 32, hidden: int = 64, depth: int = 3) -> None:
        super().__init__(optimizer)
        self.stem, self.norm = nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.stages = nn.ModuleList(ConvStage(width, hidden) for _ in range(depth))
        self.pool, self.head = nn.MaxPool2d(2), nn.Linear(width, 10)
        self.to(memory_format=torch.channels_last)
        self.example_input_array = torch.zeros(1, 1, 8, 8, device="cpu")

    def forward(self, images: Tensor) -> Tensor:
        """Images such as `(batch, 1, 8, 8)` → logits `(batch, 10)`."""
        x = torch.relu(self.norm(self.stem(images.to(memory_format=torch.channels_last))))
        for i, stage in enumerate(self.stages):
            x = stage(self.pool(x) if i else x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits

    def shards(self) -> Iterable[nn.Module]:
        """Return the stages."""
        return self.stages
