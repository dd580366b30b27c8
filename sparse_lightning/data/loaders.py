"""TwoSets: the base class of the data modules: a training set, a validation set, and their loaders."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, cast

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

from sparse_lightning.data.resumable import ResumableLoader, Shuffled, epoch_seed
from sparse_lightning.errors import ConfigError


class TwoSets(L.LightningDataModule):
    """A data module of two data sets.

    Subclasses implement `sets`. The order of the training set depends on the seed of the run and on the epoch only, and
    a run that is resumed within an epoch continues with the batches that it had left.

    Args:
        batch_size: examples in a batch.
        num_workers: processes that load data; 0 loads in the main process, which is fastest for small data.
    """

    def __init__(self, batch_size: int, num_workers: int = 0) -> None:
        super().__init__()
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size} is out of range: pass 1 or more examples")
        if num_workers < 0:
            raise ConfigError(f"num_workers={num_workers} is out of range: pass 0 or more processes")
        self.batch_size = batch_size
        self.num_workers = num_workers
        self._sets: tuple[Dataset[Any], Dataset[Any]] | None = None

    def sets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        """Return the training set and the validation set."""
        raise NotImplementedError

    def setup(self, stage: str | None = None) -> None:
        """Read the data, once."""
        if self._sets is None:
            self._sets = self.sets()

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the loader of the training set: shuffled, without a smaller last batch."""
        return self._loader(0, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return the loader of the validation set, in order."""
        return self._loader(1)

    def test_dataloader(self) -> DataLoader[Any]:
        """Return the loader of the validation set: there is no test set."""
        return self._loader(1)

    def _loader(self, which: int, shuffle: bool = False) -> DataLoader[Any]:
        self.setup()
        assert self._sets is not None
        found, seed = self._sets[which], torch.initial_seed()
        # Passed by name: with several processes Lightning builds the loader again, with arguments of its own.
        options: dict[str, Any] = {"batch_size": self.batch_size, "num_workers": self.num_workers}
        if shuffle:
            options |= {"sampler": Shuffled(cast(Sized, found), seed), "drop_last": True}
        workers = seed if shuffle else epoch_seed(seed, 0)  # not those of the training set
        return ResumableLoader(found, seed=workers, generator=torch.Generator(), **options)
