"""summary: a plain-text table of the parameters that patterns have found, with their blocks and scopes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from sparse_lightning.blocks.table import aligned, times, view_text
from sparse_lightning.patterns.pattern import NamedScope

_HEADINGS = ("pattern", "parameter", "view", "block", "grid", "scope")


def summary(
    attachments: Iterable[NamedScope], budgets: Mapping[str, str] | None = None, passed_over: Sequence[str] = ()
) -> str:
    """Return a table with a line for each parameter, or for each of its views.

    Columns that hold for a whole coupling are filled in its first line only. `grid` and `scope` are in blocks.

    Args:
        attachments: from `resolve`.
        budgets: the final sparsity of each attachment by name, for one more column.
        passed_over: the names of parameters that match and have fewer dimensions than the block, for a line below.

    Example:
        >>> from torch import nn
        >>> from sparse_lightning.patterns import Neurons, resolve
        >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> print(summary(resolve([Neurons("0", "2")], mlp), budgets={"0 (neurons)": "0.5"}))
        pattern  parameter     view        block  grid  scope  budget
        -------  ------------  ----------  -----  ----  -----  ------
        neurons  0.weight 8×4  whole       1×4    8×1   8×1       0.5
                 0.bias 8      8×1 by 1,1  1×1    8×1
                 2.weight 4×8  8×4 by 1,8  1×4    8×1
    """
    rows = [row for attachment in attachments for row in _rows(attachment, budgets)]
    if budgets is None:
        table = aligned(_HEADINGS, [row[:-1] for row in rows])
    else:
        table = aligned((*_HEADINGS, "budget"), rows, numbers=("budget",))
    return f"{table}\n{_below(passed_over)}" if passed_over else table


def _below(passed_over: Sequence[str]) -> str:
    """Return a line with names, those that differ by a number once.

    Example:
        >>> _below(["layers.0.norm.weight", "layers.1.norm.weight", "head.bias"])
        'passed over, with fewer dimensions than the block: layers.*.norm.weight (2), head.bias'
    """
    alike = Counter(".".join("*" if part.isdigit() else part for part in name.split(".")) for name in passed_over)
    texts = [f"{name} ({count})" if count > 1 else name for name, count in alike.items()]
    return f"passed over, with fewer dimensions than the block: {', '.join(texts)}"


def _rows(attachment: NamedScope, budgets: Mapping[str, str] | None) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    budget = (budgets or {}).get(attachment.name)
    for member in attachment.scope.members():
        for i, spec in enumerate(member.block.blocks()):
            name = spec.name or member.block.name or attachment.name
            own = (f"{name} {times(spec.param.shape)}", view_text(spec.view), times(spec.shape), times(spec.grid_shape))
            label, sparsity = ("", "") if rows else (attachment.pattern, "-" if budget is None else budget)
            rows.append((label, *own, "" if i else times(member.shape), sparsity))
    return rows
