"""Checkpoints: the best one among those at the final sparsity, and those that a run resumes from."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from sparse_lightning.callbacks.sparsity import SparsityCallback
from sparse_lightning.compat.lightning import accumulates, validates_next


class SparseModelCheckpoint(ModelCheckpoint):
    """A `ModelCheckpoint` that ranks only states at the final sparsity.

    The best validation loss is often that of an epoch before pruning ended: `ModelCheckpoint(monitor="val_loss")` keeps
    a denser model than the schedule has as its goal. All arguments are those of `ModelCheckpoint`; without `monitor`,
    nothing is ranked. Without a `SparsityCallback` in the trainer, every state is ranked. To resume a run before it has
    reached its final sparsity, keep a second `ModelCheckpoint` without `monitor`.

    Example:
        >>> checkpoint = SparseModelCheckpoint(monitor="val_loss", save_top_k=2)
        >>> trainer = L.Trainer(callbacks=[checkpoint], logger=False, accelerator="cpu")
    """

    def check_monitor_top_k(self, trainer: L.Trainer, current: Tensor | None = None) -> bool:
        """Whether this state is at the final sparsity and among the best k of those."""
        return is_at_final_sparsity(trainer) and super().check_monitor_top_k(trainer, current)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Warn if no state was ranked."""
        super().on_train_end(trainer, pl_module)
        is_ranking = self.monitor is not None and self.save_top_k != 0
        if is_ranking and not self.best_model_path and not is_at_final_sparsity(trainer):
            rank_zero_warn(
                f"SparseModelCheckpoint(monitor={self.monitor!r}) saved no best checkpoint: the run did not reach its "
                "final sparsity. Let the schedule end earlier in the run"
            )


class StepCheckpoint(ModelCheckpoint):
    """A `ModelCheckpoint` every so many optimizer steps, from which a run ends as if it had not been stopped.

    It saves after a step, not between the batches of one whose gradients are accumulated: they are not in checkpoints.
    Where a validation follows, it saves after that, which Lightning would pass over when it resumes.

    Args:
        every: the optimizer steps between two checkpoints.
    """

    def __init__(self, every: int) -> None:
        super().__init__(filename="{step}", every_n_train_steps=every, save_last="link")
        self._waiting: tuple[Any, Any, int] | None = None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save after a step."""
        self._waiting = None
        if accumulates(trainer):
            return
        if validates_next(trainer):
            self._waiting = outputs, batch, batch_idx
        else:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save after the validation that followed a step."""
        super().on_validation_end(trainer, pl_module)
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            super().on_train_batch_end(trainer, pl_module, *waiting)


def is_at_final_sparsity(trainer: L.Trainer) -> bool:
    """Whether the masks of all SparsityCallbacks of a trainer are at the final target sparsity of their schedules."""
    ours = [c.sparsifier for c in trainer.callbacks if isinstance(c, SparsityCallback)]  # type: ignore[attr-defined]
    return all(sparsifier.is_final for sparsifier in ours if sparsifier.is_attached)
