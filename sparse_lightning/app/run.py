"""One run: a checked configuration becomes a dense baseline, a sparse model, files and a metric."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import yaml

from sparse_lightning.app.check import check
from sparse_lightning.app.ended import EndedRun, ended_with, is_longer, kept_record, note_end
from sparse_lightning.app.factory import Factory
from sparse_lightning.app.fit import Fit
from sparse_lightning.app.folders import last_checkpoint, newest_checkpoint
from sparse_lightning.app.paths import check_written
from sparse_lightning.app.rank_zero import is_rank_zero
from sparse_lightning.app.saved_weights import load_weights
from sparse_lightning.app.shards import check_checkpoint, check_model, check_word
from sparse_lightning.report import REPORT_FILES, Report, add_export, write_page

BUILT_EARLY = (
    *("trainer", "optimizer", "pattern", "schedule", "criterion"),
    *("method", "budget", "compensation", "shrink", "export"),
)
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
    with kept_record(Path(config["folder"])):
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
        self._fit = Fit(self._factory, "sparse model", [self._pruning, self._report], ranks=True)
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
        ended = self._ended_run(ckpt_path)
        if ckpt_path is not None and ended is not None and not ended.goes_on(self.config):
            ended.check_export(self.config)
            return self._export_ended(ended.folder, folder, model, ckpt_path)
        logger = self._factory.logger() if self._logger is None else self._logger
        if is_rank_zero():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.yaml").write_text(yaml.safe_dump(self.config, sort_keys=False), "utf-8")
        self._report.folder = folder
        self._report.dense = self._dense(folder) if self.config["compare_dense"] else {}
        self._fit.fit(model, data, folder, ckpt_path, logger)
        if is_rank_zero():
            note_end(folder, self.config)
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

    @property
    def exports_only(self) -> bool:
        """Whether the run in this folder has ended, and is exported as it is."""
        ended = EndedRun.of(Path(self.config["folder"])) if self.config["ckpt_path"] == "last" else None
        return ended is not None and not ended.goes_on(self.config)

    def _ended_run(self, ckpt_path: Path | str | None) -> EndedRun | None:
        """Return the run that has ended with a checkpoint, in this folder or in that of the path; None for none."""
        if self.config["ckpt_path"] == "last":
            return EndedRun.of(Path(self.config["folder"]))
        if ckpt_path is None:
            return None
        source = Path(ckpt_path).resolve().parent.parent
        is_last = newest_checkpoint(source / "checkpoints") == source / "checkpoints" / Path(ckpt_path).name
        return EndedRun.of(source) if is_last else None

    def _export_ended(self, ended: Path, folder: Path, model: L.LightningModule, ckpt_path: Path | str) -> RunResult:
        """Export a run that has ended, without training; another folder gets the files of its report."""
        if ended != folder.resolve() and is_rank_zero():
            folder.mkdir(parents=True, exist_ok=True)
            for name in (*REPORT_FILES, "config.yaml", "dense.json"):
                if (ended / name).is_file():
                    shutil.copyfile(ended / name, folder / name)
        load_weights(model, ckpt_path)
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

        A resumed run reads those of a baseline that has ended, and trains it on where the run is trained longer.
        """
        file, given = folder / "dense.json", self.config["ckpt_path"]
        source = folder if given in (None, "last") else Path(given).resolve().parent.parent
        if given is not None and (source / "dense.json").is_file() and not self._is_longer_than(source):
            return {n: float(x) for n, x in json.loads((source / "dense.json").read_text("utf-8")).items()}
        ckpt_path = None if given is None else last_checkpoint(source / "dense" / "checkpoints")
        baseline = Fit(self._factory, "dense baseline")
        model, data = self._factory.model_and_data()
        check_checkpoint(baseline.trainer, model, ckpt_path)
        check_word(ckpt_path, self.config["trust_checkpoint"])
        baseline.fit(model, data, folder / "dense", ckpt_path)
        metrics = {name: float(value) for name, value in baseline.trainer.callback_metrics.items()}
        if baseline.trainer.is_global_zero:
            file.write_text(json.dumps(metrics, indent=2), "utf-8")
            note_end(folder / "dense", self.config)
        return metrics

    def _is_longer_than(self, source: Path) -> bool:
        """Whether this run is trained longer than the dense baseline in a folder was."""
        before = ended_with(source / "dense") or ended_with(source)  # earlier versions have the second one only
        return before is not None and is_longer(self.config, before)
