"""The figure of a sweep: the metric over sparsity, with a line for each combination of other choices."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from sparse_lightning.drawing import COLOURS
from sparse_lightning.report.figures import GREY, new_figure, style_axes
from sparse_lightning.report.runs import SweepRun

MARKERS = "osD^vP*X"
Points = list[tuple[float, float]]


def draw_sweep(runs: Sequence[SweepRun], choices: Sequence[str], metric: str | None) -> Figure:
    """Draw the metric of each finished run over its actual sparsity.

    Args:
        runs: all runs of the sweep.
        choices: the keys whose values differ between runs.
        metric: the metric to draw.
    """
    figure = new_figure(6.4, 4.0)
    axes = style_axes(figure.add_subplot())
    axes.set_xlabel("sparsity, counted from the weights", fontsize=9)
    axes.set_ylabel(metric or "no metric was logged", fontsize=9)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    lines = lines_of(runs, choices, metric)
    for number, (label, points) in enumerate(lines.items()):
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number // len(COLOURS) % len(MARKERS)]
        x, y = zip(*points, strict=True)
        axes.plot(x, y, color=colour, marker=marker, markersize=5, linewidth=1.4, label=label)
    _draw_dense(axes, runs, metric)
    _label(figure, axes, runs, drawn=sum(map(len, lines.values())))
    return figure


def lines_of(runs: Sequence[SweepRun], choices: Sequence[str], metric: str | None) -> dict[str, Points]:
    """Return the points of each combination of choices other than the sparsity, sorted by sparsity."""
    others = [key for key in choices if not _is_sparsity(key, runs)]
    lines: dict[str, Points] = {}
    for run in runs:
        x, y = run.number("actual"), run.metric("sparse", metric)
        if x is not None and y is not None:
            lines.setdefault(_choice_text(run, others), []).append((x, y))
    return {label: sorted(points) for label, points in lines.items()}


def _choice_text(run: SweepRun, keys: Sequence[str]) -> str:
    """Return the value of a single key, as in "taylor"; numbers and several keys with the names of the keys."""
    if len(keys) == 1 and not _is_number(run.choices.get(keys[0], "")):
        return run.choices.get(keys[0]) or "default"
    return ", ".join(f"{key}={run.choices.get(key, 'default')}" for key in keys) or "sparse"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_sparsity(key: str, runs: Sequence[SweepRun]) -> bool:
    """Whether a key is the sparsity: by its name, or because it equals the target in every finished run."""
    if key == "schedule.final":
        return True
    pairs = [(run.choices.get(key, ""), run.number("target")) for run in runs if not run.has_failed]
    return bool(pairs) and all(
        _is_number(text) and target is not None and math.isclose(float(text), target, abs_tol=1e-6)
        for text, target in pairs
    )


def _draw_dense(axes: Axes, runs: Sequence[SweepRun], metric: str | None) -> None:
    """Draw a line at the mean metric of the dense models."""
    known = [value for run in runs if (value := run.metric("dense", metric)) is not None]
    if known:
        axes.axhline(sum(known) / len(known), color=GREY, linestyle="--", linewidth=1, label="dense", zorder=1)


def _label(figure: Figure, axes: Axes, runs: Sequence[SweepRun], drawn: int) -> None:
    if not drawn:
        axes.text(
            0.5, 0.5, "no run has both a sparsity and a metric", transform=axes.transAxes, ha="center", color=GREY
        )
    failed = sum(run.has_failed for run in runs)
    notes = [f"{drawn} of {len(runs)} runs"] + ([f"{failed} failed"] if failed else [])
    axes.set_title(", ".join(notes), loc="left", fontsize=9)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
