"""Pages: figures without pyplot, so that nothing has to be closed, and how they become files or pixels."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from sparse_lightning.panel import Image

BLUE, ORANGE, RED, GREY = "#2f5d8c", "#f28e2b", "#c8434a", "#8a8a8a"
"""Sparsity as it is, as it was asked for, loss, and what stands behind."""


def blank(width: float, height: float) -> Figure:
    """An empty figure of so many inches."""
    figure = Figure(figsize=(width, height), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.06))
    FigureCanvasAgg(figure)
    return figure


def plain_axes(axes: Axes) -> Axes:
    """Axes without a box, with faint lines behind."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, length=2)
    return axes


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG."""
    figure.savefig(path, format="png")


def pixels(figure: Figure) -> Image:
    """A figure as `(height, width, 3)` bytes."""
    buffer = BytesIO()
    figure.savefig(buffer, format="raw")
    width, height = figure.canvas.get_width_height()
    return np.frombuffer(buffer.getvalue(), dtype=np.uint8).reshape(height, width, 4)[..., :3].copy()
