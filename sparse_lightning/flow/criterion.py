"""Criterion: what computes scores, written as one flow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from sparse_lightning.flow.context import Value
from sparse_lightning.flow.inputs import Inputs
from sparse_lightning.flow.paged import State


class Criterion(ABC):
    """Scores for blocks: higher is more worth keeping.

    A criterion declares its fields of state and one `flow`, which is traced once and run each time scores
    are due.

    Example:
        >>> from sparse_lightning.flow import Load, Save, State, Sum
        >>> class Movement(Criterion):
        ...     states = {"saliency": State(fill=0.0)}
        ...
        ...     def flow(self, x):
        ...         saliency = Load()(x.state["saliency"]) + Sum()(-x.weight * x.grad)
        ...         Save()(saliency, x.state["saliency"])
        ...         return saliency
    """

    states: Mapping[str, State] = {}

    size_exponent: float = 1.0
    """Scores grow like the number of a block's weights to this power: 1 for sums, ½ for 2-norms, 0 for means, maxima
    and random numbers. Where blocks of different size compete, `Global` divides it out."""

    factor: str | None = None
    """Where a block is a single weight w and its score is `|w·x|`, the name of x among the inputs; "weight" where it is
    `|w|`; None where it is something else. N:M groups are then scored, chosen and zeroed in one pass."""

    @abstractmethod
    def flow(self, x: Inputs) -> Value:
        """The scores of blocks from the values that `x` names."""
