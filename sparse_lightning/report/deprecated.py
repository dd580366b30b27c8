"""Former names of `write_report`, for one release."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparse_lightning.engine.sparsifier import Sparsifier
from sparse_lightning.renamed import warn_renamed
from sparse_lightning.report.files import write_report
from sparse_lightning.report.history import History
from sparse_lightning.report.outcome import Outcome
from sparse_lightning.report.results_table import Results


def leave(
    folder: Path,
    sparsifier: Sparsifier | Sequence[Sparsifier],
    history: History,
    results: Results,
    metric: str | None = None,
) -> str:
    """Deprecated: use `write_report(folder, Outcome.of(sparsifier), history, results, metric)`."""
    warn_renamed("report.leave", "write_report with Outcome.of(sparsifier)", stacklevel=2)
    return write_report(folder, Outcome.of(sparsifier), history, results, metric)


def write(folder: Path, outcome: Outcome, history: History, results: Results, metric: str | None = None) -> str:
    """Deprecated: use `write_report`."""
    warn_renamed("report.write", "write_report", stacklevel=2)
    return write_report(folder, outcome, history, results, metric)
