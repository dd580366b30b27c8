"""The files that a run leaves."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparse_lightning.export.saving import save_tensors
from sparse_lightning.report.closing import Results, closing_table, main_metric
from sparse_lightning.report.curves import draw_curves
from sparse_lightning.report.history import History
from sparse_lightning.report.mask_page import draw_masks
from sparse_lightning.report.outcome import Outcome
from sparse_lightning.report.page import save
from sparse_lightning.sparsifier import Sparsifier


def leave(
    folder: Path,
    sparsifier: Sparsifier | Sequence[Sparsifier],
    history: History,
    results: Results,
    metric: str | None = None,
) -> str:
    """Write what a run leaves, while the Sparsifier is attached; see `write`.

    Args:
        folder: where to; it is made if it is not there.
        sparsifier: the one that is attached to the model, or several.
        history: what was recorded during the run.
        results: metrics by name, of the "sparse" model, and of the "dense" one if there is one.
        metric: the one that the run is judged by.

    Returns:
        The closing table.
    """
    return write(folder, Outcome.of(sparsifier), history, results, metric)


def write(folder: Path, outcome: Outcome, history: History, results: Results, metric: str | None = None) -> str:
    """Write `masks.safetensors`, `masks.png`, `sparsity.png`, `table.txt` and `results.json`; gives the table.

    Args:
        folder: where to; it is made if it is not there.
        outcome: what the run has made, counted when it ended.
        history: what was recorded during the run.
        results: metrics by name, of the "sparse" model, and of the "dense" one if there is one.
        metric: the one that the run is judged by.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = closing_table(outcome, results)
    save_tensors(outcome.masks, folder / "masks.safetensors", _metadata(outcome))
    save(draw_masks(outcome.masks), folder / "masks.png")
    save(draw_curves(history), folder / "sparsity.png")
    (folder / "table.txt").write_text(text + "\n", encoding="utf-8")
    numbers = json.dumps(_numbers(outcome, results, metric), indent=1, allow_nan=False)
    (folder / "results.json").write_text(numbers + "\n", encoding="utf-8")
    return text


def _metadata(outcome: Outcome) -> dict[str, str]:
    return {
        "format": "sparse_lightning.masks",
        "True": "pruned",
        "step": str(outcome.step),
        "target": str(outcome.target),
        "actual": str(outcome.actual),
    }


def _numbers(outcome: Outcome, results: Results, metric: str | None) -> dict[str, Any]:
    rows = [{**asdict(row), "target": row.target, "actual": row.actual} for row in outcome.rows]
    return {
        "metric": main_metric(results, metric),
        **{kind: _finite(results.get(kind, {})) for kind in ("dense", "sparse")},
        "target": outcome.target,
        "actual": outcome.actual,
        "step": outcome.step,
        "parameters": rows,
    }


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Numbers as JSON has them; it has none that are not finite."""
    return {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
