"""Fit: a trainer, with checkpoints and Ctrl-C."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from sparse_lightning.app.factory import Factory
from sparse_lightning.app.processes import watch
from sparse_lightning.callbacks.interruption import Interruption
from sparse_lightning.callbacks.saving import save, write_whole

AS_DATA: dict[str, Any] = {"weights_only": True} if "weights_only" in signature(L.Trainer.fit).parameters else {}
"""The argument by which Lightning, from 2.6 on, loads a checkpoint as data; `check_checkpoint` has read it before."""


class Fit:
    """A trainer that is built before its folder is known, because it tells how many processes there are.

    Args:
        factory: builds the trainer.
        callbacks: of this fit, beside those of the configuration.
    """

    def __init__(self, factory: Factory, callbacks: Sequence[L.Callback] = ()) -> None:
        every = factory.config["checkpoint_every"]
        self._checkpoints = ModelCheckpoint(filename="{step}", every_n_train_steps=every, save_last="link")
        self._interruption = Interruption()
        self._seed = factory.seed
        self.trainer = factory.trainer([*callbacks, self._checkpoints, self._interruption])
        write_whole(self.trainer)

    def fit(
        self,
        model: L.LightningModule,
        data: L.LightningDataModule,
        folder: Path,
        ckpt_path: Path | str | None = None,
        logger: Any = False,
    ) -> None:
        """Train, and write checkpoints to a folder inside of `folder`.

        Raises:
            Interrupted: after Ctrl-C or SIGTERM.
        """
        checkpoints = (folder / "checkpoints").resolve()
        self._checkpoints.dirpath, self._interruption.file = str(checkpoints), checkpoints / "interrupted.ckpt"
        if logger and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.trainer.loggers = [logger]
        self._seed()
        try:
            self.trainer.fit(model, data, ckpt_path=ckpt_path, **AS_DATA)
        except (SystemExit, KeyboardInterrupt):
            if self._interruption.was_requested:
                raise self._interruption.interrupted() from None
            raise
        finally:
            watch(self.trainer)
        if not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            save(self.trainer, checkpoints / "last.ckpt")
