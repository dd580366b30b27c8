"""Question 2: how good is the model? Accuracy at the same sparsity, steps and seeds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from peer import Peer
from plan import Plan
from results import Measurement
from tasks import Task
from variants import BUDGETS, CRITERIA, METHODS

LEVELS = {
    "MLP on Fashion-MNIST": {
        "1×1": (0.9, 0.95, 0.98),
        "4×4": (0.8, 0.9, 0.95),
        "8×8": (0.8, 0.9, 0.95),
        "2:4": (0.5,),
        "units": (0.5, 0.75, 0.9),
    },
    "ResNet on Fashion-MNIST": {"1×1": (0.9,), "4×4": (0.75,), "8×8": (0.75,), "units": (0.5, 0.75, 0.9)},
    "MiniLM on sections of Debian": {"32×32": (0.75,), "2:4": (0.5,), "units": (0.5, 0.75)},
    "character GPT": {"8×8": (0.75,), "2:4": (0.5,), "units": (0.75,)},
}
"""The sparsity levels of each pattern, by task."""

COMPARED = {
    "MLP on Fashion-MNIST": (Plan("4×4", 0.95, 0), [*CRITERIA, *METHODS, *BUDGETS]),
    "ResNet on Fashion-MNIST": (Plan("units", 0.75, 0), CRITERIA),
    "MiniLM on sections of Debian": (Plan("32×32", 0.75, 0), CRITERIA[:7]),
}
"""Where our own parts are compared, and which."""


def measurements(kinds: list[type[Peer]], tasks: list[Task], seeds: int) -> Iterator[Measurement]:
    """Everything with one seed, then with the next: a run that is cut has all libraries at equal seeds."""
    for seed in range(seeds):
        for task in tasks:
            yield measurement("quality", task, Peer, Plan("1×1", 0.0, task.steps), seed)
            for pattern, levels in LEVELS[task.name].items():
                able = [kind for kind in kinds if kind is not Peer and can(kind, task, pattern)]
                plans = [Plan(pattern, sparsity, task.steps) for sparsity in levels]
                yield from (measurement("quality", task, kind, plan, seed) for plan in plans for kind in able)
        for task in tasks:
            if task.name in COMPARED:
                at, parts = COMPARED[task.name]
                plan = Plan(at.pattern, at.sparsity, task.steps)
                yield from (measurement("parts", task, kind, plan, seed) for kind in parts)


def can(kind: type[Peer], task: Task, pattern: str) -> bool:
    """Whether a library can do a pattern in the layers of a task."""
    return kind.can(pattern) and ("ResNet" not in task.name or pattern in kind.convolutions)


def measurement(question: str, task: Task, kind: type[Peer], plan: Plan, seed: int) -> Measurement:
    """A run of one library with one seed."""
    case = {
        "task": task.name,
        "pattern": plan.pattern,
        "sparsity": plan.sparsity,
        "steps": plan.steps,
        "library": kind.name,
        "seed": seed,
    }
    return Measurement(question, case, partial(task.accuracy, kind, plan, seed))
