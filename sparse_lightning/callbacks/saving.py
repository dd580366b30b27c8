"""Save a checkpoint where another one may exist."""

from __future__ import annotations

import shutil
from pathlib import Path

import lightning as L


def save(trainer: L.Trainer, path: Path) -> None:
    """Write a checkpoint and replace what exists at its path; call it on all ranks.

    An existing file or folder is removed first: writing through a symbolic link would change the checkpoint behind
    it, and a folder would keep shards of another number of processes.

    Args:
        trainer: the trainer to save.
        path: a file, or a folder where the strategy saves shards.
    """
    if trainer.is_global_zero:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    trainer.strategy.barrier("sparse_lightning.save")
    trainer.save_checkpoint(path, weights_only=False)
