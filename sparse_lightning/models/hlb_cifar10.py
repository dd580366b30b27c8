"""HlbCifar10: the network of the hlb-CIFAR10 speed run, in channels_last."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn.functional import gelu
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from sparse_lightning.blocks.shards import held, local_like
from sparse_lightning.models.classifier import Classifier, OptimizerFactory
from sparse_lightning.models.whitening import whitening_filters

PEAK, FIRST, LAST = 0.23, 0.2, 0.05
"""The learning rate rises until this fraction of the run; its start and end, as fractions of the peak."""
HEAD_NORM = 5.0
"""The initial norm of the weights of each class."""
TEMPERATURE = 1 / 9
"""The logits are scaled by this, which stabilizes the first steps."""


class Group(nn.Module):
    """A convolution that halves the image, then a residual pair of convolutions; each with norm and GELU.

    Only `conv3` reads the channels between `conv2` and `conv3`: a filter of `conv2` can be pruned with its norm and
    with the inputs of `conv3`.

    Args:
        inputs: channels in.
        outputs: channels out.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv(inputs, outputs), _norm(outputs)
        self.conv2, self.norm2 = _conv(outputs, outputs), _norm(outputs)
        self.conv3, self.norm3 = _conv(outputs, outputs), _norm(outputs)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, inputs, height, width)` → `(batch, outputs, height // 2, width // 2)`."""
        x = gelu(self.norm1(self.pool(self.conv1(x))))
        inner = gelu(self.norm2(self.conv2(x)))
        return x + gelu(self.norm3(self.conv3(inner)))


def _conv(inputs: int, outputs: int) -> nn.Conv2d:
    """Return a convolution whose first filters are the identity, so that deep layers see images from the first step."""
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    nn.init.dirac_(conv.weight.data[:inputs])
    return conv


def _norm(channels: int) -> nn.BatchNorm2d:
    """Return a norm with fast running statistics: the run is short."""
    return nn.BatchNorm2d(channels, momentum=0.8)


class HlbCifar10(Classifier):
    """A whitening convolution, three groups with residuals, a global max pool and a linear layer.

    Written from the description of https://github.com/tysam-code/hlb-CIFAR10. The first convolution decorrelates
    the 2×2 patches of the images and is not trained.

    Args:
        optimizer: builds the optimizer from the parameters.
        widths: channels of the three groups.
        stem: input channels of the first group.
        label_smoothing: the fraction of a target that is spread over all classes.

    Example:
        >>> HlbCifar10(widths=(8, 16, 32), stem=8)(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        optimizer: OptimizerFactory = SGD,
        widths: Sequence[int] = (64, 256, 512),
        stem: int = 32,
        label_smoothing: float = 0.2,
    ) -> None:
        super().__init__(optimizer, label_smoothing=label_smoothing)
        self.whiten = nn.Conv2d(3, 12, 2, bias=False).requires_grad_(False)
        self.project = nn.Conv2d(12, stem, 1, bias=False)
        pairs = zip((stem, *widths), widths, strict=False)
        self.groups = nn.Sequential(*(Group(inputs, outputs) for inputs, outputs in pairs))
        self.head = nn.Linear(widths[-1], 10, bias=False)
        self.head.weight.data.mul_(HEAD_NORM / self.head.weight.data.norm(dim=1, keepdim=True))
        self.to(memory_format=torch.channels_last)
        self.example_input_array = torch.zeros(1, 3, 32, 32, device="cpu")

    def forward(self, images: Tensor) -> Tensor:
        """Images `(batch, 3, 32, 32)` → logits `(batch, 10)`."""
        x = self.whiten(images.to(memory_format=torch.channels_last))
        x = self.groups(gelu(self.project(x)))
        logits: Tensor = self.head(x.amax((2, 3))) * TEMPERATURE
        return logits

    def on_train_batch_start(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Compute the whitening filters from the first batch of rank 0, once."""
        if self.global_step == 0 and batch_idx == 0:
            filters = self.trainer.strategy.broadcast(whitening_filters(batch[0]))
            held(self.whiten.weight).copy_(local_like(filters, self.whiten.weight))

    def shards(self) -> Iterable[nn.Module]:
        """Return the groups."""
        return self.groups

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer, and a learning rate that rises fast and falls slowly."""
        optimizer, steps = self.optimizer_factory(self.parameters()), self.trainer.estimated_stepping_batches
        scheduler = LambdaLR(optimizer, lambda step: triangle(step / steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def triangle(fraction: float) -> float:
    """Return the learning rate at a fraction of the run, relative to its peak.

    Example:
        >>> [round(triangle(fraction), 3) for fraction in (0.0, 0.115, 0.23, 1.0)]
        [0.2, 0.6, 1.0, 0.05]
    """
    if fraction < PEAK:
        return FIRST + (1 - FIRST) * fraction / PEAK
    return 1 - (1 - LAST) * (min(fraction, 1.0) - PEAK) / (1 - PEAK)
