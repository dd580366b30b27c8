"""sweep: compare the runs of a multirun in one table and one figure."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

from sparse_lightning.blocks.table import aligned
from sparse_lightning.errors import SparseLightningError
from sparse_lightning.report.figures import save_png
from sparse_lightning.report.page import write_sweep_page
from sparse_lightning.report.results_table import higher_is_better, number_text
from sparse_lightning.report.runs import SweepRun, runs_in, varied
from sparse_lightning.report.sweep_figure import draw_sweep


def sweep(folder: Path) -> str:
    """Write `sweep.csv`, `sweep.txt`, `sweep.png` and `report.html` from the results of the runs below a folder.

    Runs are sorted by target sparsity, and by metric with the best first. A run without results is listed last, as
    failed.

    Args:
        folder: the folder of the sweep, which contains those of the runs.

    Returns:
        The table.

    Raises:
        SparseLightningError: if there are no runs.
    """
    folder = Path(folder)
    runs = runs_in(folder)
    if not runs:
        raise SparseLightningError(
            f"{folder} has no runs: no folder in it has .hydra/overrides.yaml or results.json. Pass the folder of a "
            "multirun"
        )
    metric, choices = _metric(runs), varied(runs)
    ordered = sorted(runs, key=lambda run: _sort_key(run, metric))
    _write_csv(folder / "sweep.csv", ordered, choices, metric)
    text = _table(ordered, choices, metric)
    (folder / "sweep.txt").write_text(text + "\n", encoding="utf-8")
    save_png(draw_sweep(ordered, choices, metric), folder / "sweep.png")
    write_sweep_page(folder, ordered, choices, metric)
    return text


def _metric(runs: Sequence[SweepRun]) -> str | None:
    """Return the main metric of most runs."""
    named = [run.results["metric"] for run in runs if run.results and run.results.get("metric")]
    return max(dict.fromkeys(named), key=named.count) if named else None


def _sort_key(run: SweepRun, metric: str | None) -> tuple[bool, float, float]:
    value = run.metric("sparse", metric)
    sign = -1 if metric and higher_is_better(metric) else 1
    return run.has_failed, run.number("target") or 0.0, math.inf if value is None else sign * value


def _numbers(run: SweepRun, metric: str | None) -> list[float | None]:
    return [run.number("target"), run.number("actual"), run.metric("dense", metric), run.metric("sparse", metric)]


def _headings(metric: str | None) -> list[str]:
    return ["target", "actual", f"{metric or 'metric'} dense", f"{metric or 'metric'} sparse"]


def _table(runs: Sequence[SweepRun], choices: Sequence[str], metric: str | None) -> str:
    numbers = _headings(metric)
    rows = []
    for run in runs:
        values = ["failed", *[""] * 3] if run.has_failed else [number_text(x) for x in _numbers(run, metric)]
        rows.append([run.name, *(run.choices.get(key, "-") for key in choices), *values])
    failed = sum(run.has_failed for run in runs)
    ending = f"\n\n{failed} of {len(runs)} runs failed: see the log in their folder" if failed else ""
    return aligned(["run", *choices, *numbers], rows, numbers) + ending


def _write_csv(path: Path, runs: Sequence[SweepRun], choices: Sequence[str], metric: str | None) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["run", *choices, *_headings(metric), "status"])
        for run in runs:
            status = "failed" if run.has_failed else "ok"
            values = ["" if x is None else x for x in _numbers(run, metric)]
            writer.writerow([run.name, *(run.choices.get(key, "") for key in choices), *values, status])
