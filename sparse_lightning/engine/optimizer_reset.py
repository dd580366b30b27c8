"""Optimizer state of blocks that are pruned or grown: reset, and restarted as a fresh optimizer would."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparse_lightning.blocks.shards import any_rank, held
from sparse_lightning.blocks.spec import BlockSpec
from sparse_lightning.engine.hold import Hold
from sparse_lightning.flow.optimizer_state import all_state_tensors, fresh, state_tensors


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


def restart_blocks(optimizer: Optimizer, spec: BlockSpec, grown: Tensor, start: Tensor | None = None) -> bool:
    """Replace the last step of grown blocks by the first step of a fresh optimizer.

    The state of grown blocks was zero, but state of the whole parameter was not, such as the number of steps by which
    Adam corrects its bias: the step of grown blocks would be several times too large.

    Args:
        optimizer: made the step; the gradients are still there.
        spec: blocks of one of its parameters.
        grown: which of them have grown, a grid of the spec.
        start: what the grown blocks start at, in the shape of the parameter; None for zero.

    Returns:
        Whether the parameter belongs to the optimizer.
    """
    param = spec.param
    group = next((g for g in optimizer.param_groups if any(p is param for p in g["params"])), None)
    if group is None or param.grad is None:
        return group is not None
    kept = state_tensors(optimizer, param)
    begin = torch.zeros_like(param) if start is None else start
    for where, (weight, grad, first, *states) in spec.part(None, [param.grad, begin, *kept.values()]).chosen(grown):
        trial = torch.nn.Parameter(first[where].detach().clone())
        trial.grad = grad[where].to(trial.dtype)
        other = fresh(optimizer, group, [trial])
        other.step()
        weight[where] = trial.detach()
        made = state_tensors(other, trial)
        for name, state in zip(kept, states, strict=True):
            if name in made:
                state[where] = made[name].to(state.dtype)
    return True
