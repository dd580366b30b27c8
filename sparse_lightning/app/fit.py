"""Fit: a trainer, with checkpoints and Ctrl-C."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint

from sparse_lightning.app.factory import Factory
from sparse_lightning.app.processes import watch
from sparse_lightning.app.progress_lines import progress_lines
from sparse_lightning.callbacks.checkpoint import SparseModelCheckpoint, StepCheckpoint
from sparse_lightning.callbacks.interruption import Interruption
from sparse_lightning.callbacks.last_metrics import LastMetrics
from sparse_lightning.callbacks.random_numbers import RandomNumbers
from sparse_lightning.callbacks.saving import save, write_whole
from sparse_lightning.errors import ConfigError, did_you_mean

AS_DATA: dict[str, Any] = {"weights_only": True} if "weights_only" in signature(L.Trainer.fit).parameters else {}
"""The argument by which Lightning, from 2.6 on, loads a checkpoint as data; `check_checkpoint` has read it before."""


class Fit:
    """A trainer that is built before its folder is known, because it tells how many processes there are.

    Args:
        factory: builds the trainer.
        title: what is trained, for lines of a log.
        callbacks: of this fit, beside those of the configuration.
        ranks: keep the best state at the final sparsity too, if the configuration has a metric to rank by.
    """

    def __init__(self, factory: Factory, title: str, callbacks: Sequence[L.Callback] = (), ranks: bool = False) -> None:
        every, monitor = factory.config["checkpoint_every"], factory.config["monitor"]
        self._checkpoints: list[ModelCheckpoint] = [StepCheckpoint(every)]
        if ranks and monitor is not None:
            mode = factory.config["monitor_mode"]
            self._checkpoints.append(SparseModelCheckpoint(filename="best", monitor=monitor, mode=mode))
        self._interruption = Interruption()
        self._seed = factory.seed
        lines = progress_lines(title, factory.config["trainer"])
        before, after = [RandomNumbers(), LastMetrics()], [*self._checkpoints, self._interruption, *lines]
        self.trainer = factory.trainer([*before, *callbacks, *after])
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
            ConfigError: the model does not log the metric by which states are ranked.
        """
        checkpoints = (folder / "checkpoints").resolve()
        self._interruption.file = checkpoints / "interrupted.ckpt"
        for callback in self._checkpoints:
            callback.dirpath = str(checkpoints)
        if logger and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.trainer.loggers = [logger]
        self._seed()
        try:
            self.trainer.fit(model, data, ckpt_path=ckpt_path, **AS_DATA)
        except (SystemExit, KeyboardInterrupt):
            if self._interruption.was_requested:
                raise self._interruption.interrupted() from None
            raise
        except MisconfigurationException as error:
            self._check_monitored()
            raise error
        finally:
            watch(self.trainer)
        if not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            save(self.trainer, checkpoints / "last.ckpt")

    def _check_monitored(self) -> None:
        """Raise `ConfigError` if the metric to rank by is not one that the model logs."""
        known = sorted(self.trainer.callback_metrics)
        for name in [callback.monitor for callback in self._checkpoints]:
            if name is not None and name not in known:
                logged = ", ".join(known)
                raise ConfigError(f"monitor: the model logs {logged}, and no {name!r}{did_you_mean(name, known)}")
