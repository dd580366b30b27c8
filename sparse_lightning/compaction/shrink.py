"""Shrink: whether and when pruned units are removed from a model while it trains."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Real

from sparse_lightning.errors import SparsityError
from sparse_lightning.graph.inputs import Inputs

MOST_SPARE = 20
"""One in so many of the units that are left may be a pruned one: more would cost more than odd sizes do."""


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
        multiple_of: so many rows or columns of a layer, or a multiple of it, are left, as kernels of CPUs and GPUs are
            faster for such sizes: a few pruned units stay in the model, zero, where they are at most one in twenty of
            those that are left. 1 removes all.

    Example:
        >>> shrink = Shrink()
        >>> shrink.spare(kept=150, width=1), shrink.spare(kept=9, width=1), shrink.spare(kept=5, width=64)
        (2, 0, 0)
    """

    inputs: Inputs = field(default=None, repr=False, compare=False)
    at_least: float = 0.07
    multiple_of: int = 8

    def __post_init__(self) -> None:
        given: object = self.at_least
        if not isinstance(given, Real) or not 0 <= self.at_least < 1:
            raise SparsityError(f"at_least={given!r} is out of range: pass a fraction of 0 or more, and below 1")
        multiple: object = self.multiple_of
        if not isinstance(multiple, int) or isinstance(multiple, bool) or self.multiple_of < 1:
            raise SparsityError(f"multiple_of={multiple!r} does not count rows: pass an integer of 1 or more")

    def spare(self, kept: int, width: int) -> int:
        """Return how many pruned units stay beside those that are kept.

        Args:
            kept: units that are not pruned.
            width: rows or columns of each.
        """
        spare = -kept % (self.multiple_of // math.gcd(self.multiple_of, width))
        return spare if spare * MOST_SPARE <= kept else 0
