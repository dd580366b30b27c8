"""The results table: target and actual sparsity of each parameter, and metrics, as plain text."""

from __future__ import annotations

from collections.abc import Mapping

from sparse_lightning.blocks.table import aligned, times
from sparse_lightning.report.footprint import Footprint
from sparse_lightning.report.outcome import Outcome

Results = Mapping[str, Mapping[str, float]]
"""Metrics by name, for the "sparse" model, and for the "dense" one if there is one."""

HEADINGS = ("parameter", "shape", "block", "target", "actual")


def results_table(outcome: Outcome, results: Results, measured: Footprint | None = None) -> str:
    """Return a table of parameters, followed by a table of metrics, dense next to sparse.

    For each parameter, `target` is the fraction of weights that its mask prunes, and `actual` is counted from the
    weights. The target sparsity of the schedule is in the second table.

    Example:
        >>> from sparse_lightning.report.outcome import Row
        >>> rows = (Row("up.weight", (32, 16), "4×4", 512, 384, 384), Row("down.weight", (8, 32), "4×4", 256, 192, 192))
        >>> outcome = Outcome(rows, masks={}, target=0.75, actual=0.75, step=100)
        >>> print(results_table(outcome, {"dense": {"val_loss": 0.1}, "sparse": {"val_loss": 0.125}}))
        parameter    shape        block  target  actual
        -----------  -----------  -----  ------  ------
        up.weight    32×16        4×4    0.7500  0.7500
        down.weight  8×32         4×4    0.7500  0.7500
        all          768 weights         0.7500  0.7500
        <BLANKLINE>
        after 100 steps   dense  sparse
        ---------------  ------  ------
        target sparsity       -  0.7500
        actual sparsity       -  0.7500
        val_loss         0.1000  0.1250
    """
    rows = [(r.parameter, times(r.shape), r.block, f"{r.target:.4f}", f"{r.actual:.4f}") for r in outcome.rows]
    everything = aligned(HEADINGS, [*rows, _total(outcome)], numbers=HEADINGS[3:])
    return f"{everything}\n\n{_metrics(outcome, results, measured)}"


def _total(outcome: Outcome) -> tuple[str, ...]:
    masked, weights = (sum(getattr(row, name) for row in outcome.rows) for name in ("masked", "weights"))
    target, actual = masked / max(1, weights), outcome.zero / max(1, outcome.weights)
    return "all", f"{outcome.weights} weights", "", f"{target:.4f}", f"{actual:.4f}"


def _metrics(outcome: Outcome, results: Results, measured: Footprint | None) -> str:
    kinds = ["dense", "sparse"] if results.get("dense") or measured is not None else ["sparse"]
    names = shown_metrics(results)
    dash = ["-"] * (len(kinds) - 1)
    sparsity = [
        ["target sparsity", *dash, f"{outcome.target:.4f}"],
        ["actual sparsity", *dash, f"{outcome.actual:.4f}"],
    ]
    rows = [[name, *(number_text(results.get(kind, {}).get(name)) for kind in kinds)] for name in names]
    costs = [] if measured is None else measured.rows()
    return aligned([f"after {outcome.step} steps", *kinds], [*sparsity, *rows, *costs], numbers=kinds)


def shown_metrics(results: Results) -> list[str]:
    """Return the metrics to show: those of validation and test, or all metrics if there are none.

    Example:
        >>> shown_metrics({"sparse": {"train_loss": 0.2, "val_loss": 0.3, "val_accuracy": 0.9}})
        ['val_accuracy', 'val_loss']
    """
    names = sorted({name for metrics in results.values() for name in metrics})
    held_out = [name for name in names if name.startswith(("val", "test"))]
    return held_out or names


def main_metric(results: Results, preferred: str | None = None) -> str | None:
    """Return the main metric of a run: the preferred one if it was logged, else an accuracy, else any.

    Example:
        >>> main_metric({"sparse": {"val_loss": 0.3, "val_accuracy": 0.9}})
        'val_accuracy'
    """
    names = shown_metrics({"sparse": results.get("sparse", {})})
    accuracies = [name for name in names if "acc" in name]
    choices = [name for name in (preferred, *accuracies, *names) if name in results.get("sparse", {})]
    return choices[0] if choices else None


def higher_is_better(metric: str) -> bool:
    """Whether higher values of a metric are better, judged by its name."""
    return not any(word in metric for word in ("loss", "error", "perplexity", "mse", "mae"))


def number_text(value: float | None) -> str:
    """Return a number with four decimals, or three significant digits if it is small; a dash for None.

    Example:
        >>> number_text(0.97222), number_text(0.000012345), number_text(None)
        ('0.9722', '1.23e-05', '-')
    """
    if value is None:
        return "-"
    return f"{value:.3g}" if 0 < abs(value) < 0.001 else f"{value:.4f}"
