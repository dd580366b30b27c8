"""The configuration of a Sparsifier, the record of an update, and what can be read from a saved state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sparse_lightning.budgets import Budget
from sparse_lightning.compaction.shrink import Shrink
from sparse_lightning.compensation import Compensation
from sparse_lightning.engine.masks import unpack
from sparse_lightning.flow import Criterion
from sparse_lightning.methods import Method
from sparse_lightning.patterns import Patterns
from sparse_lightning.schedules import Schedule


@dataclass(frozen=True)
class Configuration:
    """The arguments of a `Sparsifier`, whose docstring explains each."""

    patterns: Patterns
    schedule: Schedule
    criterion: Criterion | None
    method: Method
    budget: Budget
    update_every: int | None
    seed: int
    lowering: str | None
    observe_every: int | None
    compensation: Compensation | None = None
    shrink: Shrink | None = None


@dataclass(frozen=True)
class ResolvedConfiguration(Configuration):
    """A configuration for one model: nothing is left to defaults, and the schedule is in optimizer steps."""

    criterion: Criterion
    update_every: int


@dataclass(frozen=True)
class Update:
    """The record of an update.

    Args:
        step: the optimizer steps that were made before it.
        target: the target sparsity of the schedule.
        churn: the fraction of all blocks that were pruned or grown.
    """

    step: int
    target: float
    churn: float


NEVER = Update(step=-1, target=0.0, churn=0.0)
"""The record before the first update."""


def rewound(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved state with its schedule at the start again, and the same masks."""
    return {**state, "step": 0, "owed": False, "last_update": dict(vars(NEVER)), "observed": NEVER.step}


def masks_in(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the masks of a saved state."""
    return {name: unpack(entry["bits"], entry["shape"]) for name, entry in state.get("masks", {}).items()}
