"""table: blocks and scopes as plain text, one line for each tiled parameter or view."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sparse_lightning.blocks.scope import ScopeSpec, SparseScope
from sparse_lightning.blocks.sparse_block import SparseBlock
from sparse_lightning.blocks.spec import BlockSpec
from sparse_lightning.blocks.view import View
from sparse_lightning.layout import Layout

HEADINGS = ("name", "of", "parameter", "view", "block", "grid", "scope", "scopes", "blocks/scope", "weights/block")
NUMBERS = ("scopes", "blocks/scope", "weights/block")


def table(scopes: Iterable[SparseScope]) -> str:
    """Return an aligned table of scopes and of the blocks that compete in them.

    A coupling has one line for each of its members; values common to all of them are in the first line only.
    A view is "whole" if it is the parameter itself; otherwise its shape, strides and offset are listed.
    `scope` and `grid` are in blocks.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.randn(8, 16))
        >>> print(table([ScopeSpec(BlockSpec(weight, (1, 1), name="fc"), (1, 4), name="2:4")]))
        name  of  parameter  view   block  grid  scope  scopes  blocks/scope  weights/block
        ----  --  ---------  -----  -----  ----  -----  ------  ------------  -------------
        2:4   fc  8×16       whole  1×1    8×16  1×4        32             4              1
    """
    return aligned(HEADINGS, [row for scope in scopes for row in _scope_rows(scope)], NUMBERS)


def aligned(headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str] = ()) -> str:
    """Return rows of text below their headings, in aligned columns; numbers are right-aligned.

    Example:
        >>> print(aligned(["name", "n"], [["up", "12"]], numbers=["n"]))
        name   n
        ----  --
        up    12
    """
    widths = [max(len(row[i]) for row in [headings, *rows]) for i in range(len(headings))]
    lines = []
    for row in [headings, ["-" * n for n in widths], *rows]:
        cells = zip(headings, row, widths, strict=True)
        texts = [text.rjust(n) if title in numbers else text.ljust(n) for title, text, n in cells]
        lines.append("  ".join(texts).rstrip())
    return "\n".join(lines)


def _scope_rows(scope: SparseScope) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for member in scope.members():
        for row in _member_rows(member):
            first = not rows
            counts = (str(scope.numscp()), str(scope.numblk_per_scope())) if first else ("", "")
            rows.append((scope.name or "-" if first else "", *row[:6], *counts, row[6]))
    return rows


def _member_rows(member: ScopeSpec) -> list[tuple[str, ...]]:
    shared = (times(member.shape), str(member.block.numel_per_block()))
    cells = [(*_spec_cells(spec, member.block), *shared) for spec in member.block.blocks()]
    return [cells[0], *((*row[:5], "", "") for row in cells[1:])]


def _spec_cells(spec: BlockSpec, block: SparseBlock) -> tuple[str, ...]:
    name = spec.name or block.name or "-"
    return name, times(spec.param.shape), view_text(spec.view), times(spec.shape), times(spec.grid_shape)


def times(shape: Sequence[int]) -> str:
    """Return a shape as text.

    Example:
        >>> times((32, 16))
        '32×16'
    """
    return "×".join(map(str, shape)) or "()"


def view_text(view: View) -> str:
    """Return a view as text: "whole" for the parameter itself, otherwise its shape, strides and offset.

    Example:
        >>> import torch
        >>> view_text(View(torch.empty(8, 16), (8, 8), (16, -1), offset=7))
        '8×8 by 16,-1 at 7'
    """
    base, layout = Layout.of(view.param), view.layout
    if layout == base:
        return "whole"
    place = f" at {layout.offset - base.offset}" if layout.offset != base.offset else ""
    return f"{times(layout.shape)} by {','.join(map(str, layout.stride))}{place}"
