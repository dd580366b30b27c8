"""Question 4: how does the cost grow, and how near is it to the limit? Against weights, tensors and blocks."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
from page import Table
from torch import nn

from sparse_lightning import Blocks, Constant, Magnitude, Sparsifier

SPARSITY, ROUNDS = 0.75, 15
WEIGHTS, TENSORS, BLOCKS = (1, 2, 4, 8), (10, 40, 160, 640), (32, 16, 8, 4)
"""Millions of weights in 16 tensors of 32×32 blocks; tensors of 4 M weights; sides of blocks of 4 M weights."""


def answer(short: bool) -> list[Table]:
    """Three tables: in each, one number grows."""
    millions = WEIGHTS if short else (*WEIGHTS, 16, 32, 64)
    return [
        grown("weights, millions", {n: case(n * 1_000_000, 16, 32) for n in millions}),
        grown("tensors, of 4 M weights", {n: case(4_000_000, n, 16) for n in TENSORS}),
        grown("blocks, of 4 M weights in 16 tensors", {4_000_000 // b**2: case(4_000_000, 16, b) for b in BLOCKS}),
    ]


def case(weights: int, tensors: int, block: int) -> tuple[float, float, float]:
    """Seconds of a hold and of an update, and those that a copy of the weights takes in the same run."""
    size = round(math.sqrt(weights / tensors) / 32) * 32
    model = nn.ParameterList(nn.Parameter(torch.randn(size, size)) for _ in range(tensors))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sparsifier = Sparsifier([Blocks("*", (block, block))], Constant(SPARSITY), Magnitude(), update_every=1)
    sparsifier.attach(model, optimizer, total_steps=10**6)
    sparsifier.update_now()
    pruned = sum(int((weight == 0).sum()) for weight in model)
    if abs(pruned / (tensors * size * size) - SPARSITY) > tensors * block**2 / (tensors * size * size) + 1e-6:
        raise AssertionError(f"{pruned} weights are pruned")
    flat, copy = torch.randn(tensors * size * size), torch.empty(tensors * size * size)
    actions = [sparsifier.hold, sparsifier.update_now, lambda: copy.copy_(flat)]
    rounds = [[timed(action) for action in actions] for _ in range(ROUNDS)]
    sparsifier.detach()
    hold, update, copied = (statistics.median(column) for column in zip(*rounds, strict=True))
    return hold, update, copied


def timed(action: Callable[[], object]) -> float:
    """Seconds of an action."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def grown(what: str, cases: dict[int, tuple[float, float, float]]) -> Table:
    """A table with the fitted exponent in its last row: time ~ n ** exponent."""
    rows = [
        [f"{n:,}", f"{1e3 * hold:.3f}", f"{1e3 * update:.2f}", f"{hold / copy:.2f}", f"{update / copy:.1f}"]
        for n, (hold, update, copy) in cases.items()
    ]
    ends = [f"{exponent(list(cases), [times[i] for times in cases.values()]):.2f}" for i in (0, 1)]
    headings = [what, "hold, ms", "update, ms", "hold / copy of the weights", "update / copy"]
    table = Table(f"Growth with {what}", headings, [*rows, ["exponent", *ends, "", ""]])
    print(table.markdown(), flush=True)
    return table


def exponent(sizes: list[int], times: list[float]) -> float:
    """The slope of a line through the logarithms."""
    x, y = ([math.log(value) for value in values] for values in (sizes, times))
    return statistics.linear_regression(x, y).slope
