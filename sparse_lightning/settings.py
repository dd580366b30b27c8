"""What a Sparsifier was told, what an update did, and what can be read from a saved state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sparse_lightning.budgets import Budget
from sparse_lightning.flow import Criterion
from sparse_lightning.masks import unpack
from sparse_lightning.methods import Method
from sparse_lightning.patterns import Pattern
from sparse_lightning.schedule import Schedule


@dataclass(frozen=True)
class Settings:
    """What a Sparsifier was told; its docstring explains each."""

    patterns: Sequence[Pattern]
    schedule: Schedule
    criterion: Criterion
    method: Method
    budget: Budget
    update_every: int
    seed: int
    lowering: str | None


@dataclass(frozen=True)
class Update:
    """What an update did.

    Args:
        step: the optimizer steps that were made before it.
        target: the sparsity that the schedule asked for.
        churn: the share of all blocks that were pruned or grown.
    """

    step: int
    target: float
    churn: float


NEVER = Update(step=-1, target=0.0, churn=0.0)
"""The update before the first."""


def rewound(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with its schedule at the start again, and the masks as they are."""
    return {**state, "step": 0, "owed": False, "last_update": dict(vars(NEVER))}


def masks_in(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The masks that a state holds."""
    return {name: unpack(entry["bits"], entry["shape"]) for name, entry in state.get("masks", {}).items()}
