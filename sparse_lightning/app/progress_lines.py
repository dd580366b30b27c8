"""ProgressLines: how far training is, in lines of a log; a progress bar needs a terminal."""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning as L

INTERVAL = 10.0
"""Seconds between two lines."""


class ProgressLines(L.Callback):
    """Prints, on rank 0, when training starts, and from time to time the step and the metrics, each flushed at once.

    Args:
        title: what is trained.
    """

    def __init__(self, title: str) -> None:
        self._title, self._last = title, 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print from which step it trains, and for how long."""
        limits = {"epochs": trainer.max_epochs, "steps": trainer.max_steps}
        until = ", ".join(f"{limit} {name}" for name, limit in limits.items() if limit not in (None, -1))
        self._print(trainer, f"training from step {trainer.global_step}" + (f" to {until}" if until else ""))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Print the step and the metrics, if it is time."""
        if time.monotonic() - self._last >= INTERVAL:
            numbers = ", ".join(f"{name} {float(value):.4g}" for name, value in trainer.callback_metrics.items())
            self._print(trainer, f"epoch {trainer.current_epoch}, step {trainer.global_step}: {numbers}")

    def _print(self, trainer: L.Trainer, text: str) -> None:
        self._last = time.monotonic()
        if trainer.is_global_zero:
            try:
                print(f"{self._title}: {text}", flush=True)
            except BrokenPipeError:  # nobody reads any more; the model is trained nevertheless
                self._last = float("inf")


def progress_lines(title: str, trainer: dict[str, Any]) -> list[L.Callback]:
    """Return the callback that prints lines; none on a terminal, or where the configuration disables progress bars.

    Args:
        title: what is trained.
        trainer: the arguments of the Trainer.
    """
    is_shown = trainer.get("enable_progress_bar", True) and not sys.stdout.isatty()
    return [ProgressLines(title)] if is_shown else []
