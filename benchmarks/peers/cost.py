"""Question 1: what does training cost? The time of a step over dense, of an update, memory and checkpoints."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from interleaved import ratios
from page import Table
from peer import Peer
from plan import Plan
from stack import Stack, check, peak_bytes

SPARSITY = {"2:4": 0.5, "units": 0.5}
"""Of each pattern; 0.75 of all others."""


DENSE_STEPS = 3
"""Steps before an update is timed, in which the optimizer makes its state."""


@dataclass(frozen=True)
class Size:
    """A model.

    Args:
        weights: about.
        tensors: layers that are pruned.
        batch: rows of the input.
    """

    weights: int
    tensors: int
    batch: int = 64


SHORT = [Size(1_000_000, 10), Size(1_000_000, 100)]
FULL = [*SHORT, Size(10_000_000, 10), Size(10_000_000, 1000), Size(200_000_000, 100)]
SHORT_PATTERNS, PATTERNS = ("1×1", "2:4", "32×32", "units"), ("1×1", "2:4", "4×4", "32×32", "units")


def answer(kinds: list[type[Peer]], short: bool) -> list[Table]:
    """A table for each size and pattern."""
    cases = [(size, p) for size in (SHORT if short else FULL) for p in (SHORT_PATTERNS if short else PATTERNS)]
    peaks = {case: {kind: peak(kind, *case) for kind in kinds if kind.can(case[1])} for case in cases}
    tables = []
    for size, pattern in cases:
        found = peaks[size, pattern]
        rows = [
            measured(kind, size, pattern, found[kind] - found[Peer], rounds=9 if short else 25)
            for kind in found
            if kind is not Peer
        ]
        title = f"{pattern}, {size.weights / 1e6:g} M weights in {size.tensors} tensors"
        headings = ["library", "step / dense", "update in dense steps", "peak over dense, MB", "checkpoint / dense"]
        tables.append(Table(title, headings, rows))
        print(tables[-1].markdown(), flush=True)
    return tables


def peak(kind: type[Peer], size: Size, pattern: str) -> int:
    """The peak memory of a process that trains with a library, the first step with an update."""
    plan = Plan(pattern, SPARSITY.get(pattern, 0.75), steps=1000, rhythm="once")
    return peak_bytes(lambda: Stack(kind, size.weights, size.tensors, plan, size.batch))


def measured(kind: type[Peer], size: Size, pattern: str, extra_bytes: int, rounds: int) -> list[str]:
    """A row: a step that holds masks against a dense one, interleaved; then an update."""
    sparsity = SPARSITY.get(pattern, 0.75)
    plan = Plan(pattern, sparsity, steps=1000, rhythm="once")
    dense, held = (Stack(k, size.weights, size.tensors, plan, size.batch) for k in (Peer, kind))
    for stack in (dense, held):
        stack.step()
        stack.step()
    step = ratios({"dense": dense.step, "held": held.step}, "dense", rounds)["held"]
    size_ratio = held.checkpoint_bytes() / dense.checkpoint_bytes()
    seconds = statistics.median(timed(dense.step) for _ in range(5))
    check(held.peer, held.peer.finish())
    del held
    rhythm = "once" if kind.updates_once else "always"
    update = update_seconds(kind, size, Plan(pattern, sparsity, steps=1000, rhythm=rhythm, first=DENSE_STEPS))
    gc.collect()
    extra = max(0.0, update / seconds - step)
    return [kind.name, f"{step:.2f}", f"{extra:.2f}", f"{extra_bytes / 1e6:.1f}", f"{size_ratio:.3f}"]


def update_seconds(kind: type[Peer], size: Size, plan: Plan) -> float:
    """The time of a step with an update: the median of five, or the only one of a library that can make one."""
    stack = Stack(kind, size.weights, size.tensors, plan, size.batch)
    for _ in range(DENSE_STEPS):
        stack.step()
    if kind.updates_once:
        return timed(stack.step)
    return statistics.median(timed(stack.step) for _ in range(5))


def timed(action: Callable[[], object]) -> float:
    """Seconds of an action."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
