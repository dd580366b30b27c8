"""Shrink: whether and when pruned units are removed from a model while it trains."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Real

from sparse_lightning.errors import SparsityError
from sparse_lightning.graph.inputs import Inputs


@dataclass(frozen=True)
class Shrink:
    """Removes pruned units, such as neurons, heads and channels, from the model while it trains.

    The remaining steps cost what those of the smaller model cost. Nothing else changes: masks, schedule and budgets
    count all units, and checkpoints have the shapes of the whole model. When training ends, the units are back, and
    zero. It needs a method that never lets blocks grow, such as `Gradual`, and units that the traced model has: see
    `couplings`.

    Args:
        inputs: a tuple of positional or a dict of keyword arguments to trace the model with, unless a `Coupled` pattern
            has traced it; None takes the `example_input_array` of the model, then its `dummy_inputs`.
        at_least: the fraction of the weights of these layers from which on it is worth to remove them, 0 for every
            update. What is pruned when the schedule ends is removed in any case.
    """

    inputs: Inputs = field(default=None, repr=False, compare=False)
    at_least: float = 0.1

    def __post_init__(self) -> None:
        given: object = self.at_least
        if not isinstance(given, Real) or not 0 <= self.at_least < 1:
            raise SparsityError(f"at_least={given!r} is out of range: pass a fraction of 0 or more, and below 1")
