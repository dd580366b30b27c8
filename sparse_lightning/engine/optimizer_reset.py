"""Optimizer state of blocks that are pruned or grown: reset, and restarted as a fresh optimizer would."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparse_lightning.blocks.shards import any_rank, held
from sparse_lightning.blocks.spec import BlockSpec
from sparse_lightning.engine.hold import Hold
from sparse_lightning.errors import SparseLightningError
from sparse_lightning.flow.optimizer_state import all_state_tensors, fresh, is_elementwise, state_tensors
from sparse_lightning.methods import Method


def reset_blocks(optimizers: Iterable[Optimizer], hold: Hold, changed: Tensor) -> None:
    """Zero the optimizer state of the blocks where `changed`, a flat mask, is True."""
    for optimizer in optimizers:
        params = hold.parameters()
        states = dict(zip(map(id, params), all_state_tensors(optimizer, params), strict=True))
        for name in dict.fromkeys(name for state in states.values() for name in state):
            hold.fill_in({key: state[name] for key, state in states.items() if name in state}, changed)


def is_rehearsal(optimizer: Optimizer) -> bool:
    """Whether the last step did not train: it had a learning rate of zero, and all gradients were zero.

    `torch.distributed.checkpoint` makes such a step to create the optimizer state that it loads into.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> weight.grad = torch.zeros(2)
        >>> is_rehearsal(torch.optim.SGD([weight], lr=0.0)), is_rehearsal(torch.optim.SGD([weight], lr=0.1))
        (True, False)
    """
    rates = [group.get("lr", 1.0) for group in optimizer.param_groups]
    if any(isinstance(rate, Tensor) and rate.is_cuda for rate in rates) and torch.cuda.is_current_stream_capturing():
        return False  # what is on the device cannot be read while a CUDA graph is captured
    if any(float(rate) for rate in rates):
        return False
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    moves = any(grad.layout != torch.strided or bool(held(grad).any()) for grad in grads)
    return bool(grads) and not any_rank(moves, grads[0].device)


def restart_blocks(optimizer: Optimizer, spec: BlockSpec, grown: Tensor, start: Sequence[Tensor]) -> Tensor | None:
    """Replace the last step of grown blocks by the first step of a fresh optimizer.

    The state of grown blocks was zero, but state of the whole parameter was not, such as the number of steps by which
    Adam corrects its bias: the step of grown blocks would be several times too large.

    Args:
        optimizer: made the step; the gradients are still there.
        spec: blocks of one of its parameters.
        grown: which of them have grown, a grid of the spec.
        start: their weights before the step, from `weights_of`.

    Returns:
        The blocks that still wait, since their gradient was zero; None if the parameter is not one of the optimizer.
    """
    group = _group_of(optimizer, spec.param)
    if group is None:
        return None
    grad = spec.param.grad
    if grad is None or grad.layout != torch.strided:
        return grown
    kept = state_tensors(optimizer, spec.param)
    steps = _first_step(optimizer, group, spec, grown, start)
    regions = spec.part(None, list(kept.values())).chosen(grown)
    for (where, (weight, *states)), (made, made_states) in zip(regions, steps, strict=True):
        weight[where] = made
        for name, state in zip(kept, states, strict=True):
            if name in made_states:
                state[where] = made_states[name].to(state.dtype)
    return grown & (spec.norms(grad) == 0).to(grown.device)


FirstStep = tuple[Tensor, dict[str, Tensor]]
"""The weights of some grown blocks after their first step, and the state that belongs to them."""


def _first_step(
    optimizer: Optimizer, group: dict[str, Any], spec: BlockSpec, grown: Tensor, start: Sequence[Tensor]
) -> list[FirstStep]:
    """Return the first step of a fresh optimizer for each region of grown blocks.

    An optimizer that is known to be elementwise is tried on the grown weights alone, others on the whole parameter.
    """
    grad = cast(Tensor, spec.param.grad)
    if is_elementwise(optimizer):
        grads = [window[where] for where, (_, window) in spec.part(None, [grad]).chosen(grown)]
        alone = [_step_of(optimizer, group, *pair) for pair in zip(start, grads, strict=True)]
        return [(trial.detach(), state_tensors(other, trial)) for other, trial in alone]
    whole = spec.param.detach().clone()
    for first, (where, (_, window)) in zip(start, spec.part(None, [whole]).chosen(grown), strict=True):
        window[where] = first
    other, trial = _step_of(optimizer, group, whole, grad)
    states = state_tensors(other, trial)
    windows = spec.part(None, [trial.detach(), *states.values()]).chosen(grown)
    return [
        (made[where], {name: window[where] for name, window in zip(states, kept, strict=True)})
        for where, (_, made, *kept) in windows
    ]


def _step_of(
    optimizer: Optimizer, group: dict[str, Any], first: Tensor, grad: Tensor
) -> tuple[Optimizer, nn.Parameter]:
    trial = nn.Parameter(first.detach().clone())
    trial.grad = grad.to(trial.dtype)
    other = fresh(optimizer, group, [trial])
    other.step()
    return other, trial


def weights_of(spec: BlockSpec, grown: Tensor) -> list[Tensor]:
    """Return copies of the weights of some blocks, one for each region of this process."""
    return [weight[where].detach() for where, (weight,) in spec.part().chosen(grown)]


def check_can_restart(method: Method, optimizers: Iterable[Optimizer], params: Sequence[Tensor]) -> None:
    """Raise an error if a method grows blocks, and an optimizer cannot make the first step of a fresh one.

    Each optimizer that is not known makes such a step on a copy of one of its parameters, with gradients of zero.
    """
    for optimizer in optimizers if method.growth is not None else []:
        mine = next((p for p in params if _group_of(optimizer, p) is not None), None)
        if mine is None or is_elementwise(optimizer):
            continue
        group = cast(dict[str, Any], _group_of(optimizer, mine))
        try:
            _step_of(optimizer, group, torch.zeros_like(mine), torch.zeros_like(mine))
        except Exception as error:  # whatever a class of others raises: it says that the pair does not work
            name, kind = type(method).__name__, type(optimizer).__name__
            raise SparseLightningError(
                f"{name} cannot be used with {kind}: blocks that grow make the first step of a new {kind}, which "
                f"raises {type(error).__name__}: {error}. Use a method that grows no blocks, such as Gradual, or an "
                "optimizer such as AdamW"
            ) from error


def _group_of(optimizer: Optimizer, param: Tensor) -> dict[str, Any] | None:
    return next((g for g in optimizer.param_groups if any(p is param for p in g["params"])), None)
