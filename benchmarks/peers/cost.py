"""Question 1: what does training cost? The time of a step over dense, of an update, of runs; memory, checkpoints."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from interleaved import ratios
from peer import Peer
from plan import Plan
from results import Case, Measurement
from stack import Stack, check, peak_bytes

SPARSITY = {"2:4": 0.5, "units": 0.5}
"""Of each pattern; 0.75 of all others."""

DENSE_STEPS = 3
"""Steps before anything is timed, in which the optimizer makes its state."""


@dataclass(frozen=True)
class Size:
    """A model.

    Args:
        weights: about.
        tensors: layers that are pruned.
        batch: rows of the input.
        rounds: in which steps are timed.
    """

    weights: int
    tensors: int
    batch: int = 64
    rounds: int = 25


SIZES = [
    Size(1_000_000, 10),
    Size(10_000_000, 10, rounds=9),
    Size(1_000_000, 100),
    Size(200_000_000, 100, batch=16, rounds=2),
    Size(10_000_000, 1000, rounds=5),
]
PATTERNS = ("1×1", "32×32", "2:4", "units", "4×4")

MOST_STEPS = 100_000_000
"""Weights times tensors of the models whose runs are timed as a whole: those of larger ones take too long."""

RUNS_OF = ("mask loop by hand", "Torch-Pruning", "Torch-Pruning, moments dropped")
"""Other libraries whose runs are timed as a whole: the cheapest ones."""


def cases(kinds: list[type[Peer]]) -> Iterator[tuple[type[Peer], Size, str, Case]]:
    """Every library that can do a pattern, at every size."""
    for size in SIZES:
        for pattern in PATTERNS:
            for kind in kinds:
                if kind.can(pattern):
                    case = {"pattern": pattern, "weights": size.weights, "tensors": size.tensors, "library": kind.name}
                    yield kind, size, pattern, case


def measurements(kinds: list[type[Peer]]) -> Iterator[Measurement]:
    """Times and checkpoints."""
    for kind, size, pattern, case in cases(kinds):
        if kind is not Peer:
            yield Measurement("cost", case, partial(measured, kind, size, pattern))


def runs(kinds: list[type[Peer]]) -> Iterator[Measurement]:
    """Whole runs of ours and of the cheapest others, in turn."""
    compared = [kind for kind in kinds if kind.name in RUNS_OF or "sparse_light" in kind.name]
    for size in [size for size in SIZES if size.weights * size.tensors <= MOST_STEPS]:
        for pattern in PATTERNS:
            able = [kind for kind in compared if kind.can(pattern)]
            case = {"pattern": pattern, "weights": size.weights, "tensors": size.tensors}
            yield Measurement("runs", case, partial(whole_runs, able, size, pattern))


def memory(kinds: list[type[Peer]]) -> Iterator[Measurement]:
    """The peak memory of processes, dense ones too."""
    for kind, size, pattern, case in cases(kinds):
        yield Measurement("memory", case, partial(peak, kind, size, pattern))


def peak(kind: type[Peer], size: Size, pattern: str) -> dict[str, float]:
    """The peak memory of a process that trains with a library, the first step with an update."""
    plan = Plan(pattern, SPARSITY.get(pattern, 0.75), steps=1000, rhythm="between")
    return {"bytes": peak_bytes(lambda: Stack(kind, size.weights, size.tensors, plan, size.batch))}


def measured(kind: type[Peer], size: Size, pattern: str) -> dict[str, float]:
    """A step after the last update, one that is observed and one with an update, against a dense one, interleaved."""
    plan = partial(Plan, pattern, SPARSITY.get(pattern, 0.75), 1000)
    rhythms = {"held": "once", **({"between": "between"} if kind.observes else {})}
    stacks = {"dense": Stack(Peer, size.weights, size.tensors, plan("once"), size.batch)}
    for name, rhythm in {**rhythms, **({} if kind.updates_once else {"update": "always"})}.items():
        stacks[name] = Stack(kind, size.weights, size.tensors, plan(rhythm), size.batch)
    for stack in stacks.values():
        for _ in range(DENSE_STEPS):
            stack.step()
    steps = ratios({name: stack.step for name, stack in stacks.items()}, "dense", size.rounds)
    sizes = {name: stacks[name].checkpoint_bytes() for name in ("dense", *rhythms)}
    if kind.updates_once:
        steps["update"] = first_update(kind, size, plan("once", DENSE_STEPS), stacks["dense"])
    check(stacks["held"].peer, stacks["held"].peer.finish())
    found = {"update": max(0.0, steps["update"] - steps["held"]), **shrunk(stacks["held"], stacks["dense"], size)}
    stacks.clear()
    gc.collect()
    for name in rhythms:
        found |= {f"step {name}": steps[name], f"checkpoint {name}": sizes[name] / sizes["dense"]}
    return {name: round(value, 4) for name, value in found.items()}


def shrunk(pruned: Stack, dense: Stack, size: Size) -> dict[str, float]:
    """The time to remove what is pruned and that of a step after it, in dense steps, where a library can do so."""
    begin = time.perf_counter()
    smaller = pruned.peer.shrunk()
    seconds = time.perf_counter() - begin
    if smaller is None:
        return {}
    pruned.peer = smaller
    step = ratios({"dense": dense.step, "small": pruned.step}, "dense", size.rounds)["small"]
    return {"step small": step, "removal": seconds / statistics.median(timed(dense.step) for _ in range(3))}


def whole_runs(kinds: list[type[Peer]], size: Size, pattern: str) -> dict[str, float]:
    """The time of all steps of a run with a ramp, by library, relative to as many dense steps.

    All make each step in turn, so that the speed of the machine is the same for them. Units are removed after the last
    update where a library does not remove them by itself.
    """
    plan = Plan(pattern, SPARSITY.get(pattern, 0.75), 1000)
    stacks = {kind.name: Stack(kind, size.weights, size.tensors, plan, size.batch) for kind in [Peer, *kinds]}
    last = max(step for step in range(plan.steps) if plan.target(step) is not None)
    spent = dict.fromkeys(stacks, 0.0)
    gc.collect()
    gc.freeze()  # a collection of all that was imported would be added to the library at whose step it happens
    for step in range(plan.steps):
        for name in in_turn(list(stacks), step):
            begin = time.perf_counter()
            stacks[name].step()
            if step == last and pattern == "units":
                stacks[name].peer = stacks[name].peer.shrunk() or stacks[name].peer
            spent[name] += time.perf_counter() - begin
    gc.unfreeze()
    return {name: round(seconds / spent[Peer.name], 4) for name, seconds in spent.items() if name != Peer.name}


def in_turn(names: list[str], step: int) -> list[str]:
    """The order of a step: in twice as many steps as there are names, each follows each other one equally often.

    What ran before has filled the caches: after a large model all are slower.
    """
    count = len(names)
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(count)]
    order = [names[(place + step) % count] for place in zigzag]
    return order[::-1] if step // count % 2 else order


def first_update(kind: type[Peer], size: Size, plan: Plan, dense: Stack) -> float:
    """The time of a step with the only update that a library can make, relative to a dense step."""
    stack = Stack(kind, size.weights, size.tensors, plan, size.batch)
    for _ in range(DENSE_STEPS):
        stack.step()
    return timed(stack.step) / statistics.median(timed(dense.step) for _ in range(3))


def timed(action: Callable[[], object]) -> float:
    """Seconds of an action."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
