"""What a Trainer has among its callbacks and loggers that a report is about."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger

from sparse_lightning.sparsifier import Sparsifier


def held(trainer: L.Trainer) -> list[Sparsifier]:
    """The Sparsifiers of a Trainer's callbacks, attached or not."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    found = [getattr(callback, "sparsifier", None) for callback in callbacks]
    return [sparsifier for sparsifier in found if isinstance(sparsifier, Sparsifier)]


def attached(trainer: L.Trainer) -> list[Sparsifier]:
    """The Sparsifiers that are attached to the model now."""
    return [sparsifier for sparsifier in held(trainer) if sparsifier.is_attached]


def tensorboards(trainer: L.Trainer) -> list[TensorBoardLogger]:
    """The TensorBoard loggers of a Trainer."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
