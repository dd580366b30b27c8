"""Criteria: how blocks are scored; a higher score is more worth keeping.

In the formulas, w is a weight of the block and g its gradient; sums are over the weights of the block.
"""

from __future__ import annotations

import math

from sparse_lightning.errors import FlowError
from sparse_lightning.flow import Abs, Criterion, Inputs, L2Norm, Load, Max, Save, Square, State, Sum, Value, Where


class Magnitude(Criterion):
    """The norm of the weights, as in magnitude pruning: `Σ |w|`, `√(Σ w²)` or `max |w|`.

    Args:
        p: the order of the norm: 1, 2 or inf.
    """

    factor = "weight"

    def __init__(self, p: float = 2) -> None:
        if p not in (1, 2, math.inf):
            raise FlowError(f"p={p} of Magnitude is not supported: pass 1, 2 or inf")
        self.p = p
        self.size_exponent = 1 / p

    def flow(self, x: Inputs) -> Value:
        """One pass over the weights."""
        if self.p == 2:
            return L2Norm()(x.weight)
        return Sum()(Abs()(x.weight)) if self.p == 1 else Max()(Abs()(x.weight))


class Gradient(Criterion):
    """The norm of the gradient: `√(Σ g²)`."""

    size_exponent = 0.5

    def flow(self, x: Inputs) -> Value:
        """One pass over the gradients."""
        return L2Norm()(x.grad)


class Taylor(Criterion):
    """The first-order change of the loss if the block is set to zero: `|Σ w·g|`."""

    factor = "grad"

    def flow(self, x: Inputs) -> Value:
        """One pass over weights and gradients."""
        return abs(Sum()(x.weight * x.grad))


class ElementwiseTaylor(Criterion):
    """The first-order changes of the loss if each weight alone is set to zero, summed: `Σ |w·g|`."""

    factor = "grad"

    def flow(self, x: Inputs) -> Value:
        """One pass over weights and gradients."""
        return Sum()(Abs()(x.weight * x.grad))


class Movement(Criterion):
    """Movement of the weights away from zero: the running sum of `−Σ w·g` over the steps it observes."""

    states = {"saliency": State(fill=0.0)}  # noqa: RUF012 - read only

    def flow(self, x: Inputs) -> Value:
        """Add to the running sum."""
        saliency = Load()(x.state["saliency"]) + Sum()(-x.weight * x.grad)
        Save()(saliency, x.state["saliency"])
        return saliency


class Fisher(Criterion):
    """The expected squared change of the loss: the exponential moving average of `(Σ w·g)²`.

    `m ← decay·m + (1 − decay)·(Σ w·g)²`, with bias correction.

    Args:
        decay: of the moving average, at each observation.
    """

    def __init__(self, decay: float = 0.9) -> None:
        self.decay = _decay(decay)
        self.observed_steps = _remembered(decay)
        self.states = {"mean": State(), "share": State()}

    def flow(self, x: Inputs) -> Value:
        """Update the moving average."""
        return _average(x, Square()(Sum()(x.weight * x.grad)), self.decay, "mean", "share")


class AdamFisher(Criterion):
    """The Fisher information from the state of Adam: `Σ w²·v`, v is the optimizer's `exp_avg_sq`."""

    def flow(self, x: Inputs) -> Value:
        """One pass over weights and optimizer state; no gradients are read."""
        return Sum()(Square()(x.weight) * x.optimizer["exp_avg_sq"])


class Sensitivity(Criterion):
    """Sensitivity times uncertainty: the product of the moving averages of `I = Σ |w·g|` and of `|I − average of I|`.

    The first observation has no deviation: it ranks by the sensitivity alone.

    Args:
        decay: of the moving average of the sensitivity.
        uncertainty_decay: of the moving average of its deviation.
    """

    def __init__(self, decay: float = 0.85, uncertainty_decay: float = 0.95) -> None:
        self.decay, self.uncertainty_decay = _decay(decay), _decay(uncertainty_decay)
        self.observed_steps = _remembered(max(decay, uncertainty_decay))
        self.states = {name: State() for name in ("mean", "share", "deviation", "deviation_share")}

    def flow(self, x: Inputs) -> Value:
        """Update both moving averages."""
        sensitivity, seen = Sum()(Abs()(x.weight * x.grad)), Load()(x.state["share"]) > 0
        mean = _average(x, sensitivity, self.decay, "mean", "share")
        decay, deviation = self.uncertainty_decay, Abs()(sensitivity - mean)
        total = Where()(seen, decay * Load()(x.state["deviation"]) + (1 - decay) * deviation, 0.0)
        weight = Where()(seen, decay * Load()(x.state["deviation_share"]) + (1 - decay), 0.0)
        Save()(total, x.state["deviation"])
        Save()(weight, x.state["deviation_share"])
        return mean * Where()(seen, total, 1.0) / Where()(seen, weight, 1.0)


class Wanda(Criterion):
    """Weights times the norms of their inputs: `Σ |w|·‖a‖`, a is the input feature that w multiplies.

    The norms are collected in forward passes by `InputNorms`.
    """

    factor = "input_norm"

    def flow(self, x: Inputs) -> Value:
        """One pass over weights and input norms."""
        return Sum()(Abs()(x.weight) * x.input_norm)


class OBS(Criterion):
    """The output error of removing a block and refitting the rest: optimal brain surgeon for whole blocks, as in ZipLM.

    `tr(W_b · ((G⁻¹)_bb)⁻¹ · W_bᵀ)`, summed over the layers that read the block: W_b are their weights in the columns of
    the block, and G is the Gram matrix of their inputs. Units and tiles are removed one after the other, with a
    downdate of G⁻¹ each: the score is the error of removing a block and all before it. Use it with `Refit`.
    """

    def flow(self, x: Inputs) -> Value:
        """No pass over the weights: the errors are computed from Gram matrices."""
        return x.removal_error


class Random(Criterion):
    """A uniform random number per block, new at each update, the same on all ranks and after a resume."""

    size_exponent = 0.0

    def flow(self, x: Inputs) -> Value:
        """One random number per block; no weights are read."""
        return x.random


class EMA(Criterion):
    """The exponential moving average of another criterion: `m ← decay·m + (1 − decay)·score`, with bias correction.

    Args:
        criterion: computes the scores that are averaged.
        decay: of the moving average, at each observation; see `observe_every` of `Sparsifier`.
    """

    def __init__(self, criterion: Criterion, decay: float = 0.9) -> None:
        self.criterion, self.decay = criterion, _decay(decay)
        self.size_exponent = criterion.size_exponent
        own, others = _remembered(decay), criterion.observed_steps if criterion.states else 1
        self.observed_steps = None if others is None else max(own, others)
        average = "average"
        while average in criterion.states:
            average = f"average of {average}"
        self._names = average, f"share of {average}"
        self.states = {**criterion.states, **{name: State() for name in self._names}}

    def flow(self, x: Inputs) -> Value:
        """Update the moving average, and the state of the other criterion."""
        return _average(x, self.criterion.flow(x), self.decay, *self._names)


class AverageTaylor(EMA):
    """The moving average of `ElementwiseTaylor` over the steps up to an update: needs only gradients, and the default.

    Args:
        decay: of the moving average, at each observation.
    """

    def __init__(self, decay: float = 0.9) -> None:
        super().__init__(ElementwiseTaylor(), decay)


def _average(x: Inputs, score: Value, decay: float, scores: str, weights: str) -> Value:
    """Return a moving average with bias correction, from fields with the weighted sum and the sum of weights.

    The names of the fields are part of checkpoints.
    """
    total = decay * Load()(x.state[scores]) + (1 - decay) * score
    weight = decay * Load()(x.state[weights]) + (1 - decay)
    Save()(total, x.state[scores])
    Save()(weight, x.state[weights])
    return total / weight


def _remembered(decay: float) -> int:
    """Return the steps that a moving average spans: earlier ones hardly change it (docs/choosing.md)."""
    return round(1 / (1 - decay))


def _decay(decay: float) -> float:
    if not 0 <= decay < 1:
        raise FlowError(f"decay={decay} is out of range: pass a number of at least 0 and less than 1")
    return decay
