"""Criterion: the base class of criteria, which score blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from inspect import signature

from sparse_lightning.flow.context import Value
from sparse_lightning.flow.inputs import Inputs
from sparse_lightning.flow.paged import State


class Criterion(ABC):
    """Computes the scores of blocks: a higher score is more worth keeping.

    A criterion declares its fields of state and one `flow`, which is traced once and run at each update. If it has
    state, it also runs between updates: see `observe_every` of `Sparsifier`.

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
    """Scores grow with the number of weights in a block to this power: 1 for sums, ½ for 2-norms, 0 for means, maxima
    and random numbers. `Global` normalizes by it where blocks of different sizes compete."""

    factor: str | None = None
    """The name of the input x if the score of a single weight w is `|w·x|`; "weight" if it is `|w|`; None otherwise.
    With a factor, N:M groups are scored, chosen and zeroed in one pass."""

    observed_steps: int | None = None
    """How many steps up to an update a criterion with state has to observe, as many as a moving average spans; state of
    steps before those that were passed over is forgotten. None for all, as a sum over the steps needs. An
    `observe_every` that is passed to `Sparsifier` comes first."""

    @abstractmethod
    def flow(self, x: Inputs) -> Value:
        """Return one score per block, computed from the inputs `x`."""

    def __repr__(self) -> str:
        """Return the call that made it, as far as attributes have the names of arguments."""
        names = [name for name in signature(type(self)).parameters if name in vars(self)]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"
