"""Interruption: Ctrl-C ends a run between two steps, with a checkpoint."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from sparse_lightning.callbacks.saving import save

TOGETHER = 10
"""After how many batches several processes ask one another: each time they wait for their devices."""


class Interrupted(Exception):
    """The run was ended by Ctrl-C, and has left a checkpoint."""


class Interruption(L.Callback):
    """Saves a checkpoint and stops when SIGINT comes: at the end of the step that runs, so that it can be gone on with.

    A second Ctrl-C stops at once. After the fit the signal means what it meant before. Where there are several
    processes, the first of each machine listens, and all stop after the same step, a few batches later.

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
        """Listen; or, where another process does, be deaf to what is sent to all."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, signal.SIG_IGN if trainer.local_rank else self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.was_asked:
            raise KeyboardInterrupt
        self.was_asked = True

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save and stop, if that was asked for."""
        if trainer.world_size > 1 and batch_idx % TOGETHER and not trainer.is_last_batch:
            return
        if _any(trainer, self.was_asked):
            save(trainer, self.file)
            raise Interrupted

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        """Stop, where that needs no agreement; the last checkpoint is the one to go on with."""
        if self.was_asked and trainer.world_size == 1:
            raise Interrupted

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save and stop; processes may have different numbers of batches, but all come to the end."""
        if _any(trainer, self.was_asked):
            if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
                save(trainer, self.file)
            raise Interrupted

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


def _any(trainer: L.Trainer, here: bool) -> bool:
    """Whether it is so in any process: all get the same answer after the same step.

    It is one number more for each step; Lightning itself asks for another one, whether SIGTERM has come.
    """
    return bool(trainer.strategy.reduce_boolean_decision(here, all=False))
