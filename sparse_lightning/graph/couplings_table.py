"""The tables of families and refusals that `print(couplings(model, inputs))` shows."""

from __future__ import annotations

from collections.abc import Sequence

from sparse_lightning.compat.plain_names import plain_name
from sparse_lightning.graph.families import Family, Refusal

_MANY = 4
"""Parameters of a refusal that are named; of the rest only the number is."""


def couplings_table(families: Sequence[Family], refusals: Sequence[Refusal]) -> str:
    """Return the families with the slices of their first units, then the refusals with their reasons."""
    rows = [[f.name, str(f.units), _lines(map(str, f.slices))] for f in families]
    text = _table(["family", "units", "slices of the first unit"], rows) if rows else "no family can be removed"
    if not refusals:
        return text
    rows = [[r.name, str(r.units), _some(r.parameters), str(r.reason)] for r in refusals]
    return f"{text}\n\n{_table(['refused', 'units', 'parameters', 'reason'], rows)}"


def _lines(items: object) -> str:
    return ", ".join(items)  # type: ignore[arg-type]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MANY} more" if len(names) > _MANY else ""
    return ", ".join(map(plain_name, names[:_MANY])) + more


def _table(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [head, ["─" * width for width in widths], *rows]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
