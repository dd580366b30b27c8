"""table: the plain text that lists blocks and scopes."""

from __future__ import annotations

import pytest
import torch

from sparse_lightning import BlockSpec, ScopeSpec, SparsityBuilder, View
from sparse_lightning.blocks.table import HEADINGS, table, times, view_text


def rows_of(text: str) -> list[dict[str, str]]:
    """The table read back by the columns that its dashes mark."""
    _, rule, *lines = text.splitlines()
    starts = [i for i, c in enumerate(rule) if c == "-" and (i == 0 or rule[i - 1] == " ")]
    ends = [*starts[1:], None]
    return [{h: line[a:b].strip() for h, a, b in zip(HEADINGS, starts, ends, strict=True)} for line in lines]


def test_a_scope_takes_one_line():
    block = BlockSpec(torch.zeros(64, 32), (4, 8), name="fc.weight")
    (row,) = rows_of(table([ScopeSpec(block, (1, -1), name="balanced")]))
    assert row == {
        "name": "balanced",
        "of": "fc.weight",
        "parameter": "64×32",
        "view": "whole",
        "block": "4×8",
        "grid": "16×4",
        "scope": "1×4",
        "scopes": "16",
        "blocks/scope": "4",
        "weights/block": "32",
    }


def test_coupled_blocks_take_a_line_each_and_count_their_weights_together():
    builder = SparsityBuilder()
    builder.add_block("up", torch.zeros(8, 4), (1, -1)).add_block("down", torch.zeros(2, 8), (-1, 1))
    builder.couple_blocks("neurons", ["up", "down"], orders=[None, (1, 0)]).add_scope("mlp", "neurons")
    up, down = rows_of(table(builder.get_all_scopes()))
    assert (up["name"], up["of"], up["scopes"], up["blocks/scope"], up["weights/block"]) == ("mlp", "up", "1", "8", "6")
    assert (down["name"], down["of"], down["grid"], down["scopes"], down["weights/block"]) == (
        "",
        "down",
        "1×8",
        "",
        "",
    )


def test_coupled_scopes_share_their_count_and_keep_their_block_sizes():
    builder = SparsityBuilder()
    builder.add_block("a", torch.zeros(4, 8), (1, 2)).add_block("b", torch.zeros(4, 6), (2, 3))
    builder.add_scope("sa", "a").add_scope("sb", "b").couple_scopes("both", ["sa", "sb"])
    first, second = rows_of(table(builder.get_all_scopes()))
    assert (first["name"], first["blocks/scope"], first["weights/block"]) == ("both", "20", "2")
    assert (second["of"], second["scope"], second["blocks/scope"], second["weights/block"]) == ("b", "2×2", "", "6")


def test_nameless_blocks_and_no_scopes():
    assert rows_of(table([ScopeSpec(BlockSpec(torch.zeros(4), (2,)))]))[0]["name"] == "-"
    assert rows_of(table([])) == []


def test_lines_are_aligned_and_do_not_trail():
    scopes = [ScopeSpec(BlockSpec(torch.zeros(n, n), (1, n), name="x" * n), (1, 1)) for n in (1, 12)]
    lines = table(scopes).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize(
    ("shape", "stride", "offset", "text"),
    [
        ((8, 16), (16, 1), None, "whole"),
        ((4, 16), (16, 1), None, "4×16 by 16,1"),
        ((4, 16), (16, 1), 64, "4×16 by 16,1 at 64"),
        ((8, 1, 8, 2), (16, 16, 1, 8), None, "8×1×8×2 by 16,16,1,8"),
        ((16,), (-1,), 15, "16 by -1 at 15"),
    ],
)
def test_views_in_words(shape, stride, offset, text):
    assert view_text(View(torch.zeros(8, 16), shape, stride, offset)) == text


def test_the_offset_of_a_view_counts_from_its_parameter():
    inner = torch.zeros(8, 16)[4:]
    assert view_text(View(inner, (2, 16), (16, 1), offset=6 * 16)) == "2×16 by 16,1 at 32"
    assert view_text(View.from_existing(inner)) == "whole"


def test_shapes_in_words():
    assert [times(shape) for shape in [(), (3,), (32, 16)]] == ["()", "3", "32×16"]
