"""Averages of the weights that others keep: they must be masked too, since masks change between averages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn
from torch.optim.swa_utils import AveragedModel


def copies(trainer: L.Trainer, model: nn.Module) -> Iterator[nn.Module]:
    """Yield the copies of the model that the callbacks of a trainer keep, such as those of SWA and EMA."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        yield from _copies_of(callback, model)


def averages(trainer: L.Trainer, model: nn.Module) -> Iterator[nn.Module]:
    """Yield those copies that are averages for certain: others may be what somebody keeps of the best epoch."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        inside = {id(average.module) for average in _averaged_models(callback)}
        for copy in _copies_of(callback, model):
            if id(copy) in inside or isinstance(callback, StochasticWeightAveraging):
                yield copy


def keeper_of_averages(trainer: L.Trainer, model: nn.Module) -> str | None:
    """Return the class of a callback that keeps a copy of the model, or of the module that has an `AveragedModel`."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if [*_averaged_models(callback), *_copies_of(callback, model)]:
            return type(callback).__name__
    return next((type(module).__name__ for module in model.modules() if any(_averaged_models(module))), None)


def _copies_of(callback: L.Callback, model: nn.Module) -> Iterator[nn.Module]:
    names = {name for name, _ in model.named_parameters()}
    for held in vars(callback).values():
        copy = held.module if isinstance(held, AveragedModel) else held
        if isinstance(copy, nn.Module) and copy is not model and names == {n for n, _ in copy.named_parameters()}:
            yield copy


def _averaged_models(holder: object) -> Iterator[AveragedModel]:
    """Yield what a callback or a module holds in its attributes, and in lists and dicts there, as submodules are."""
    for held in vars(holder).values():
        inside: Any = held.values() if isinstance(held, dict) else held if isinstance(held, list | tuple) else [held]
        yield from (each for each in inside if isinstance(each, AveragedModel))
