"""Averages of the weights that other callbacks keep: they must be masked too, since masks change between averages."""

from __future__ import annotations

from collections.abc import Iterator

import lightning as L
from torch import nn
from torch.optim.swa_utils import AveragedModel


def averages(trainer: L.Trainer, model: nn.Module) -> Iterator[nn.Module]:
    """Yield the copies of the model that the callbacks of a trainer keep, such as those of SWA and EMA."""
    names = {name for name, _ in model.named_parameters()}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for held in vars(callback).values():
            copy = held.module if isinstance(held, AveragedModel) else held
            if isinstance(copy, nn.Module) and copy is not model and names == {n for n, _ in copy.named_parameters()}:
                yield copy
