"""write_report: the files of a run's report."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparse_lightning.export.saving import save_tensors
from sparse_lightning.report.curves import draw_curves
from sparse_lightning.report.figures import save_png
from sparse_lightning.report.footprint import Footprint
from sparse_lightning.report.history import History
from sparse_lightning.report.mask_figure import draw_masks
from sparse_lightning.report.outcome import Outcome
from sparse_lightning.report.page import write_page
from sparse_lightning.report.results_table import Results, main_metric, results_table

REPORT_FILES = ("masks.safetensors", "masks.png", "sparsity.png", "table.txt", "results.json", "report.html")
"""The names of the files that `write_report` writes."""


def write_report(
    folder: Path,
    outcome: Outcome,
    history: History,
    results: Results,
    metric: str | None = None,
    measured: Footprint | None = None,
) -> str:
    """Write `masks.safetensors`, `masks.png`, `sparsity.png`, `table.txt`, `results.json` and `report.html`.

    Args:
        folder: the folder of the files; it is created if it does not exist.
        outcome: the final state of the run: `Outcome.of(sparsifier)` while the Sparsifier is attached.
        history: the record of the run.
        results: metrics by name, for the "sparse" model, and for the "dense" one if there is one.
        metric: the main metric of the run; None chooses one.
        measured: parameters, bytes and time, dense and sparse; None if they were not measured.

    Returns:
        The results table.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = results_table(outcome, results, measured)
    save_tensors(outcome.masks, folder / "masks.safetensors", _metadata(outcome))
    save_png(draw_masks(outcome.masks), folder / "masks.png")
    save_png(draw_curves(history), folder / "sparsity.png")
    (folder / "table.txt").write_text(text + "\n", encoding="utf-8")
    numbers = json.dumps(_numbers(outcome, history, results, metric, measured), indent=1, allow_nan=False)
    (folder / "results.json").write_text(numbers + "\n", encoding="utf-8")
    write_page(folder)
    return text


def add_export(folder: Path, path: Path) -> None:
    """Add an exported file and its size to `results.json`, if the run has written it."""
    file = folder / "results.json"
    if file.is_file() and path.is_file():
        numbers = json.loads(file.read_text("utf-8"))
        others = [entry for entry in numbers.get("exports", []) if entry["file"] != path.name]
        numbers["exports"] = [*others, {"file": path.name, "bytes": path.stat().st_size}]
        file.write_text(json.dumps(numbers, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def recorded_metrics(folder: Path, step: int) -> dict[str, float]:
    """Return the metrics of the sparse model that `results.json` has of the same step; empty if it has none."""
    file = folder / "results.json"
    numbers = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    found = numbers.get("sparse", {}) if numbers.get("step") == step else {}
    return {name: math.nan if value is None else float(value) for name, value in found.items()}


def _metadata(outcome: Outcome) -> dict[str, str]:
    return {
        "format": "sparse_lightning.masks",
        "True": "pruned",
        "step": str(outcome.step),
        "target": str(outcome.target),
        "actual": str(outcome.actual),
    }


def _numbers(
    outcome: Outcome, history: History, results: Results, metric: str | None, measured: Footprint | None
) -> dict[str, Any]:
    rows = [{**asdict(row), "target": row.target, "actual": row.actual} for row in outcome.rows]
    return {
        "metric": main_metric(results, metric),
        **{kind: _finite(results.get(kind, {})) for kind in ("dense", "sparse")},
        "target": outcome.target,
        "actual": outcome.actual,
        "step": outcome.step,
        "zero": outcome.zero,
        "weights": outcome.weights,
        **({} if measured is None else {"footprint": measured.numbers()}),
        **({} if measured is None or not measured.families else {"families": [asdict(f) for f in measured.families]}),
        "parameters": rows,
        "scopes": [asdict(scope) for scope in outcome.scopes],
        "history": _curves(history),
    }


def _curves(history: History) -> dict[str, Any]:
    records = {name: {"steps": x.steps, "values": _known(x.values)} for name, x in history.metrics.items()}
    return {
        "steps": history.steps,
        "target": history.target,
        "actual": history.actual,
        "loss_steps": history.loss_steps,
        "loss": _known(history.loss),
        "metrics": records,
    }


def _known(values: Sequence[float]) -> list[float | None]:
    """Replace numbers that are not finite by None, and keep six significant digits: curves are drawn, not compared."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Replace numbers that are not finite by None: JSON has no such numbers."""
    return {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
