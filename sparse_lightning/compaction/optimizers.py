"""Optimizers: their state is cut as the parameters are, and their groups get the parameters of the smaller model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from sparse_lightning.compat.torch import step_hooks
from sparse_lightning.errors import SparseLightningError

Cut = Callable[[Tensor, Tensor], Tensor]
"""Cuts a tensor of the shape of a parameter, which is passed first."""


def check_state(optimizers: Iterable[Optimizer], replaced: Mapping[int, nn.Parameter], cut: Cut) -> None:
    """Check that optimizers have parameters of the model, and that all state of parameters that are cut can be cut.

    Raises:
        SparseLightningError: if an optimizer has none, a Sparsifier is attached to it, or a tensor of its state has
            neither the shape of its parameter nor one element.
    """
    for optimizer in optimizers:
        if any(getattr(getattr(hook, "__self__", None), "holds_masks", False) for hook in step_hooks(optimizer)):
            raise SparseLightningError(
                f"a Sparsifier is attached to {type(optimizer).__name__}, and holds the masks of the whole model: call "
                "detach() of the Sparsifier, then compact, and attach a new one to the smaller model if it is to be "
                "pruned further"
            )
        if not any(id(parameter) in replaced for group in optimizer.param_groups for parameter in group["params"]):
            raise SparseLightningError(
                f"{type(optimizer).__name__} holds none of the parameters of the model, so that it would not train the "
                "smaller one: pass the optimizers of this model, or none"
            )
        for parameter, state in optimizer.state.items():
            small = replaced.get(id(parameter))
            if small is None or small.shape == parameter.shape:
                continue
            odd = next((key for key, value in state.items() if not _is_known(parameter, value)), None)
            if odd is not None:
                raise SparseLightningError(
                    f"{type(optimizer).__name__} has the state {odd!r} of shape {tuple(state[odd].shape)} for a "
                    f"parameter of shape {tuple(parameter.shape)}, and it is unknown how to cut it: pass no optimizer "
                    "to compact, and make a new one for the smaller model"
                )


def rebind(optimizers: Iterable[Optimizer], replaced: Mapping[int, nn.Parameter], cut: Cut) -> None:
    """Give optimizers the parameters of the smaller model with the state of theirs, in place.

    Parameters of other models stay.
    """
    for optimizer in optimizers:
        state = {}
        for parameter, held in optimizer.state.items():
            small = replaced.get(id(parameter))
            state[parameter if small is None else small] = (
                held if small is None else {key: _small(parameter, value, cut) for key, value in held.items()}
            )
        for group in optimizer.param_groups:
            group["params"] = [replaced.get(id(parameter), parameter) for parameter in group["params"]]
        optimizer.state.clear()
        optimizer.state.update(state)


def is_of_weights(optimizer: Optimizer, key: str, value: Any, shape: tuple[int, ...]) -> bool:
    """Whether an entry of the state of a parameter of this shape has a number for each weight.

    A number for a parameter of one weight may be one for the whole parameter, as a count of steps is. The state of
    larger parameters decides.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(1))])
        >>> for p in optimizer.param_groups[0]["params"]:
        ...     optimizer.state[p] = {"mean": torch.zeros_like(p), "steps": torch.ones(1)}
        >>> [is_of_weights(optimizer, key, torch.ones(1), (1,)) for key in ("mean", "steps")]
        [True, False]
    """
    if not isinstance(value, Tensor) or value.shape != shape or not shape:
        return False
    if value.numel() != 1:
        return True
    larger = [own.get(key) for parameter, own in optimizer.state.items() if parameter.numel() > 1]
    return not any(isinstance(other, Tensor) and other.numel() == 1 for other in larger)


def _is_known(parameter: Tensor, value: Any) -> bool:
    return not isinstance(value, Tensor) or value.shape == parameter.shape or value.numel() == 1


def _small(parameter: Tensor, value: Any, cut: Cut) -> Any:
    has_shape = isinstance(value, Tensor) and value.shape == parameter.shape
    return cut(parameter, value) if has_shape else value
