"""Pages of results: Markdown tables and plots that are readable on light and on dark ground."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

GREY = "#808080"
"""Of text and axes: readable on white and on black."""
COLOURS = ["#3b8ed8", "#7fb3e6", "#e07b39", "#2ca25f", "#c44e9b", "#b8a000", "#17a2b8", "#d9534f", "#8c7ae6"]


@dataclass(frozen=True)
class Table:
    """A table with a title."""

    title: str
    headings: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """Return it as Markdown."""
        lines = [self.headings, ["---"] * len(self.headings), *self.rows]
        return "\n".join([f"### {self.title}", "", *(f"| {' | '.join(line)} |" for line in lines), ""])


@dataclass(frozen=True)
class Plot:
    """Lines with error bars.

    Args:
        file: its name, without suffix.
        title: above it, and its text for who cannot see it.
        x: what the horizontal axis shows.
        y: what the vertical axis shows.
        lines: by name; points are x, y, and y's lowest and highest value.
        level: of a horizontal line, and its name.
        logarithmic: whether both axes are.
    """

    file: str
    title: str
    x: str
    y: str
    lines: dict[str, list[tuple[float, float, float, float]]]
    level: tuple[float, str] | None = None
    logarithmic: bool = False

    def write(self, folder: Path) -> str:
        """Write the plot as SVG; return its Markdown."""
        with rc_context({"svg.hashsalt": self.file, "svg.fonttype": "none", "font.size": 9}):
            figure = Figure(figsize=(6.4, 4), layout="constrained")
            self._draw(figure.add_subplot())
            figure.savefig(folder / f"{self.file}.svg", transparent=True, metadata={"Date": None})
        return f"![{self.title}: {self.y} over {self.x}]({self.file}.svg)\n"

    def _draw(self, axes: Axes) -> None:
        axes.set_title(self.title, color=GREY, fontsize=10)
        axes.set_xlabel(self.x, color=GREY)
        axes.set_ylabel(self.y, color=GREY)
        axes.tick_params(colors=GREY, which="both")
        for spine in axes.spines.values():
            spine.set_color(GREY)
        axes.grid(color=GREY, alpha=0.25)
        for i, (name, points) in enumerate(sorted(self.lines.items(), key=lambda item: "sparse_light" not in item[0])):
            x, y, low, high = (list(column) for column in zip(*sorted(points), strict=True))
            errors = [[a - b for a, b in zip(y, low, strict=True)], [b - a for a, b in zip(y, high, strict=True)]]
            colour, ours = COLOURS[i % len(COLOURS)], "sparse_light" in name
            axes.errorbar(x, y, errors, marker="o", ms=4, capsize=3, color=colour, lw=2.2 if ours else 1.2, label=name)
        if self.level is not None:
            axes.axhline(self.level[0], color=GREY, linestyle="--", lw=1, label=self.level[1])
        if self.logarithmic:
            axes.set_xscale("log")
            axes.set_yscale("log")
        axes.legend(fontsize=7, labelcolor=GREY, framealpha=0)


@dataclass(frozen=True)
class Page:
    """A page of one question.

    Args:
        name: of its file.
        text: how it begins: a title and what is measured.
        facts: what the figures depend on.
        tables: in order.
        plots: above the tables.
    """

    name: str
    text: str
    facts: list[str]
    tables: list[Table]
    plots: list[Plot]

    def write(self, folder: Path) -> None:
        """Write the page and its plots."""
        images = [plot.write(folder) for plot in self.plots]
        lines = [f"- {fact}" for fact in self.facts]
        parts = [self.text.strip(), "", *lines, "", *images, *(table.markdown() for table in self.tables)]
        (folder / f"{self.name}.md").write_text("\n".join(parts).rstrip() + "\n", "utf-8")


def enumerated(words: Iterable[str]) -> str:
    """Return words with commas and "and" between them.

    Example:
        >>> enumerated(["a", "b", "c"])
        'a, b and c'
    """
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
