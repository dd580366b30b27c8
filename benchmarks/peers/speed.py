"""Question 3: how fast is the result? Exported models against dense ones, at the accuracy that they keep."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

import torch
from interleaved import interleaved
from ours import Ours
from peer import Peer
from plan import Plan
from results import Measurement
from tasks import Task
from torch import nn

from sparse_lightning import compact

BATCHES = {"one": 1, "many": 64}
LEVELS = (0.5, 0.75, 0.9)
ROUNDS = 60


def measurements(kinds: list[type[Peer]], tasks: list[Task], seeds: int) -> Iterator[Measurement]:
    """Every library that removes units, at several sparsity levels."""
    able = [kind for kind in kinds if kind is not Peer and kind.can("units")]
    for seed in range(seeds):
        for task in tasks:
            for sparsity in LEVELS:
                for kind in able:
                    case = {"task": task.name, "sparsity": sparsity, "library": kind.name, "seed": seed}
                    plan = Plan("units", sparsity, task.steps)
                    yield Measurement("speed", case, partial(measured, task, kind, plan, seed))


@cache
def dense(task: Task, seed: int) -> nn.Module:
    """The model that is trained without pruning."""
    return task.trained(Peer, Plan("1×1", 0.0, task.steps), seed)


def measured(task: Task, kind: type[Peer], plan: Plan, seed: int) -> dict[str, float]:
    """Accuracy, and the time of a forward pass over that of the dense model, interleaved in one process."""
    whole, pruned = dense(task, seed), task.trained(kind, plan, seed)
    inputs = task.load()[1][0]
    small = compact(pruned, (inputs[:1],)) if issubclass(kind, Ours) else pruned
    with torch.no_grad():
        if not torch.allclose(small(inputs[:8]), pruned(inputs[:8]), atol=1e-4):
            raise AssertionError(f"{kind.name}: the exported model has other outputs")
        found = {"accuracy": 100 * task.correct(small), "dense accuracy": 100 * task.correct(whole)}
        sizes = [sum(p.numel() for p in model.parameters()) for model in (small, whole)]
        found["parameters"] = sizes[0] / sizes[1]
        for name, rows in BATCHES.items():
            batch = inputs[:rows]
            times = interleaved({"small": partial(small, batch), "dense": partial(whole, batch)}, ROUNDS)
            found[f"time, {name}"] = times["small"] / times["dense"]
    return {name: round(value, 4) for name, value in found.items()}
