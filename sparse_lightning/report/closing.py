"""The closing table: what was asked for, what is there, and what it costs; as plain text."""

from __future__ import annotations

from collections.abc import Mapping

from sparse_lightning.report.outcome import Outcome, Row
from sparse_lightning.table import aligned, times

Results = Mapping[str, Mapping[str, float]]
"""Metrics by name, of the "sparse" model, and of the "dense" one where there is one."""

HEADINGS = ("parameter", "shape", "block", "target", "actual")


def closing_table(outcome: Outcome, results: Results) -> str:
    """The table of parameters, and below it the metrics, dense beside sparse.

    `target` is what the mask of each parameter prunes, `actual` what is counted from the weights. Below stands what
    the schedule asked for in all.

    Example:
        >>> rows = (Row("up.weight", (32, 16), "4×4", 512, 384, 384), Row("down.weight", (8, 32), "4×4", 256, 192, 192))
        >>> outcome = Outcome(rows, masks={}, target=0.75, actual=0.75, step=100)
        >>> print(closing_table(outcome, {"dense": {"val_loss": 0.1}, "sparse": {"val_loss": 0.125}}))
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
    return f"{everything}\n\n{_metrics(outcome, results)}"


def _total(outcome: Outcome) -> tuple[str, ...]:
    sums = [sum(getattr(row, name) for row in outcome.rows) for name in ("weights", "masked", "zero")]
    total = Row("all", (), "", *sums)
    return "all", f"{total.weights} weights", "", f"{total.target:.4f}", f"{total.actual:.4f}"


def _metrics(outcome: Outcome, results: Results) -> str:
    kinds = ["dense", "sparse"] if results.get("dense") else ["sparse"]
    names = shown(results)
    dash = ["-"] * (len(kinds) - 1)
    whole = [["target sparsity", *dash, f"{outcome.target:.4f}"], ["actual sparsity", *dash, f"{outcome.actual:.4f}"]]
    rows = [[name, *(number_text(results.get(kind, {}).get(name)) for kind in kinds)] for name in names]
    return aligned([f"after {outcome.step} steps", *kinds], [*whole, *rows], numbers=kinds)


def shown(results: Results) -> list[str]:
    """The metrics that the table shows: those of validation and test, or all where there are none of them.

    Example:
        >>> shown({"sparse": {"train_loss": 0.2, "val_loss": 0.3, "val_accuracy": 0.9}})
        ['val_accuracy', 'val_loss']
    """
    names = sorted({name for metrics in results.values() for name in metrics})
    held_out = [name for name in names if name.startswith(("val", "test"))]
    return held_out or names


def main_metric(results: Results, preferred: str | None = None) -> str | None:
    """The metric that a run is judged by: the preferred one if it was measured, else an accuracy, else any.

    Example:
        >>> main_metric({"sparse": {"val_loss": 0.3, "val_accuracy": 0.9}})
        'val_accuracy'
    """
    names = shown({"sparse": results.get("sparse", {})})
    accuracies = [name for name in names if "acc" in name]
    choices = [name for name in (preferred, *accuracies, *names) if name in results.get("sparse", {})]
    return choices[0] if choices else None


def higher_is_better(metric: str) -> bool:
    """Whether a metric of this name is better when it is higher, as far as the name tells."""
    return not any(word in metric for word in ("loss", "error", "perplexity", "mse", "mae"))


def number_text(value: float | None) -> str:
    """A number for a table: four decimals, or as many as a small one needs; a dash for none.

    Example:
        >>> number_text(0.97222), number_text(0.000012345), number_text(None)
        ('0.9722', '1.23e-05', '-')
    """
    if value is None:
        return "-"
    return f"{value:.3g}" if 0 < abs(value) < 0.001 else f"{value:.4f}"
