"""MetricsFile: a logger that writes metrics.csv, and continues it when a run is resumed."""

from __future__ import annotations

import csv
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from sparse_lightning.callbacks.saving import partial_path


class MetricsFile(Logger):
    """Writes metrics to `metrics.csv`: a row for each call, a column for each metric.

    Lightning's `CSVLogger` starts a new file in a folder that is not empty. This logger keeps the rows before the
    first step that it logs, so a resumed run has one file.

    Args:
        folder: the folder of the file.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> for steps in ((0, 1, 2), (2, 3)):
        ...     logger = MetricsFile(folder.name)
        ...     for step in steps:
        ...         logger.log_metrics({"loss": 1 / (1 + step)}, step)
        ...     logger.finalize("success")
        >>> [row["step"] for row in csv.DictReader(Path(folder.name, "metrics.csv").read_text().splitlines())]
        ['0', '1', '2', '3']
        >>> folder.cleanup()
    """

    def __init__(self, folder: Path | str) -> None:
        super().__init__()
        self.folder = Path(folder)
        self._rows: list[dict[str, Any]] = []
        self._columns: list[str] = []
        self._is_new = True

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.name

    @property
    def version(self) -> str:
        """Empty: there is one version."""
        return ""

    @property
    def save_dir(self) -> str:
        """The folder of the file."""
        return str(self.folder)

    @property
    def log_dir(self) -> str:
        """The folder of the file."""
        return str(self.folder)

    @property
    def file(self) -> Path:
        """The path of the file."""
        return self.folder / "metrics.csv"

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write a row at once: no checkpoint that is saved after it can be resumed without it."""
        at = len(self._rows) if step is None else step
        if self._is_new:
            self._rows, self._is_new = self._before(at), False
        row = {"step": at, **{name: float(value) for name, value in metrics.items()}}
        self._rows.append(row)
        if row.keys() <= set(self._columns):
            with self.file.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._columns).writerow(row)
        else:
            self._write_all()

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Do nothing: config.yaml has the hyperparameters."""

    def _write_all(self) -> None:
        """Write all rows, with columns for all their metrics, to a file that takes the place of the old one."""
        self._columns = ["step", *sorted({name for row in self._rows for name in row} - {"step"})]
        self.folder.mkdir(parents=True, exist_ok=True)
        part = partial_path(self.file)
        with part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(self._rows)
        part.replace(self.file)

    def _before(self, step: int) -> list[dict[str, Any]]:
        """Return the rows of an earlier run before a step."""
        if not self.file.is_file():
            return []
        with self.file.open(newline="", encoding="utf-8") as file:
            rows = [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]
        return [row for row in rows if int(row["step"]) < step]
