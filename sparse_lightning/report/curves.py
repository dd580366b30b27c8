"""Curves: target sparsity, actual sparsity and training loss over the steps of a run."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from sparse_lightning.drawing.block_map import Image
from sparse_lightning.report.figures import BLUE, ORANGE, RED, new_figure, style_axes
from sparse_lightning.report.history import History

SMOOTH_FROM, SMOOTH_PARTS = 40, 25
"""The number of losses from which on a running mean is drawn, and the number of its windows in a run."""


def draw_curves(history: History) -> Figure:
    """Draw target and actual sparsity on the left axis, and the training loss on the right one.

    The actual sparsity is constant between updates, and drawn as steps. Many losses are drawn pale, with their running
    mean.

    Args:
        history: the record of the run.
    """
    figure = new_figure(7.2, 3.8)
    axes = style_axes(figure.add_subplot())
    axes.set_xlabel("optimizer step", fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    behind = axes.twinx()
    _draw_loss(behind, history)
    _draw_sparsity(axes, history)
    # Sparsity is what the figure is about: draw it over the loss.
    axes.set_zorder(behind.get_zorder() + 1)
    axes.patch.set_visible(False)
    lines = {str(line.get_label()): line for line in (*axes.get_lines(), *behind.get_lines())}
    named = {label: line for label, line in lines.items() if not label.startswith("_")}
    if named:
        handles = list(named.values()), list(named)
        figure.legend(*handles, loc="outside upper left", ncols=len(named), frameon=False, fontsize=9)
    return figure


def _draw_sparsity(axes: Axes, history: History) -> None:
    axes.set_ylabel("sparsity", fontsize=9, color=BLUE)
    axes.set_ylim(0, 1.02)
    axes.set_yticks(np.linspace(0, 1, 6))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.tick_params(axis="y", colors=BLUE)
    if not history.steps:
        return
    axes.fill_between(history.steps, history.actual, step="post", color=BLUE, alpha=0.12, linewidth=0)
    actual, target = f"actual sparsity, {history.actual[-1]:.1%} at the end", f"target, {history.target[-1]:.1%}"
    axes.plot(history.steps, history.actual, color=BLUE, linewidth=1.8, drawstyle="steps-post", label=actual)
    dots = "o" if len(history.steps) <= 60 else ""
    axes.plot(history.steps, history.target, f"{dots}--", color=ORANGE, linewidth=1.2, markersize=3, label=target)


def _draw_loss(axes: Axes, history: History) -> None:
    axes.spines[["top", "left"]].set_visible(False)
    if not history.loss:
        axes.set_yticks([])
        return
    axes.set_ylabel("training loss", fontsize=9, color=RED)
    axes.tick_params(axis="y", labelsize=8, length=2, colors=RED)
    losses: Image = np.array([x if math.isfinite(x) else math.nan for x in history.loss])
    steps, many = history.loss_steps, len(losses) >= SMOOTH_FROM
    label, alpha = ("_each", 0.3) if many else ("training loss", 1.0)
    axes.plot(steps, losses, color=RED, linewidth=0.9, alpha=alpha, label=label)
    if many:
        window = max(2, len(losses) // SMOOTH_PARTS)
        axes.plot(steps, running_mean(losses, window), color=RED, linewidth=1.3, label="training loss, running mean")
    finite = losses[np.isfinite(losses)]
    if finite.size:
        low = min(0.0, float(finite.min()))
        axes.set_ylim(low, low + 1.02 * max(float(finite.max()) - low, 1e-12))


def running_mean(values: Image, window: int) -> Image:
    """Return the mean over a window that ends at each value; values that are not finite are skipped.

    Example:
        >>> running_mean(np.array([4.0, 2.0, np.nan, 1.0]), 2).tolist()
        [4.0, 3.0, 2.0, 1.0]
    """
    finite = np.isfinite(values)
    sums, counts = (np.cumsum(np.concatenate([[0.0], x])) for x in (np.where(finite, values, 0.0), finite))
    low = np.maximum(np.arange(len(values)) + 1 - window, 0)
    count = counts[1:] - counts[low]
    total = sums[1:] - sums[low]
    mean: Image = np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)
    return mean
