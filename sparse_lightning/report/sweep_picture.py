"""The picture of a sweep: the metric over sparsity, a line for each other choice."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from sparse_lightning.drawing import COLOURS
from sparse_lightning.report.page import GREY, blank, plain_axes
from sparse_lightning.report.runs import Run

MARKERS = "osD^vP*X"
Points = list[tuple[float, float]]


def draw_sweep(runs: Sequence[Run], choices: Sequence[str], metric: str | None) -> Figure:
    """A point for each run that has ended, over the sparsity that was counted from its weights.

    Args:
        runs: all runs of the sweep.
        choices: the keys that differ between them.
        metric: the metric to draw.
    """
    figure = blank(6.4, 4.0)
    axes = plain_axes(figure.add_subplot())
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


def lines_of(runs: Sequence[Run], choices: Sequence[str], metric: str | None) -> dict[str, Points]:
    """For each choice other than the sparsity its points, in the order of their sparsity."""
    others = [key for key in choices if not _is_sparsity(key, runs)]
    lines: dict[str, Points] = {}
    for run in runs:
        x, y = run.number("actual"), run.metric("sparse", metric)
        if x is not None and y is not None:
            lines.setdefault(_choice_text(run, others), []).append((x, y))
    return {label: sorted(points) for label, points in lines.items()}


def _choice_text(run: Run, keys: Sequence[str]) -> str:
    """Values alone where one key says it all, as in "taylor"; numbers and several keys with their names."""
    if len(keys) == 1 and not _is_number(run.choices.get(keys[0], "")):
        return run.choices.get(keys[0]) or "default"
    return ", ".join(f"{key}={run.choices.get(key, 'default')}" for key in keys) or "sparse"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_sparsity(key: str, runs: Sequence[Run]) -> bool:
    """Whether a choice is that of the sparsity: by its name, or since it is the target in every run that has ended."""
    if key == "schedule.final":
        return True
    pairs = [(run.choices.get(key, ""), run.number("target")) for run in runs if not run.has_failed]
    return bool(pairs) and all(
        _is_number(text) and target is not None and math.isclose(float(text), target, abs_tol=1e-6)
        for text, target in pairs
    )


def _draw_dense(axes: Axes, runs: Sequence[Run], metric: str | None) -> None:
    """A line at what dense models reach: their mean, where runs have trained several."""
    known = [value for run in runs if (value := run.metric("dense", metric)) is not None]
    if known:
        axes.axhline(sum(known) / len(known), color=GREY, linestyle="--", linewidth=1, label="dense", zorder=1)


def _label(figure: Figure, axes: Axes, runs: Sequence[Run], drawn: int) -> None:
    if not drawn:
        axes.text(0.5, 0.5, "no run has a point to draw", transform=axes.transAxes, ha="center", color=GREY)
    failed = sum(run.has_failed for run in runs)
    notes = [f"{drawn} of {len(runs)} runs"] + ([f"{failed} failed"] if failed else [])
    axes.set_title(", ".join(notes), loc="left", fontsize=9)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
