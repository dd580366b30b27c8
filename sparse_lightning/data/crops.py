"""Crops: random crops and horizontal flips of images."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset


class Crops(Dataset[tuple[Tensor, Tensor]]):
    """Images cropped at random from their padded version, and flipped with a probability of one half.

    Args:
        images: `(n, channels, height, width)`.
        labels: `(n,)`.
        padding: pixels on each side, the largest shift.

    Example:
        >>> image, label = Crops(torch.rand(4, 3, 32, 32), torch.arange(4))[2]
        >>> image.shape, label
        (torch.Size([3, 32, 32]), tensor(2))
    """

    def __init__(self, images: Tensor, labels: Tensor, padding: int = 2) -> None:
        self.images = images
        self.labels = labels
        self.padding = padding

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        image = self.images[i]
        down, right = (int(n) for n in torch.randint(2 * self.padding + 1, (2,)))
        wide = pad(image[None], (self.padding,) * 4, mode="reflect")[0]
        crop = wide[:, down : down + image.shape[1], right : right + image.shape[2]]
        return crop.flip(2) if torch.rand(()) < 0.5 else crop, self.labels[i]
