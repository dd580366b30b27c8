"""Save checkpoints whole: they are written beside their place, and moved there when they are complete."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.plugins.io import TorchCheckpointIO


class WholeFiles(TorchCheckpointIO):
    """Writes a checkpoint to a file beside its place, and moves it there: a kill or a full disk leaves the old one.

    Lightning's own writes to the folder of temporary files, which is often on another disk, so that the move is a copy.

    Example:
        >>> trainer = L.Trainer(plugins=[WholeFiles()], logger=False, accelerator="cpu")
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint; what is at its path is replaced by it, and a symbolic link is not followed."""
        if "://" in str(path):  # another file system
            return super().save_checkpoint(checkpoint, path, storage_options)
        part = partial_path(Path(path))
        try:
            super().save_checkpoint(checkpoint, part, storage_options)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def write_whole(trainer: L.Trainer) -> None:
    """Let a trainer write its checkpoints whole, unless it has been given something else to write them with."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = WholeFiles()


def partial_path(path: Path) -> Path:
    """Return the path beside another to which it is written.

    Example:
        >>> partial_path(Path("checkpoints/last.ckpt"))
        PosixPath('checkpoints/.last.ckpt.partial')
    """
    return path.with_name(f".{path.name}.partial")


def save(trainer: L.Trainer, path: Path) -> None:
    """Write a checkpoint and replace what exists at its path; call it on all ranks.

    A symbolic link or a folder is removed first: writing through a link would change the checkpoint behind it, and a
    folder would keep shards of another number of processes.

    Args:
        trainer: the trainer to save.
        path: a file, or a folder where the strategy saves shards.
    """
    if trainer.is_global_zero:
        if path.is_symlink():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path)
    trainer.strategy.barrier("sparse_lightning.save")
    trainer.save_checkpoint(path, weights_only=False)
