"""Trials: a copy of a model runs without some of its units, before the model is trained without them.

What is wrong must show: weights are random, since zeros and small ones hide what is computed with them, as inputs of
zeros do; about half of the units are removed, not the last ones, and of some families only, so that sizes differ that
code may take for the same. The copy is in single precision where the model is not even that precise.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count

import numpy as np
import torch
from torch import Tensor, nn

from sparse_lightning.compaction.same_outputs import runs_on
from sparse_lightning.compaction.zero_units import KeptUnits
from sparse_lightning.graph.inputs import ExampleInputs
from sparse_lightning.graph.skeleton import copy_with
from sparse_lightning.layout.cutting import Indices

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-3}, 0.06
"""The largest difference of the outputs, relative to the largest one, and that of narrower dtypes: more units are
removed than in a model of which zeros are removed, and random weights are not as kind."""


def subsets(units: Mapping[str, int], seed: int = 0) -> list[dict[str, KeptUnits]]:
    """Return what is left of each family in each trial.

    In the first all families are cut; in the others every second one, in turn, and only units of the last half are
    left, or only some of the first, so that positions and fractions are others than in the whole model. In the last,
    all families have the same number of units, which code may compare.

    Args:
        units: how many each family has; at least two.
        seed: of the units that are left.

    Example:
        >>> [list(left) for left in subsets({"a": 8, "b": 8, "c": 4})]
        [['a', 'b', 'c'], ['a', 'c'], ['b'], ['a', 'b', 'c']]
    """
    numbers = np.random.default_rng(seed)
    names = list(units)
    trials = (names, 0.0, 1.0), (names[::2], 0.5, 1.0), (names[1::2] or names, 0.0, 0.5)
    irregular = [{name: _some(units[name], low, high, numbers) for name in part} for part, low, high in trials]
    same = max(1, min(units.values(), default=1) // 2)
    return [*irregular, {name: _left(units[name], numbers.permutation(units[name])[:same]) for name in names}]


def _some(units: int, low: float, high: float, numbers: np.random.Generator) -> KeptUnits:
    """Return a fourth to a half of the units, of those in a range."""
    start, stop = int(units * low), int(units * high)
    number = numbers.integers(max(1, units // 4), max(1, units // 2), endpoint=True)
    return _left(units, start + numbers.permutation(stop - start)[:number])


def _left(units: int, kept: Indices) -> KeptUnits:
    return KeptUnits(units, np.sort(kept).tolist())


def trial_copy(model: nn.Module, inputs: ExampleInputs) -> tuple[nn.Module, ExampleInputs]:
    """Return a copy of a model with random weights, and inputs that vary.

    One that cannot run with these, or whose outputs are not finite then, gets its own weights and inputs.
    """
    seeds = count()  # parameters of one shape must not be the same: their difference would hide what is wrong
    copied = copy_with(model, lambda tensor: _random(tensor, next(seeds)))
    varied = _for_copy(inputs, model, widens=True).varied()
    if runs_on(copied, varied):
        return copied, varied
    return copy_with(model, _cloned), _for_copy(inputs, model, widens=False)


def _for_copy(inputs: ExampleInputs, model: nn.Module, widens: bool) -> ExampleInputs:
    """Return inputs in the dtype of the weights of the copy."""
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]
    return inputs.of_dtype(_wide(dtypes[0]) if widens else dtypes[0])


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def _random(tensor: Tensor, seed: int) -> Tensor:
    """Return random weights of the same layout, of a scale at which activations neither vanish nor explode."""
    data = torch.empty_like(tensor.detach(), dtype=_wide(tensor.dtype))
    if not isinstance(tensor, nn.Parameter) or not data.is_floating_point():
        return _as(tensor, data.copy_(tensor.detach()))
    numbers = torch.Generator(data.device).manual_seed(seed)
    if data.ndim < 2:
        return _as(tensor, data.uniform_(0.5, 1.5, generator=numbers))
    return _as(tensor, data.normal_(0.0, (len(data) / max(1, data.numel())) ** 0.5, generator=numbers))


def _cloned(tensor: Tensor) -> Tensor:
    return _as(tensor, tensor.detach().clone())


def _as(tensor: Tensor, data: Tensor) -> Tensor:
    return nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
