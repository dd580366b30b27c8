"""A loader that continues within an epoch: its order depends on the seed and the epoch only."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader, Dataset, Sampler


class Shuffled(Sampler[int]):
    """All indices of a data set, in another order in each epoch.

    Lightning tells a sampler the epoch, and in several processes replaces it by one that does the same.

    Args:
        data: what is indexed.
        seed: of the orders.

    Example:
        >>> order = Shuffled(range(5), seed=0)
        >>> first = list(order)
        >>> order.set_epoch(1)
        >>> sorted(first) == sorted(order), first == list(order)
        (True, False)
    """

    def __init__(self, data: Sized, seed: int) -> None:
        self._data, self._seed, self.epoch = data, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[int]:
        made = torch.Generator().manual_seed(epoch_seed(self._seed, self.epoch))
        yield from torch.randperm(len(self), generator=made).tolist()


def epoch_seed(seed: int, epoch: int) -> int:
    """Return the seed of an epoch: the epochs of one seed are not those of the next."""
    return int(torch.randint(1 << 62, (epoch + 1,), generator=torch.Generator().manual_seed(seed))[-1])


class ResumableLoader(DataLoader[Any]):
    """A DataLoader whose state is the epoch, and the number of its batches that were given.

    After `load_state_dict` the iteration of that epoch starts behind these batches: they are read, and dropped. Global
    random numbers are left as they are. An iteration begins with its first batch, when the sampler knows the epoch.

    Args:
        dataset: what is loaded.
        seed: of the random numbers of workers, which depend on the epoch, too.
        kwargs: all other arguments of a DataLoader.
    """

    _given: int = 0
    _loaded: dict[str, int] | None = None

    def __init__(self, dataset: Dataset[Any], seed: int = 0, **kwargs: Any) -> None:
        super().__init__(dataset, **kwargs)
        self.seed = seed  # by its name Lightning finds it, to build the loader again for several processes

    @property
    def _epoch(self) -> int:
        return int(getattr(self.sampler, "epoch", 0))

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        loaded, self._loaded = self._loaded, None
        if self.generator is not None:
            self.generator.manual_seed(epoch_seed(self.seed, self._epoch))
        batches = super().__iter__()
        self._given = loaded["batches"] if loaded is not None and loaded["epoch"] == self._epoch else 0
        if self._given:
            with isolate_rng():
                for _ in range(self._given):
                    next(batches, None)
        for batch in batches:
            self._given += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and how many of its batches were given."""
        return self._loaded or {"epoch": self._epoch, "batches": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue behind the batches of a state."""
        self._loaded = dict(state)
