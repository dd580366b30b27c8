"""What an optimizer keeps for the weights, whatever it is called: found, reset by block, and made afresh."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparse_lightning.block import BlockSpec


def state_tensors(optimizer: Optimizer, param: Tensor) -> dict[str, Tensor]:
    """The tensors of a parameter's shape in its optimizer state, by name.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, 3))
        >>> weight.grad = torch.ones(2, 3)
        >>> adam = torch.optim.Adam([weight])
        >>> adam.step()
        >>> sorted(state_tensors(adam, weight))
        ['exp_avg', 'exp_avg_sq']
    """
    state = optimizer.state.get(param, {})
    return {name: kept for name, kept in state.items() if is_like(kept, param)}


def is_like(value: object, param: Tensor) -> bool:
    """Whether a value is a tensor with an entry for each weight of a parameter."""
    return isinstance(value, Tensor) and value.shape == param.shape and param.ndim > 0


def reset_blocks(optimizers: Iterable[Optimizer], spec: BlockSpec, changed: Tensor) -> None:
    """Zero what the optimizers keep for the blocks where `changed`, a grid of the spec, is True."""
    for optimizer in optimizers:
        for kept in state_tensors(optimizer, spec.param).values():
            spec.apply_mask(changed, kept)


def fresh(optimizer: Optimizer, group: Mapping[str, Any], params: Sequence[Tensor]) -> Optimizer:
    """An optimizer like another, with the options of one of its groups, that has not made a step.

    It is not built by calling the class: its arguments may be unknown. Hooks and a `step` that a learning rate
    scheduler has wrapped stay with the original.
    """
    made: Optimizer = object.__new__(type(optimizer))
    made.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    made.__dict__.update(_optimizer_step_pre_hooks=OrderedDict(), _optimizer_step_post_hooks=OrderedDict())
    made.state = defaultdict(dict)
    made.param_groups = [{**group, "params": list(params)}]
    return made


def restart_blocks(optimizer: Optimizer, spec: BlockSpec, grown: Tensor) -> bool:
    """Make the step just taken, for blocks that have grown, the first step of a fresh optimizer.

    The state of grown blocks was zero, but what is kept once for the whole parameter was not, such as the number
    of steps by which Adam corrects its bias: an update would come out several times too large.

    Args:
        optimizer: the one that has just made a step, with the gradients still in place.
        spec: blocks of one of its parameters.
        grown: where they have grown, a grid of the spec.

    Returns:
        Whether the parameter is one of the optimizer's.
    """
    param = spec.param
    group = next((g for g in optimizer.param_groups if any(p is param for p in g["params"])), None)
    if group is None or param.grad is None:
        return group is not None
    where = spec.expand_to_elements(grown)
    trial = torch.nn.Parameter(torch.zeros_like(_elements(spec, param)[where]))
    trial.grad = _elements(spec, param.grad)[where].to(trial.dtype)
    other = fresh(optimizer, group, [trial])
    other.step()
    _write(spec, param, where, trial.detach())
    kept = state_tensors(optimizer, param)
    for name, values in state_tensors(other, trial).items():
        if name in kept:
            _write(spec, kept[name], where, values)
    return True


def _elements(spec: BlockSpec, values: Tensor) -> Tensor:
    """A tensor of the parameter's shape as the spec's view sees it."""
    return spec.view.like(values.detach()).data


def _write(spec: BlockSpec, target: Tensor, where: Tensor, values: Tensor) -> None:
    view = spec.view.like(target.detach())
    elements = view.data
    elements[where] = values.to(elements.dtype)
    # Where strides are negative, the elements are a copy; otherwise they are written already, and this does nothing.
    view.data = elements
