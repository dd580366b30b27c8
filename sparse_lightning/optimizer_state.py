"""What an optimizer keeps for the weights, whatever it is called: found, reset by block, and made afresh."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparse_lightning.block import BlockSpec
from sparse_lightning.distributed import any_rank, held


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


def is_rehearsal(optimizer: Optimizer) -> bool:
    """Whether the step just made was none of training: without a learning rate, on gradients that are all zero.

    `torch.distributed.checkpoint` makes such steps, so that an optimizer has state to load into.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> weight.grad = torch.zeros(2)
        >>> is_rehearsal(torch.optim.SGD([weight], lr=0.0)), is_rehearsal(torch.optim.SGD([weight], lr=0.1))
        (True, False)
    """
    if any(float(group.get("lr", 1.0)) for group in optimizer.param_groups):
        return False
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    moves = any(grad.layout != torch.strided or bool(held(grad).any()) for grad in grads)
    return bool(grads) and not any_rank(moves, grads[0].device)


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
    kept = state_tensors(optimizer, param)
    for where, (weight, grad, *states) in spec.part(None, [param.grad, *kept.values()]).chosen(grown):
        trial = torch.nn.Parameter(torch.zeros_like(weight[where]))
        trial.grad = grad[where].to(trial.dtype)
        other = fresh(optimizer, group, [trial])
        other.step()
        weight[where] = trial.detach()
        made = state_tensors(other, trial)
        for name, state in zip(kept, states, strict=True):
            if name in made:
                state[where] = made[name].to(state.dtype)
    return True
