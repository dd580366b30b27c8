"""One run: a checked configuration becomes a dense twin, a sparse model, files, and the metric."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint

from sparse_lightning.callbacks.interruption import Interrupted, Interruption
from sparse_lightning.callbacks.saving import save
from sparse_lightning.configuration.check import check
from sparse_lightning.configuration.first import is_first
from sparse_lightning.configuration.folders import last_checkpoint
from sparse_lightning.configuration.parts import Parts
from sparse_lightning.configuration.processes import watch
from sparse_lightning.configuration.shards import check_checkpoint, check_model
from sparse_lightning.report import Report


@dataclass(frozen=True)
class Outcome:
    """What a run returns.

    Args:
        metric: the value of the metric that the model names, None where it was not logged.
        table: the closing table.
        folder: where all files are.
    """

    metric: float | None
    table: str
    folder: Path


def run(config: dict[str, Any], trusted: Iterable[str] = ()) -> Outcome:
    """Train what a plain configuration describes, first dense if asked for, then sparse.

    Args:
        config: from `Composed.plain`.
        trusted: prefixes of dotted names that the user trusts.
    """
    parts, sparse = prepare(config, trusted)
    if is_first():
        sparse.folder.mkdir(parents=True, exist_ok=True)
        (sparse.folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), "utf-8")
    dense = _dense(parts, sparse.folder, config) if config["compare_dense"] else None
    pruning, report = parts.sparsity(), Report(sparse.folder, dense)
    trainer = sparse.fit([pruning, report], parts.logger())
    exporter = parts.exporter()
    if exporter is not None:
        exporter(sparse.folder, sparse.model, pruning.sparsifier)
    metric = trainer.callback_metrics.get(getattr(sparse.model, "metric", ""))
    return Outcome(None if metric is None else float(metric), report.table, sparse.folder)


def prepare(config: dict[str, Any], trusted: Iterable[str] = ()) -> tuple[Parts, Fit]:
    """All that is refused is refused here, before any training."""
    check(config, trusted)
    parts = Parts(config, tuple(trusted))
    trainer = parts.check_small()
    sparse = Fit(parts, Path(config["folder"]), config["ckpt_path"])
    parts.check_patterns(sparse.model)
    check_model(trainer, sparse.model)
    check_checkpoint(trainer, sparse.ckpt_path)
    return parts, sparse


def _dense(parts: Parts, folder: Path, config: dict[str, Any]) -> dict[str, float]:
    """The metrics of the dense twin, which has the same start, data and trainer; a resumed run has them already."""
    file = folder / "dense.json"
    resumes = config["ckpt_path"] == "last"
    if resumes and file.is_file():
        return {name: float(value) for name, value in json.loads(file.read_text("utf-8")).items()}
    twin = Fit(parts, folder / "dense", "last" if resumes else None)
    trainer = twin.fit([], False)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if trainer.is_global_zero:
        file.write_text(json.dumps(metrics, indent=2), "utf-8")
    return metrics


AS_DATA: dict[str, Any] = {"weights_only": True} if "weights_only" in signature(L.Trainer.fit).parameters else {}
"""How Lightning is told that a checkpoint is data, from 2.6 on; `check_checkpoint` has looked in any case."""


class Fit:
    """A model and data made from the seed, and how they are trained.

    Args:
        parts: makes them.
        folder: where checkpoints go, in a folder of their own.
        ckpt_path: what to go on with: "last" of this folder, a path, or None.
    """

    def __init__(self, parts: Parts, folder: Path, ckpt_path: str | None) -> None:
        self.folder, self._parts = folder, parts
        self._checkpoints = folder / "checkpoints"
        self.ckpt_path = last_checkpoint(self._checkpoints) if ckpt_path == "last" else ckpt_path
        parts.seed()
        self.model, self.data = parts.model(), parts.data()

    def fit(self, callbacks: Sequence[L.Callback], logger: Any) -> L.Trainer:
        """Train, and leave checkpoints."""
        interruption = Interruption(self._checkpoints / "interrupted.ckpt")
        trainer = self._parts.trainer([*callbacks, self._checkpointing(), interruption], logger)
        check_checkpoint(trainer, self.ckpt_path)
        self._parts.seed()
        try:
            trainer.fit(self.model, self.data, ckpt_path=self.ckpt_path, **AS_DATA)
        except (SystemExit, KeyboardInterrupt):
            if interruption.was_asked:
                raise Interrupted from None
            raise
        finally:
            watch(trainer)
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            save(trainer, self._checkpoints / "last.ckpt")
        return trainer

    def _checkpointing(self) -> ModelCheckpoint:
        every = self._parts.config["checkpoint_every"]
        return ModelCheckpoint(self._checkpoints, filename="{step}", every_n_train_steps=every, save_last="link")
