"""Interruption: stop a run on Ctrl-C or SIGTERM between two steps, with a checkpoint."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from sparse_lightning.callbacks.saving import save
from sparse_lightning.compat.lightning import accumulates, validates_next

SYNC_EVERY = 10
"""How many steps pass between two reductions over the processes: each one waits for all devices."""


class Interrupted(Exception):
    """The run was stopped by a signal; its last checkpoint can be resumed.

    Args:
        number: the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number

    @property
    def exit_code(self) -> int:
        """The exit code of a program that a signal ends: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.number


class Interruption(L.Callback):
    """Save a checkpoint and stop on SIGINT or SIGTERM, at the end of the current step, or of the validation after it.

    After a step, the run stops once Lightning has logged it, which it does after the hooks of the batch.
    A second Ctrl-C stops at once. The previous signal handlers are restored after the fit. With several processes,
    rank 0 of each machine handles SIGINT and every rank SIGTERM, and all ranks stop after the same step, a few steps
    later.

    Args:
        file: where to write the checkpoint; set it before the fit if it is not known yet.

    Attributes:
        received: the signal that has been received; None for none.
    """

    def __init__(self, file: Path = Path("interrupted.ckpt")) -> None:
        self.file = file
        self.received: int | None = None
        self._is_saved = False
        self._before: dict[int, Any] = {}

    @property
    def was_requested(self) -> bool:
        """Whether a signal has been received."""
        return self.received is not None

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Handle signals: from here on there is something to save, and Lightning has set its own handlers."""
        self._handle(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Handle signals, if there was no sanity check."""
        self._handle(trainer)

    def _handle(self, trainer: L.Trainer) -> None:
        """Handle SIGTERM, and SIGINT on local rank 0; the others receive SIGINT as well, and ignore it."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        ours = {signal.SIGINT: signal.SIG_IGN if trainer.local_rank else self._request, signal.SIGTERM: self._request}
        self._before = {int(number): signal.signal(number, handler) for number, handler in ours.items()}

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.was_requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number

    def interrupted(self) -> Interrupted:
        """Return what to raise; a rank that has received nothing itself stops because of SIGTERM on another."""
        return Interrupted(signal.SIGTERM if self.received is None else self.received)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save, if requested; not within a step, and not before a validation, as `StepCheckpoint`."""
        if accumulates(trainer) or validates_next(trainer):
            return
        if trainer.world_size > 1 and trainer.global_step % SYNC_EVERY:
            return
        if _any_rank(trainer, self.was_requested):
            save(trainer, self.file)
            self._is_saved = True

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Stop before the next batch of the epoch."""
        self._stop_if_saved()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop, if that was the last batch of the epoch."""
        self._stop_if_saved()

    def _stop_if_saved(self) -> None:
        if self._is_saved:
            raise self.interrupted()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save and stop; ranks may have different numbers of batches, but all of them reach the end."""
        is_fit = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if (is_fit and accumulates(trainer)) or not _any_rank(trainer, self.was_requested):
            return
        if is_fit:
            save(trainer, self.file)
        raise self.interrupted()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Restore the signal handlers."""
        self._restore()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Restore the signal handlers."""
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


def _any_rank(trainer: L.Trainer, here: bool) -> bool:
    """Return the logical OR over ranks: one scalar, as Lightning itself reduces for SIGTERM at every step."""
    return bool(trainer.strategy.reduce_boolean_decision(here, all=False))
