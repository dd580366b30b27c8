"""Criteria: scores of blocks, higher is more worth keeping. Each is one class with one flow.

w is a weight of the block, g its gradient; sums go over the elements of the block.
"""

from __future__ import annotations

import math

from sparse_lightning.errors import FlowError
from sparse_lightning.flow import Abs, Criterion, Inputs, L2Norm, Load, Max, Save, Square, State, Sum, Value


class Magnitude(Criterion):
    """The norm of the weights: `Σ |w|` for p = 1, `√(Σ w²)` for p = 2, `max |w|` for p = inf.

    Args:
        p: which norm.
    """

    factor = "weight"

    def __init__(self, p: float = 2) -> None:
        if p not in (1, 2, math.inf):
            raise FlowError(f"Magnitude knows p = 1, 2 and inf, not {p}")
        self.p = p
        self.size_exponent = 1 / p

    def flow(self, x: Inputs) -> Value:
        """One pass over the weights."""
        if self.p == 2:
            return L2Norm()(x.weight)
        return Sum()(Abs()(x.weight)) if self.p == 1 else Max()(Abs()(x.weight))


class Gradient(Criterion):
    """The size of the gradient: `√(Σ g²)`."""

    size_exponent = 0.5

    def flow(self, x: Inputs) -> Value:
        """One pass over the gradients."""
        return L2Norm()(x.grad)


class Taylor(Criterion):
    """The change of the loss, to first order, when the block is set to zero: `|Σ w·g|`."""

    factor = "grad"

    def flow(self, x: Inputs) -> Value:
        """One pass over weights and gradients."""
        return abs(Sum()(x.weight * x.grad))


class ElementwiseTaylor(Criterion):
    """The changes of the loss, to first order, when each weight alone is set to zero: `Σ |w·g|`."""

    factor = "grad"

    def flow(self, x: Inputs) -> Value:
        """One pass over weights and gradients."""
        return Sum()(Abs()(x.weight * x.grad))


class Movement(Criterion):
    """Weights that move away from zero are worth keeping: the running sum of `−Σ w·g` over all runs."""

    states = {"saliency": State(fill=0.0)}  # noqa: RUF012 - read only

    def flow(self, x: Inputs) -> Value:
        """Adds to the state."""
        saliency = Load()(x.state["saliency"]) + Sum()(-x.weight * x.grad)
        Save()(saliency, x.state["saliency"])
        return saliency


class Fisher(Criterion):
    """The expected squared change of the loss: the running mean of `(Σ w·g)²`.

    The mean is exponential, `m ← decay·m + (1 − decay)·(Σ w·g)²`, and corrected for its start at zero.

    Args:
        decay: how much of the mean stays at each run.
    """

    def __init__(self, decay: float = 0.9) -> None:
        self.decay = _decay(decay)
        self.states = {"mean": State(), "share": State()}

    def flow(self, x: Inputs) -> Value:
        """Averages in the state."""
        return _average(x, Square()(Sum()(x.weight * x.grad)), self.decay, "mean", "share")


class AdamFisher(Criterion):
    """The Fisher information that Adam keeps anyway: `Σ w²·v`, v the optimizer's `exp_avg_sq`."""

    def flow(self, x: Inputs) -> Value:
        """One pass over weights and optimizer state; needs no gradient."""
        return Sum()(Square()(x.weight) * x.optimizer["exp_avg_sq"])


class Sensitivity(Criterion):
    """Sensitivity with uncertainty: two running means, of `I = Σ |w·g|` and of `|I − mean of I|`, multiplied.

    Args:
        decay: of the mean of the sensitivity.
        uncertainty_decay: of the mean of its deviation.
    """

    def __init__(self, decay: float = 0.85, uncertainty_decay: float = 0.95) -> None:
        self.decay, self.uncertainty_decay = _decay(decay), _decay(uncertainty_decay)
        self.states = {name: State() for name in ("mean", "share", "deviation", "deviation_share")}

    def flow(self, x: Inputs) -> Value:
        """Averages in the state."""
        sensitivity = Sum()(Abs()(x.weight * x.grad))
        mean = _average(x, sensitivity, self.decay, "mean", "share")
        deviation = Abs()(sensitivity - mean)
        return mean * _average(x, deviation, self.uncertainty_decay, "deviation", "deviation_share")


class Wanda(Criterion):
    """Weights times what they multiply: `Σ |w|·‖a‖`, a the input feature of w over the data seen.

    The norms come from `InputNorms`, which watches the forward passes.
    """

    factor = "input_norm"

    def flow(self, x: Inputs) -> Value:
        """One pass over the weights."""
        return Sum()(Abs()(x.weight) * x.input_norm)


class Random(Criterion):
    """A uniform random number for each block, new in each run, the same on all ranks and after a resume."""

    size_exponent = 0.0

    def flow(self, x: Inputs) -> Value:
        """Reads no weights."""
        return x.random


class EMA(Criterion):
    """The running mean of another criterion: `m ← decay·m + (1 − decay)·score`, corrected for its start at zero.

    Args:
        criterion: what to average.
        decay: how much of the mean stays at each run.
    """

    def __init__(self, criterion: Criterion, decay: float = 0.9) -> None:
        self.criterion, self.decay = criterion, _decay(decay)
        self.size_exponent = criterion.size_exponent
        average = "average"
        while average in criterion.states:
            average = f"average of {average}"
        self._names = average, f"share of {average}"
        self.states = {**criterion.states, **{name: State() for name in self._names}}

    def flow(self, x: Inputs) -> Value:
        """Averages in the state, beside the state of the other criterion."""
        return _average(x, self.criterion.flow(x), self.decay, *self._names)


def _average(x: Inputs, score: Value, decay: float, mean: str, share: str) -> Value:
    """An exponential mean in two fields: the sum of weighted scores, and the sum of the weights."""
    total = decay * Load()(x.state[mean]) + (1 - decay) * score
    weight = decay * Load()(x.state[share]) + (1 - decay)
    Save()(total, x.state[mean])
    Save()(weight, x.state[share])
    return total / weight


def _decay(decay: float) -> float:
    if not 0 <= decay < 1:
        raise FlowError(f"a decay of {decay}: it must be at least 0 and less than 1")
    return decay
