"""MetricsFile: a logger that writes metrics.csv, and goes on in it when a run is resumed."""

from __future__ import annotations

import csv
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only


class MetricsFile(Logger):
    """Writes what is logged to `metrics.csv`: a row for each step and call, a column for each metric.

    Lightning's `CSVLogger` begins anew in a folder that is not empty. This one keeps the rows of the steps that come
    before the first that it is given: a resumed run has one file.

    Args:
        folder: where the file is.

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
        self._is_new = True

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name

    @property
    def version(self) -> str:
        """There is one."""
        return ""

    @property
    def save_dir(self) -> str:
        """Where the file is."""
        return str(self.folder)

    @property
    def log_dir(self) -> str:
        """Where the file is."""
        return str(self.folder)

    @property
    def file(self) -> Path:
        """The file."""
        return self.folder / "metrics.csv"

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Note a row."""
        at = len(self._rows) if step is None else step
        if self._is_new:
            self._rows, self._is_new = self._before(at), False
        self._rows.append({"step": at, **{name: float(value) for name, value in metrics.items()}})
        if len(self._rows) % 100 == 0:
            self.save()

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """They are in config.yaml."""

    @rank_zero_only
    def save(self) -> None:
        """Write all rows."""
        if not self._rows:
            return
        names = sorted({name for row in self._rows for name in row} - {"step"})
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.file.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["step", *names])
            writer.writeheader()
            writer.writerows(self._rows)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write all rows."""
        self.save()

    def _before(self, step: int) -> list[dict[str, Any]]:
        """Rows of an earlier run, from before a step."""
        if not self.file.is_file():
            return []
        with self.file.open(newline="", encoding="utf-8") as file:
            rows = [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]
        return [row for row in rows if int(row["step"]) < step]
