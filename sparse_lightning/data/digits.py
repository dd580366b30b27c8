"""Digits: scikit-learn's handwritten digits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from sparse_lightning.data.loaders import TwoSets
from sparse_lightning.data.missing import optional

SPLIT_SEED = 1797
"""Seed of the shuffle before the split: all runs validate on the same images."""


class Digits(TwoSets):
    """The 1797 handwritten digits that come with scikit-learn: images `(1, 8, 8)` of ten classes.

    Pixels have mean 0 and variance 1 over the training set, which is four fifths of the images.

    Args:
        batch_size: images in a batch.
        num_workers: processes that load data.

    Example:
        >>> images, labels = next(iter(Digits(batch_size=32).train_dataloader()))
        >>> images.shape, labels.shape
        (torch.Size([32, 1, 8, 8]), torch.Size([32]))
    """

    def __init__(self, batch_size: int = 64, num_workers: int = 0) -> None:
        super().__init__(batch_size, num_workers)

    def sets(self) -> tuple[TensorDataset, TensorDataset]:
        """Return the training set and the validation set."""
        images, labels = _images_and_labels()
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT_SEED))
        train, val = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
        images = (images - images[train].mean()) / images[train].std()
        return TensorDataset(images[train], labels[train]), TensorDataset(images[val], labels[val])


def _images_and_labels() -> tuple[Tensor, Tensor]:
    found = optional("sklearn.datasets", "scikit-learn").load_digits()
    return torch.tensor(found.images, dtype=torch.float32).unsqueeze(1), torch.tensor(found.target)
