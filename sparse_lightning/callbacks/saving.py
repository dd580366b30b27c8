"""Saving a checkpoint where another one may be."""

from __future__ import annotations

import shutil
from pathlib import Path

import lightning as L


def save(trainer: L.Trainer, path: Path) -> None:
    """Write a checkpoint to a place of its own; all processes call it.

    What is there is removed: writing through a link would change the checkpoint behind it, and a folder of shards
    would keep those of another number of processes.

    Args:
        trainer: what is saved.
        path: where to; a file, or a folder where the strategy saves in shards.
    """
    if trainer.is_global_zero:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    trainer.strategy.barrier("sparse_lightning.save")
    trainer.save_checkpoint(path, weights_only=False)
