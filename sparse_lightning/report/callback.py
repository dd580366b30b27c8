"""Report: a callback that records a run and writes its report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L

from sparse_lightning.errors import SparseLightningError
from sparse_lightning.report.files import recorded_metrics, write_report
from sparse_lightning.report.footprint import footprint
from sparse_lightning.report.history import History
from sparse_lightning.report.outcome import Outcome
from sparse_lightning.report.tensorboard import log_mask_figure, log_masks
from sparse_lightning.report.trainer_objects import (
    attached_sparsifiers,
    logged_metrics,
    sparsifiers_of,
    tensorboard_loggers,
)


class Report(History):
    """Records a run, and writes masks, figures, numbers, the results table and `report.html` when it ends.

    It is used with a `SparsityCallback`, in any order. With a `TensorBoardLogger`, it also logs images of the masks at
    each update and at the end.

    Args:
        folder: the folder of the files; it is created if it does not exist.
        dense: metrics of the dense model by name, to compare with those of the sparse one.
        points: the maximum number of losses to keep.

    Attributes:
        table: the results table, empty before the end of a run.
        outcome: the final state of the run, for `write_report` with other results.
        results: the metrics in the table, dense and sparse.
    """

    def __init__(self, folder: Path | str, dense: Mapping[str, float] | None = None, points: int = 500) -> None:
        super().__init__(points)
        self.folder = Path(folder)
        self.dense = dict(dense or {})
        self.table = ""
        self.outcome: Outcome | None = None
        self.results: dict[str, dict[str, float]] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Raise an error if there is no SparsityCallback."""
        if stage == "fit" and not sparsifiers_of(trainer):
            raise SparseLightningError("Report needs a SparsityCallback: add one to the Trainer's callbacks")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the step; log images of the masks if they were updated."""
        before = self._seen
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        loggers = tensorboard_loggers(trainer) if self._seen != before and trainer.is_global_zero else []
        if loggers:
            masks = {name: mask for found in attached_sparsifiers(trainer) for name, mask in found.masks.items()}
            log_masks(loggers, masks, self._seen)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the report; the Sparsifier is still attached."""
        self.outcome = Outcome.of(attached_sparsifiers(trainer))
        # A run that is resumed at its end trains nothing and logs nothing: its results are those that it wrote then.
        sparse = logged_metrics(trainer) or recorded_metrics(self.folder, self.outcome.step)
        self.results = {"dense": self.dense, "sparse": sparse}
        if trainer.is_global_zero:
            metric = getattr(pl_module, "metric", None)
            preferred = metric if isinstance(metric, str) else None
            measured = footprint(pl_module, self.outcome)
            self.table = write_report(self.folder, self.outcome, self, self.results, preferred, measured)
            log_mask_figure(tensorboard_loggers(trainer), self.outcome.masks, self.outcome.step)
