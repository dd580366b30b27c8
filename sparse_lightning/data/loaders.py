"""TwoSets: what all data modules here share: a set to train on, a set to validate on, and their loaders."""

from __future__ import annotations

from typing import Any

import lightning as L
from torch.utils.data import DataLoader, Dataset


class TwoSets(L.LightningDataModule):
    """A data module that is made of two data sets.

    Subclasses give `sets`. The training set is shuffled by torch's global generator, so it comes in the same order
    wherever the run has the same seed.

    Args:
        batch_size: examples in a batch.
        num_workers: processes that load data; 0 loads in the main process, which is best for small data.
    """

    def __init__(self, batch_size: int, num_workers: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_workers = num_workers
        self._sets: tuple[Dataset[Any], Dataset[Any]] | None = None

    def sets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        """The training set and the validation set."""
        raise NotImplementedError

    def setup(self, stage: str | None = None) -> None:
        """Read the data, once."""
        if self._sets is None:
            self._sets = self.sets()

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled, without a last batch that is smaller."""
        return self._loader(0, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """In order."""
        return self._loader(1)

    def test_dataloader(self) -> DataLoader[Any]:
        """The validation set again: there is no third."""
        return self._loader(1)

    def _loader(self, which: int, shuffle: bool = False) -> DataLoader[Any]:
        self.setup()
        assert self._sets is not None
        found = self._sets[which]
        # With names for all of them: for several processes Lightning makes the loader once more, with names of its own.
        options: dict[str, Any] = {"batch_size": self.batch_size, "num_workers": self.num_workers}
        return DataLoader(found, shuffle=shuffle, drop_last=shuffle, **options)
