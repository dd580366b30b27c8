"""LastMetrics: the metrics of a run are in its checkpoints."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch

KEY = "sparse_lightning.last_metrics"


class LastMetrics(L.Callback):
    """Let a trainer end with the metrics of its checkpoint, where it has logged none since.

    A run that was stopped after its last step, before its results were written, makes no step when it is resumed.
    Callbacks that read metrics in `on_fit_end` come after this one.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, float] = {}

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the metrics as plain numbers."""
        checkpoint[KEY] = {name: float(value) for name, value in trainer.callback_metrics.items()}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the metrics until training ends."""
        self._loaded = checkpoint.get(KEY, {})

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Set the metrics that were loaded, and not logged again."""
        loaded, self._loaded = self._loaded, {}
        for name, value in loaded.items():
            trainer.callback_metrics.setdefault(name, torch.tensor(value))
