"""Interruption: stop a run on Ctrl-C between two steps, with a checkpoint."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from sparse_lightning.callbacks.saving import save

SYNC_EVERY = 10
"""How many batches pass between two reductions over the processes: each one waits for all devices."""


class Interrupted(Exception):
    """The run was stopped by Ctrl-C; its last checkpoint can be resumed."""


class Interruption(L.Callback):
    """Save a checkpoint and stop on SIGINT, at the end of the current step.

    A second Ctrl-C stops at once. The previous signal handler is restored after the fit. With several processes, rank
    0 of each machine handles the signal, and all ranks stop after the same step, a few batches later.

    Args:
        file: where to write the checkpoint; set it before the fit if it is not known yet.

    Attributes:
        was_requested: whether SIGINT has been received.
    """

    def __init__(self, file: Path = Path("interrupted.ckpt")) -> None:
        self.file = file
        self.was_requested = False
        self._before: Any = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Handle SIGINT on local rank 0; ignore it on the others, which receive it as well."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, signal.SIG_IGN if trainer.local_rank else self._request)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.was_requested:
            raise KeyboardInterrupt
        self.was_requested = True

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save and stop, if requested."""
        if trainer.world_size > 1 and batch_idx % SYNC_EVERY and not trainer.is_last_batch:
            return
        if _any_rank(trainer, self.was_requested):
            save(trainer, self.file)
            raise Interrupted

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        """Stop, if this is the only process; the run resumes from the last checkpoint."""
        if self.was_requested and trainer.world_size == 1:
            raise Interrupted

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save and stop; ranks may have different numbers of batches, but all of them reach the end."""
        if _any_rank(trainer, self.was_requested):
            if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
                save(trainer, self.file)
            raise Interrupted

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Restore the signal handler."""
        self._restore()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Restore the signal handler."""
        self._restore()

    def _restore(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None


def _any_rank(trainer: L.Trainer, here: bool) -> bool:
    """Return the logical OR over ranks: one scalar, as Lightning itself reduces for SIGTERM at every step."""
    return bool(trainer.strategy.reduce_boolean_decision(here, all=False))
