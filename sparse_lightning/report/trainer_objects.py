"""The Sparsifiers, TensorBoard loggers and metrics of a Trainer."""

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


def logged_metrics(trainer: L.Trainer) -> dict[str, float]:
    """Return the last logged metrics, without those of a SparsityCallback."""
    logged = trainer.callback_metrics.items()
    return {name: float(value) for name, value in logged if not name.startswith(("sparsity/", "sparsity_"))}
