"""The tensors in an optimizer's state that have one entry per weight, under any name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from torch import Tensor, optim
from torch.optim import Optimizer

from sparse_lightning.compaction.optimizers import is_of_weights
from sparse_lightning.compat.torch import is_hooks, without_step_hooks

ELEMENTWISE = {
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.Adagrad,
    optim.Adadelta,
    optim.RMSprop,
    optim.Rprop,
    optim.ASGD,
}
"""Optimizers that are known to update each weight independently of the others."""


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known to update each weight independently of the others.

    Example:
        >>> import torch
        >>> weights = [torch.nn.Parameter(torch.ones(2, 3))]
        >>> is_elementwise(torch.optim.Adam(weights)), is_elementwise(torch.optim.LBFGS(weights))
        (True, False)
    """
    return type(optimizer) in ELEMENTWISE


def state_tensors(optimizer: Optimizer, param: Tensor) -> dict[str, Tensor]:
    """Return the tensors in the optimizer state of a parameter that have its shape, by name.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(2, 3))
        >>> weight.grad = torch.ones(2, 3)
        >>> adam = torch.optim.Adam([weight])
        >>> adam.step()
        >>> sorted(state_tensors(adam, weight))
        ['exp_avg', 'exp_avg_sq']

    A wrapping optimizer has the state of those that it holds, too.
    """
    [found] = all_state_tensors(optimizer, [param])
    return found


def all_state_tensors(optimizer: Optimizer, params: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """Return `state_tensors` for each of many parameters."""
    states = [optimizer.state.get(param, {}) for param in params]
    pairs = zip(states, params, strict=True)
    found = [
        {name: kept for name, kept in state.items() if is_of_weights(optimizer, name, kept, param.shape)}
        for state, param in pairs
    ]
    for name, inner in inner_optimizers(optimizer).items():
        if inner.state is not optimizer.state:
            for own, other in zip(found, all_state_tensors(inner, params), strict=True):
                own |= {f"{name}.{key}": kept for key, kept in other.items()}
    return found


def inner_optimizers(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return the optimizers that a wrapping optimizer, such as Lookahead, holds: by the name of the attribute."""
    found: dict[str, Optimizer] = {}
    for name, value in vars(optimizer).items():
        several = enumerate(value) if isinstance(value, (list, tuple)) else [("", value)]
        found |= {f"{name}{i}": each for i, each in several if isinstance(each, Optimizer) and each is not optimizer}
    return found


def fresh(optimizer: Optimizer, group: Mapping[str, Any], params: Sequence[Tensor]) -> Optimizer:
    """Return an optimizer of the same class with the options of one of its groups and with empty state.

    It is not built by calling the class, whose arguments are unknown. Its attributes are copied, and the optimizers
    that it wraps are fresh ones of the same parameters: its steps change nothing of the original. Hooks, and a `step`
    that a learning rate scheduler has wrapped, are not copied.
    """
    return _fresh(optimizer, group, list(params), {})


def _fresh(
    optimizer: Optimizer, group: Mapping[str, Any] | None, params: list[Tensor], memo: dict[int, Any]
) -> Optimizer:
    made: Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = made
    made.state = memo[id(optimizer.state)] = memo.get(id(optimizer.state), defaultdict(dict))
    made.param_groups = [] if group is None else [_copied_group(group, params, memo)]
    memo[id(optimizer.param_groups)] = made.param_groups
    for inner in inner_optimizers(optimizer).values():
        if id(inner) not in memo:
            _fresh(inner, _same_group(inner, group), params, memo)
    own = {name: value for name, value in vars(optimizer).items() if name != "step" and not is_hooks(name)}
    made.__dict__.update({name: _copied(value, memo) for name, value in own.items()})
    return without_step_hooks(made)


def _copied_group(group: Mapping[str, Any], params: list[Tensor], memo: dict[int, Any]) -> dict[str, Any]:
    """Return a group with other parameters; the same one where two optimizers share it."""
    if id(group) not in memo:
        memo[id(group["params"])] = params
        options = {name: _copied(value, memo) for name, value in group.items() if name != "params"}
        memo[id(group)] = {**options, "params": params}
    found: dict[str, Any] = memo[id(group)]
    return found


def _same_group(inner: Optimizer, group: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the group of a wrapped optimizer that has parameters of a group of the wrapping one."""
    params = set() if group is None else {id(p) for p in group["params"]}
    return next((g for g in inner.param_groups if any(id(p) in params for p in g["params"])), None)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy; what cannot be copied, such as a process group, is shared."""
    try:
        return deepcopy(value, memo)
    except Exception:  # whatever a class of others raises: it says that its objects cannot be copied
        return value
