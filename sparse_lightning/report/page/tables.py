"""Tables of a page: they scroll inside of themselves where a screen is narrow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sparse_lightning.report.page.markup import Markup, element
from sparse_lightning.report.results_table import number_text

OPEN_ROWS = 24
"""Tables with more rows are folded."""

MAX_CELL = 200
"""Characters of a value that is not a number or a text, at most."""


def table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str] = ()) -> Markup:
    """Return a table; the first cell of each row is its heading. A long one is folded.

    Args:
        caption: what it shows, for a screen reader and the line that unfolds it.
        headings: of the columns.
        rows: of cells: text, or Markup of a `<td>`.
        numbers: the headings of the columns with numbers.
    """
    kinds = ["number" if heading in numbers else None for heading in headings]
    top = [element("th", text, scope="col", class_=kind) for text, kind in zip(headings, kinds, strict=True)]
    body = [element("tr", element("th", row[0], scope="row"), *map(_cell, row[1:], kinds[1:])) for row in rows]
    whole = element(
        "table",
        element("caption", caption, class_="hidden"),
        element("thead", element("tr", *top)),
        element("tbody", *body),
    )
    scrolling = element("div", whole, class_="scroll", tabindex=0, role="region", aria_label=caption)
    if len(rows) <= OPEN_ROWS:
        return scrolling
    return element("details", element("summary", f"{caption} ({len(rows)} rows)"), scrolling)


def number_cell(value: float | None, key: str) -> Markup:
    """Return a cell with a number of results.json.

    Args:
        value: the number; None becomes a dash.
        key: its place in results.json, such as "sparse.val_loss".
    """
    return element("td", number_text(value), class_="number", data_key=key)


def count_cell(value: int, key: str) -> Markup:
    """Return a cell with a whole number of results.json, at the place `key` there."""
    return element("td", f"{value:,}", class_="number", data_key=key)


def bar_cell(fraction: float) -> Markup:
    """Return a cell with a bar from 0 to 1 and its percentage."""
    width = round(100 * min(1.0, max(0.0, fraction)), 2)
    bar = element("svg", element("rect", width=width, height=8), viewBox="0 0 100 8", class_="bar", aria_hidden="true")
    return element("td", bar, f"{fraction:.1%}", class_="number")


def anything(caption: str, value: Any) -> Markup:
    """Return any value of results.json as a table: mappings of mappings, lists of mappings, or plain values.

    Example:
        >>> "<td" in anything("exports", {"compact": {"bytes": 12, "ms": 0.5}})
        True
    """
    if isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value):
        value = {str(row.get("name", i)): row for i, row in enumerate(value, 1)}
    if not isinstance(value, Mapping):
        value = {caption: value}
    if value and all(isinstance(row, Mapping) for row in value.values()):
        names = list(dict.fromkeys(str(name) for row in value.values() for name in row if name != "name"))
        rows = [[str(title), *(_text(row.get(name)) for name in names)] for title, row in value.items()]
        return table(caption, [caption, *names], rows, numbers=names)
    return table(caption, [caption, "value"], [[str(k), _text(v)] for k, v in value.items()], numbers=["value"])


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return number_text(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text = "-" if value is None else json.dumps(value)
    return text if len(text) <= MAX_CELL else f"{text[:MAX_CELL]}…"


def _cell(cell: str, kind: str | None) -> Markup:
    is_cell = isinstance(cell, Markup) and cell.startswith("<td")
    return cell if is_cell and isinstance(cell, Markup) else element("td", cell, class_=kind)
