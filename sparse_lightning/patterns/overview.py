"""summary: what patterns have attached, as plain text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sparse_lightning.patterns.pattern import Attachment
from sparse_lightning.table import aligned, times, view_text

_HEADINGS = ("pattern", "parameter", "view", "block", "grid", "scope")


def summary(attachments: Iterable[Attachment], budgets: Mapping[str, str] | None = None) -> str:
    """The table of attachments: a line for each parameter, or for each of its views.

    What holds for all members of a coupling stands in its first line. `grid` and `scope` count blocks.

    Args:
        attachments: from `resolve`.
        budgets: the sparsity of each attachment by its name, for one more column.

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
        return aligned(_HEADINGS, [row[:-1] for row in rows])
    return aligned((*_HEADINGS, "budget"), rows, numbers=("budget",))


def _rows(attachment: Attachment, budgets: Mapping[str, str] | None) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    budget = (budgets or {}).get(attachment.name)
    for member in attachment.scope.members():
        for i, spec in enumerate(member.block.blocks()):
            name = spec.name or member.block.name or attachment.name
            own = (f"{name} {times(spec.param.shape)}", view_text(spec.view), times(spec.shape), times(spec.grid_shape))
            label, share = ("", "") if rows else (attachment.pattern, "-" if budget is None else budget)
            rows.append((label, *own, "" if i else times(member.shape), share))
    return rows
