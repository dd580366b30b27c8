"""Figures without pyplot, which need not be closed, and their conversion to files and pixels."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from sparse_lightning.drawing.block_map import Image

BLUE, ORANGE, RED, GREY = "#2f5d8c", "#f28e2b", "#c8434a", "#8a8a8a"
"""Actual sparsity, target sparsity, training loss, and reference lines."""


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure; sizes are in inches."""
    figure = Figure(figsize=(width, height), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.06))
    FigureCanvasAgg(figure)
    return figure


def style_axes(axes: Axes) -> Axes:
    """Remove the box of axes and add a faint grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, length=2)
    return axes


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG file."""
    figure.savefig(path, format="png")


def pixels(figure: Figure) -> Image:
    """Return a figure as `(height, width, 3)` bytes."""
    buffer = BytesIO()
    figure.savefig(buffer, format="raw")
    width, height = figure.canvas.get_width_height()
    return np.frombuffer(buffer.getvalue(), dtype=np.uint8).reshape(height, width, 4)[..., :3].copy()
