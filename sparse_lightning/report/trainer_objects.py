"""The Sparsifiers and TensorBoard loggers of a Trainer."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger

from sparse_lightning.engine.sparsifier import Sparsifier


def sparsifiers_of(trainer: L.Trainer) -> list[Sparsifier]:
    """Return the Sparsifiers of a Trainer's callbacks, attached or not."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    found = [getattr(callback, "sparsifier", None) for callback in callbacks]
    return [sparsifier for sparsifier in found if isinstance(sparsifier, Sparsifier)]


def attached_sparsifiers(trainer: L.Trainer) -> list[Sparsifier]:
    """Return the Sparsifiers that are attached to the model."""
    return [sparsifier for sparsifier in sparsifiers_of(trainer) if sparsifier.is_attached]


def tensorboard_loggers(trainer: L.Trainer) -> list[TensorBoardLogger]:
    """Return the TensorBoard loggers of a Trainer."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
