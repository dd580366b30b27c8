"""Cifar10: the 32×32 images of CIFAR-10 from a local folder, or synthetic images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import TensorDataset

from sparse_lightning.data.crops import Crops
from sparse_lightning.data.loaders import TwoSets
from sparse_lightning.data.missing import MissingError, existing

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
"""Of the pixels of CIFAR-10, for each channel."""
RECORD = 1 + 3 * 32 * 32
"""Bytes of an image in the files: a label, then the pixels by channel, row and column."""


class Cifar10(TwoSets):
    """CIFAR-10: images `(3, 32, 32)` of ten classes; training images are shifted and mirrored at random.

    Reads the "binary version" from https://www.cs.toronto.edu/~kriz/cifar.html: `data_batch_1.bin` to
    `data_batch_5.bin` and `test_batch.bin`. The "python version" consists of pickles, which can run any code.

    Args:
        folder: the folder of the files, or the one that holds `cifar-10-batches-bin`; None uses synthetic images: a
            texture for each class with noise, the same in each run.
        batch_size: images in a batch.
        made: the number of synthetic training images.
        num_workers: processes that load data.

    Example:
        >>> images, labels = next(iter(Cifar10(batch_size=8, made=64).train_dataloader()))
        >>> images.shape, labels.shape
        (torch.Size([8, 3, 32, 32]), torch.Size([8]))
    """

    def __init__(self, folder: str | None = None, batch_size: int = 64, made: int = 2048, num_workers: int = 0) -> None:
        super().__init__(batch_size, num_workers)
        self.folder = None if folder is None else _folder_of_files(folder)
        self.made = made

    def sets(self) -> tuple[Crops, TensorDataset]:
        """Return the training set and the validation set, which is the test set of CIFAR-10."""
        if self.folder is None:
            rank_zero_info("data.folder is not set: using synthetic images instead of CIFAR-10")
            train, val = synthetic(self.made, seed=1), synthetic(max(256, self.made // 8), seed=2)
        else:
            train = read_files([self.folder / f"data_batch_{i}.bin" for i in range(1, 6)])
            val = read_files([self.folder / "test_batch.bin"])
        return Crops(*_normalised(*train)), TensorDataset(*_normalised(*val))


def _folder_of_files(folder: str) -> Path:
    given = existing(folder, "data.folder", "the folder of CIFAR-10's data_batch_1.bin")
    for found in (given, given / "cifar-10-batches-bin"):
        if (found / "data_batch_1.bin").is_file():
            return found
    raise MissingError(
        f"data.folder={folder} has no data_batch_1.bin: CIFAR-10 is read from its binary version "
        "(cifar-10-binary.tar.gz, unpacked), not from pickles"
    )


def read_files(paths: list[Path]) -> tuple[Tensor, Tensor]:
    """Return images as bytes, `(n, 3, 32, 32)`, and labels, from files of CIFAR-10's binary version."""
    records = []
    for path in paths:
        flat = np.fromfile(existing(path, "data.folder", "all files of CIFAR-10's binary version"), np.uint8)
        if not flat.size or flat.size % RECORD:
            raise MissingError(
                f"{path} of {flat.size} bytes is not a file of CIFAR-10, whose records have {RECORD} bytes each: "
                "download it again"
            )
        records.append(torch.from_numpy(flat).view(-1, RECORD))
    table = torch.cat(records)
    return table[:, 1:].reshape(-1, 3, 32, 32), table[:, 0].long()


def synthetic(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images as bytes, `(n, 3, 32, 32)`, and labels: a smooth texture for each class, with noise."""
    textures = torch.rand(10, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    textures = torch.nn.functional.interpolate(textures, size=(32, 32), mode="bilinear")
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (n,), generator=generator)
    images = textures[labels] + 0.3 * torch.randn(n, 3, 32, 32, generator=generator)
    return (images.clamp(0, 1) * 255).to(torch.uint8), labels


def _normalised(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (images.float() / 255 - mean) / std, labels
