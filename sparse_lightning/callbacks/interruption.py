"""Interruption: Ctrl-C ends a run between two steps, with a checkpoint."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L


class Interruption(L.Callback):
    """Saves a checkpoint and stops when SIGINT comes: at the end of the step that runs, so that it can be gone on with.

    A second Ctrl-C stops at once. After the fit the signal means what it meant before.

    Args:
        file: the checkpoint.

    Attributes:
        was_asked: whether the signal has come.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.was_asked = False
        self._before: Any = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Listen."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.was_asked:
            raise KeyboardInterrupt
        self.was_asked = True

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save and stop, if that was asked for."""
        if self.was_asked:
            trainer.save_checkpoint(self.file, weights_only=False)
            raise KeyboardInterrupt

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Stop; the last checkpoint is the one to go on with."""
        if self.was_asked:
            raise KeyboardInterrupt

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Listen no more."""
        self._restore()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Listen no more."""
        self._restore()

    def _restore(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None
