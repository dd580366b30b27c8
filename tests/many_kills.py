"""Runs that are killed at any moment: every criterion, method and budget, gradient accumulation included.

A run trains in a process of its own, saves every few steps and is killed by SIGKILL in the middle of anything: in a
forward pass, an update, a step of the optimizer or the writing of a checkpoint. The newest checkpoint that is whole is
resumed, and the end must be that of the run that was not killed, bit for bit.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from resumable import Longer
from small_nets import LAYERS

from sparse_lightning import (
    EMA,
    ERK,
    LAMP,
    NM,
    SET,
    AdamFisher,
    AverageTaylor,
    Blocks,
    Constant,
    Cubic,
    ElementwiseTaylor,
    Fisher,
    Global,
    Gradient,
    Gradual,
    Magnitude,
    Movement,
    Neurons,
    Proximal,
    PruneOnce,
    Random,
    RigL,
    Sensitivity,
    Soft,
    SparsityCallback,
    Taylor,
    Uniform,
    Wanda,
)
from sparse_lightning.schedules import OneShot

STEPS, SAVE_EVERY = 12, 2

CRITERIA = {
    "magnitude": Magnitude,
    "gradient": Gradient,
    "taylor": Taylor,
    "elementwise_taylor": ElementwiseTaylor,
    "average_taylor": AverageTaylor,
    "movement": Movement,
    "fisher": Fisher,
    "adam_fisher": AdamFisher,
    "sensitivity": Sensitivity,
    "wanda": Wanda,
    "random": Random,
    "ema of wanda": lambda: EMA(Wanda()),
}
METHODS = {
    "gradual": Gradual,
    "prune once": PruneOnce,
    "set": SET,
    "rigl": RigL,
    "soft": lambda: Soft(3),
    "proximal": Proximal,
}
BUDGETS = {"uniform": Uniform, "erk": ERK, "global": Global, "lamp": LAMP}


@dataclass(frozen=True)
class Case:
    """A run, by the names of its parts.

    Args:
        criterion: of `CRITERIA`.
        method: of `METHODS`.
        budget: of `BUDGETS`.
        accumulate: the batches of an optimizer step.
        pattern: "blocks", "nm" or "neurons".
    """

    criterion: str
    method: str
    budget: str
    accumulate: int = 1
    pattern: str = "blocks"

    def callback(self) -> SparsityCallback:
        """Return a new callback."""
        pattern = {"blocks": Blocks(LAYERS, (4, 4)), "nm": NM(LAYERS), "neurons": Neurons("up", "down")}[self.pattern]
        grows = self.method in ("set", "rigl")
        schedule = Constant(0.5, end=10) if grows else Cubic(0.75, begin=1, end=9)
        if self.method == "prune once":
            schedule = OneShot(0.75, at=5)
        parts = CRITERIA[self.criterion](), METHODS[self.method](), BUDGETS[self.budget]()
        return SparsityCallback([pattern], schedule, *parts, update_every=2)


class Killed(L.Callback):
    """Counts calls of Python functions in a fit, and kills the process at one of them.

    Args:
        at: the call before which the process is killed; None counts only.
    """

    def __init__(self, at: int | None) -> None:
        self.at, self.calls = at, 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start to count."""
        sys.setprofile(self._called)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop."""
        sys.setprofile(None)

    def _called(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call" and threading.current_thread() is threading.main_thread():
            self.calls += 1
            if self.calls == self.at:
                os.kill(os.getpid(), signal.SIGKILL)


def fit(case: Case, folder: Path, *others: L.Callback, ckpt_path: str | None = None) -> dict[str, Any]:
    """Train a case to its end; return its final state."""
    L.seed_everything(1, verbose=False)
    callback, net = case.callback(), Longer("adamw")
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=SAVE_EVERY, save_top_k=-1)
    trainer = L.Trainer(
        max_steps=STEPS,
        callbacks=[callback, saving, *others],
        accumulate_grad_batches=case.accumulate,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(net, ckpt_path=ckpt_path)
    state = {"weights": net.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}
    return {**state, "callback": callback.state_dict()}


def train_until(case: Case, folder: Path, at: int) -> None:
    """Train a case in a process that is killed at a call."""
    torch.set_num_threads(1)
    fit(case, folder, Killed(at))


def calls_of(case: Case, folder: Path) -> tuple[dict[str, Any], int]:
    """Return the end of the whole run, and how many calls it made."""
    counter = Killed(None)
    return fit(case, folder, counter), counter.calls


def newest_whole(folder: Path) -> Path | None:
    """Return the checkpoint of the latest step that can be read; None before the first."""
    for path in sorted(
        folder.glob("step=*.ckpt"), key=lambda path: -int(path.stem.partition("=")[2].partition("-")[0])
    ):
        try:
            torch.load(path, weights_only=True)
        except (RuntimeError, EOFError, OSError):
            continue
        return path
    return None
