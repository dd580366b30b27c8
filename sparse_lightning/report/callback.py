"""Report: a History that ends in files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L

from sparse_lightning.errors import SparseLightningError
from sparse_lightning.report.files import write
from sparse_lightning.report.found import attached, held, tensorboards
from sparse_lightning.report.history import History
from sparse_lightning.report.outcome import Outcome
from sparse_lightning.report.tensorboard import show_masks, show_page


class Report(History):
    """Records a run, and writes masks, pictures, numbers and the closing table when it ends.

    It stands beside a `SparsityCallback`, in any order. With a `TensorBoardLogger` it adds pictures of the masks at
    each update and at the end.

    Args:
        folder: where the files go; it is made if it is not there.
        dense: metrics of the dense model by name, to stand beside those of the sparse one.
        points: how many losses to keep at most.

    Attributes:
        table: the closing table, empty before the end of a run.
        outcome: what the run has made, for `write` with other results.
        results: the metrics that the table shows, dense and sparse.
    """

    def __init__(self, folder: Path | str, dense: Mapping[str, float] | None = None, points: int = 500) -> None:
        super().__init__(points)
        self.folder = Path(folder)
        self.dense = dict(dense or {})
        self.table = ""
        self.outcome: Outcome | None = None
        self.results: dict[str, dict[str, float]] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a run that has nothing to report."""
        if stage == "fit" and not held(trainer):
            raise SparseLightningError("Report is on what a SparsityCallback makes: add one to the Trainer's callbacks")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record; and show the masks where they were updated."""
        before = self._seen
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        boards = tensorboards(trainer) if self._seen != before and trainer.is_global_zero else []
        if boards:
            masks = {name: mask for sparsifier in attached(trainer) for name, mask in sparsifier.masks.items()}
            show_masks(boards, masks, self._seen)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the files: the Sparsifier is still attached."""
        self.outcome = Outcome.of(attached(trainer))
        self.results = {"dense": self.dense, "sparse": _metrics(trainer)}
        if trainer.is_global_zero:
            metric = getattr(pl_module, "metric", None)
            preferred = metric if isinstance(metric, str) else None
            self.table = write(self.folder, self.outcome, self, self.results, preferred)
            show_page(tensorboards(trainer), self.outcome.masks, self.outcome.step)


def _metrics(trainer: L.Trainer) -> dict[str, float]:
    """What was logged last, without what a SparsityCallback logs."""
    logged = trainer.callback_metrics.items()
    return {name: float(value) for name, value in logged if not name.startswith(("sparsity/", "sparsity_"))}
