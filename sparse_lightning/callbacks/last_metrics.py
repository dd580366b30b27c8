"""LastMetrics: the metrics of a run are in its checkpoints."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch

KEY = "sparse_lightning.last_metrics"


class LastMetrics(L.Callback):
    """Let a trainer that makes no step end with the metrics of its checkpoint.

    So does a run that was stopped after its last step, before its results were written, and is resumed. Callbacks that
    read metrics in `on_fit_end` come after this one.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, float] = {}
        self._step = 0

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the metrics as plain numbers."""
        checkpoint[KEY] = {name: float(value) for name, value in trainer.callback_metrics.items()}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the metrics until training ends."""
        self._loaded, self._step = checkpoint.get(KEY, {}), checkpoint["global_step"]

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Set the metrics that were loaded, unless steps were made since."""
        loaded, self._loaded = self._loaded, {}
        for name, value in loaded.items() if trainer.global_step == self._step else ():
            trainer.callback_metrics.setdefault(name, torch.tensor(value))
