"""One run: a checked configuration becomes a dense baseline, a sparse model, files and a metric."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml

from sparse_lightning.app.check import check
from sparse_lightning.app.factory import Factory
from sparse_lightning.app.fit import Fit
from sparse_lightning.app.folders import last_checkpoint
from sparse_lightning.app.paths import check_written
from sparse_lightning.app.rank_zero import is_rank_zero
from sparse_lightning.app.shards import check_checkpoint, check_model, check_word
from sparse_lightning.report import REPORT_FILES, Report, add_export, write_page

BUILT_EARLY = ("trainer", "optimizer", "pattern", "schedule", "criterion", "method", "budget", "compensation", "export")
"""The groups whose objects are built before the folder of a run is known."""


@dataclass(frozen=True)
class RunResult:
    """What a run returns.

    Args:
        metric: the value of the metric that the model names; None where it was not logged.
        table: the closing table.
        folder: where all files are.
    """

    metric: float | None
    table: str
    folder: Path


def run(config: dict[str, Any], trusted: Iterable[str] = ()) -> RunResult:
    """Train what a plain configuration describes: first dense, with `compare_dense`, then sparse.

    Args:
        config: from `Composed.plain`.
        trusted: prefixes of dotted names that the user trusts.
    """
    prefixes = tuple(trusted)
    check(config, prefixes)
    return PreparedRun(config, prefixes).train()


class PreparedRun:
    """A run whose objects are built, except for the model and the data, which are built when it trains.

    Args:
        config: plain and checked.
        trusted: prefixes of dotted names that the user trusts.

    Raises:
        ConfigError: where an object cannot be built from its values.
    """

    def __init__(self, config: dict[str, Any], trusted: tuple[str, ...] = ()) -> None:
        self._factory = Factory(config, trusted)
        self._pruning = self._factory.sparsity()
        self._exporter = self._factory.exporter()
        self._factory.check_optimizer()
        self._report = Report(config["folder"])
        self._fit = Fit(self._factory, [self._pruning, self._report], ranks=True)
        self._logger: Any = None

    @property
    def config(self) -> dict[str, Any]:
        """The configuration."""
        return self._factory.config

    @property
    def trainer(self) -> L.Trainer:
        """The trainer of the sparse model."""
        return self._fit.trainer

    def moved_to(self, config: dict[str, Any]) -> PreparedRun:
        """Return this run with its folder, and its logger built, now that the folder is known.

        Args:
            config: the configuration, resolved for the folder. Where it names the folder in another object than the
                logger, model and data, all objects are built again.
        """
        check_written(config)
        found = self
        if any(config[group] != self.config[group] for group in BUILT_EARLY):
            found = PreparedRun(config, self._factory.trusted)
        found._factory = Factory(config, self._factory.trusted)
        found._logger = found._factory.logger()
        return found

    def train(self) -> RunResult:
        """Train the dense baseline, if requested, and the sparse model; write all files."""
        folder = Path(self.config["folder"])
        model, data, ckpt_path = self.build()
        ended = self._ended_run(folder, ckpt_path)
        if self._exporter is not None and ckpt_path is not None and ended is not None:
            return self._export_ended(ended, folder, model, ckpt_path)
        logger = self._factory.logger() if self._logger is None else self._logger
        if is_rank_zero():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.yaml").write_text(yaml.safe_dump(self.config, sort_keys=False), "utf-8")
        self._report.folder = folder
        self._report.dense = self._dense(folder) if self.config["compare_dense"] else {}
        self._fit.fit(model, data, folder, ckpt_path, logger)
        self._export(folder, model)
        metric = self.trainer.callback_metrics.get(getattr(model, "metric", ""))
        return RunResult(None if metric is None else float(metric), self._report.table, folder)

    def _export(self, folder: Path, model: L.LightningModule) -> None:
        """Write the model as `export` requests it, and the page again, with what was exported."""
        if self._exporter is not None:
            path = self._exporter(folder, model, self._pruning.sparsifier)
            if is_rank_zero():
                add_export(folder, path)
                write_page(folder)

    def _ended_run(self, folder: Path, ckpt_path: Path | str | None) -> Path | None:
        """Return the folder of the run that has ended with a checkpoint: this one, or that of the path; or None."""
        if ckpt_path is None or self.config["ckpt_path"] == "last":
            return folder if self._has_ended(folder) else None
        source = Path(ckpt_path).resolve().parent.parent
        is_last = last_checkpoint(source / "checkpoints") == source / "checkpoints" / Path(ckpt_path).name
        return source if is_last and self._has_ended(source) else None

    def _has_ended(self, folder: Path) -> bool:
        """Whether a folder is that of a run that has ended, and was trained for as long as this one requests."""
        config = folder / "config.yaml"
        if not (folder / "results.json").is_file() or not config.is_file():
            return False
        before = yaml.safe_load(config.read_text("utf-8")).get("trainer", {})
        return all(before.get(name) == self.config["trainer"].get(name) for name in ("max_epochs", "max_steps"))

    def _export_ended(self, ended: Path, folder: Path, model: L.LightningModule, ckpt_path: Path | str) -> RunResult:
        """Export a run that has ended, without training; another folder gets the files of its report."""
        if ended != folder.resolve() and is_rank_zero():
            folder.mkdir(parents=True, exist_ok=True)
            for name in (*REPORT_FILES, "config.yaml", "dense.json"):
                if (ended / name).is_file():
                    shutil.copyfile(ended / name, folder / name)
        state = torch.load(ckpt_path, map_location="cpu", weights_only=True)["state_dict"]
        model.load_state_dict(state)
        model.trainer = self.trainer  # as after training: exporters show progress if it does
        self._export(folder, model)
        return RunResult(None, (folder / "table.txt").read_text("utf-8").rstrip(), folder)

    def build(self) -> tuple[L.LightningModule, L.LightningDataModule, Path | str | None]:
        """Build the model and the data, and check patterns, sharding and the checkpoint against them.

        Returns:
            The model, the data, and the checkpoint to resume; None for none.
        """
        given = self.config["ckpt_path"]
        ckpt_path = last_checkpoint(Path(self.config["folder"], "checkpoints")) if given == "last" else given
        model, data = self._factory.model_and_data()
        self._factory.check_patterns(self._pruning, model, self.trainer)
        check_model(self.trainer, model)
        check_checkpoint(self.trainer, model, ckpt_path)
        check_word(ckpt_path, self.config["trust_checkpoint"])
        return model, data, ckpt_path

    def _dense(self, folder: Path) -> dict[str, float]:
        """Train the dense baseline, with equal initial weights, data and trainer settings; return its metrics.

        A resumed run reads those of a baseline that has ended.
        """
        file = folder / "dense.json"
        given = self.config["ckpt_path"]
        resumes = given == "last"
        ended = file if resumes or given is None else Path(given).resolve().parent.parent / "dense.json"
        if given is not None and ended.is_file():
            return {name: float(value) for name, value in json.loads(ended.read_text("utf-8")).items()}
        ckpt_path = last_checkpoint(folder / "dense" / "checkpoints") if resumes else None
        baseline = Fit(self._factory)
        model, data = self._factory.model_and_data()
        check_checkpoint(baseline.trainer, model, ckpt_path)
        check_word(ckpt_path, self.config["trust_checkpoint"])
        baseline.fit(model, data, folder / "dense", ckpt_path)
        metrics = {name: float(value) for name, value in baseline.trainer.callback_metrics.items()}
        if baseline.trainer.is_global_zero:
            file.write_text(json.dumps(metrics, indent=2), "utf-8")
        return metrics
