"""Charts of a page: lines as inline SVG, with a legend, a reading under the pointer, and a table of their numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from sparse_lightning.report.mask_images import evenly_spaced
from sparse_lightning.report.page.axes import tick_texts, ticks
from sparse_lightning.report.page.markup import Markup, element
from sparse_lightning.report.results_table import number_text

WIDTH, HEIGHT = 460, 260
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 10, 36
"""The margins around the lines."""

STEP = "optimizer step"
"""The title of an axis of steps, which starts at 0."""

COLOURS, LISTED_POINTS = 8, 30
"""Colours of lines in style.css; points of a line in the table below a chart, at most."""


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Args:
        label: its name.
        x: the position of each point.
        y: the value of each point; None and numbers that are not finite leave a gap.
        colour: the number of its colour.
        kind: "line", "steps", which stay until the next point, or "points" with markers; "faint" for a pale line.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    colour: int = 0
    kind: str = "line"

    def points(self) -> list[tuple[float, float]]:
        """Return the points that have a finite value."""
        pairs = zip(self.x, self.y, strict=True)
        return [(x, float(y)) for x, y in pairs if y is not None and math.isfinite(y) and math.isfinite(x)]


@dataclass(frozen=True)
class Chart:
    """Lines over a common axis.

    Args:
        title: what the values are.
        x_title: what the positions are.
        lines: the lines; those without points are left out.
        is_fraction: whether values are percentages, from 0 to at least 1.
        x_is_fraction: whether positions are percentages.
        level: the label and value of a horizontal reference line.
    """

    title: str
    x_title: str
    lines: Sequence[Line]
    is_fraction: bool = False
    x_is_fraction: bool = False
    level: tuple[str, float] | None = None


def draw(chart: Chart) -> Markup:
    """Return a chart as a figure; an empty text if no line has points."""
    lines = [line for line in chart.lines if line.points()]
    if not lines:
        return Markup()
    scale = _Scale.of(chart, lines)
    drawing = element(
        "svg",
        element("title", _described(chart, lines)),
        *scale.grid(chart),
        *([] if chart.level is None else [scale.level(chart.level[1])]),
        *(scale.path(line) for line in lines),
        element("line", class_="cursor", y1=TOP, y2=HEIGHT - BOTTOM, visibility="hidden"),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
    )
    return element(
        "figure",
        element("figcaption", chart.title),
        drawing,
        _legend(chart, lines),
        element("p", class_="reading", aria_hidden="true"),
        _numbers(chart, lines),
        class_="chart",
        data_lines=json.dumps(scale.pixels(lines)),
        data_x=chart.x_title,
    )


@dataclass(frozen=True)
class _Scale:
    """Positions and values as pixels."""

    x: tuple[float, float]
    y: list[float]

    @staticmethod
    def of(chart: Chart, lines: Sequence[Line]) -> _Scale:
        xs, ys = zip(*(point for line in lines for point in line.points()), strict=True)
        values = [*ys, *([] if chart.level is None else [chart.level[1]]), *([0.0, 1.0] if chart.is_fraction else [])]
        low, high = (0.0 if chart.x_title == STEP else min(xs)), max(xs)
        margin = 0.0 if chart.x_title == STEP else 0.05 * (high - low)
        spread = (low - margin, high + margin) if high > low else (low - 0.5, high + 0.5)
        return _Scale(spread, ticks(min(values), max(values)))

    def at(self, x: float, y: float) -> tuple[float, float]:
        (low, high), bottom, top = self.x, self.y[0], self.y[-1]
        right = LEFT + (x - low) / (high - low) * (WIDTH - LEFT - RIGHT)
        return round(right, 1), round(TOP + (top - y) / (top - bottom) * (HEIGHT - TOP - BOTTOM), 1)

    def grid(self, chart: Chart) -> list[Markup]:
        """Return horizontal lines with their values, and positions below."""
        found = []
        for value, text in zip(self.y, tick_texts(self.y, chart.is_fraction), strict=True):
            _, y = self.at(self.x[0], value)
            found.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"))
            found.append(element("text", text, x=LEFT - 6, y=y + 4, class_="end"))
        places = [x for x in ticks(*self.x) if self.x[0] <= x <= self.x[1]]
        for place, text in zip(places, tick_texts(places, chart.x_is_fraction), strict=True):
            found.append(element("text", text, x=self.at(place, 0)[0], y=HEIGHT - BOTTOM + 16, class_="middle"))
        middle = (LEFT + WIDTH - RIGHT) / 2
        return [*found, element("text", chart.x_title, x=middle, y=HEIGHT - 4, class_="middle title")]

    def level(self, value: float) -> Markup:
        _, y = self.at(self.x[0], value)
        return element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="level")

    def path(self, line: Line) -> Markup:
        places = [self.at(*point) for point in line.points()]
        moves = [f"M{places[0][0]} {places[0][1]}"]
        for x, y in places[1:]:
            moves.append(f"H{x}V{y}" if line.kind == "steps" else f"L{x} {y}")
        shape = element("path", d="".join(moves), class_=f"line c{line.colour % COLOURS} {line.kind}")
        few = line.kind == "points" or len(places) == 1
        dots = [element("circle", cx=x, cy=y, r=4, class_=f"c{line.colour % COLOURS}") for x, y in places if few]
        return element("g", shape, *dots)

    def pixels(self, lines: Sequence[Line]) -> list[list[object]]:
        """Return for each line its label and its points, as pixel, position and value."""
        found: list[list[object]] = []
        for line in lines:
            points = [[self.at(x, y)[0], x, number_text(y)] for x, y in line.points()]
            found.append([line.label, points])
        return found


def _legend(chart: Chart, lines: Sequence[Line]) -> Markup:
    labels = [(line.label, f"line c{line.colour % COLOURS} {line.kind}") for line in lines]
    labels += [] if chart.level is None else [(f"{chart.level[0]} {number_text(chart.level[1])}", "level")]
    items = []
    for label, kind in labels:
        stroke = element("path", d="M0 5H22", class_=kind)
        sample = element("svg", stroke, viewBox="0 0 22 10", class_="sample", aria_hidden="true")
        items.append(element("li", sample, label))
    return element("ul", *items, class_="legend")


def _described(chart: Chart, lines: Sequence[Line]) -> str:
    """Return a sentence for a screen reader: where each line starts and ends."""
    texts = []
    for line in lines:
        points = line.points()
        texts.append(f"{line.label} from {number_text(points[0][1])} to {number_text(points[-1][1])}")
    return f"{chart.title} over {chart.x_title}: {'; '.join(texts)}."


def _numbers(chart: Chart, lines: Sequence[Line]) -> Markup:
    """Return a folded table of points of all lines, evenly spaced."""
    rows = [
        element("tr", element("th", line.label, scope="row"), element("td", f"{x:g}"), element("td", number_text(y)))
        for line in lines
        for x, y in evenly_spaced(line.points(), LISTED_POINTS)
    ]
    top = [element("th", text, scope="col") for text in ("line", chart.x_title, chart.title)]
    inside = element("table", element("thead", element("tr", *top)), element("tbody", *rows))
    return element("details", element("summary", "Numbers"), element("div", inside, class_="scroll", tabindex=0))
