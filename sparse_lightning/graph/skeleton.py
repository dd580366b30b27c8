"""A skeleton of a model for tracing: the same modules and forward code, in eval mode."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from sparse_lightning.compat.accelerate import plain_forward
from sparse_lightning.compat.torch import fill_copy, shallow_copy, uncompiled_function

_OWN = frozenset(vars(nn.Module()))
"""What every module has: tensors, modules and hooks, which are copied apart."""

_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_forward_module")


def skeleton(model: nn.Module) -> nn.Module:
    """Return a copy of the modules of a model that shares its parameters, for tracing.

    Wrappers of torch.compile, activation checkpointing and Fabric are removed, and so are compiled code, the mixed
    precision of Accelerate, and hooks of torch.distributed. A model with sharded parameters, or some on the meta
    device, gets parameters of the full shapes on the meta device.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Dropout())
        >>> copied = skeleton(model)
        >>> copied[0].weight is model[0].weight, copied.training, model.training
        (True, False, True)
    """
    tensors = [*model.parameters(), *model.buffers()]
    plain = all(type(t) in (nn.Parameter, Tensor, nn.Buffer) and not t.is_meta for t in tensors)
    return _Skeleton(_same if plain else _on_meta).of(model)


def copy_with(model: nn.Module, convert: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a copy of the modules of a model as `skeleton` does, with other parameters and buffers.

    Args:
        model: to copy.
        convert: returns the tensor of the copy; a parameter for a parameter.
    """
    return _Skeleton(convert).of(model)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _on_meta(tensor: Tensor) -> Tensor:
    whole = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(whole, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else whole


class _Skeleton:
    """Copies modules; what is shared or tied in the model is so in the copy.

    Args:
        convert: makes the parameters and buffers of the copy.
    """

    def __init__(self, convert: Callable[[Tensor], Tensor]) -> None:
        self._convert = convert
        self._copies: dict[int, nn.Module] = {}
        self._tensors: dict[int, Tensor] = {}
        self._containers: dict[int, Any] = {}

    def of(self, model: nn.Module) -> nn.Module:
        copied = self._module(model)
        for module in list(self._copies.values()):
            if "forward" in vars(module):
                module.forward = plain_forward(module)
            for name, item in vars(module).items():
                if name not in _OWN and (not name.startswith("_") or isinstance(item, nn.Module | list | dict)):
                    vars(module)[name] = self._moved(item)
        return copied

    def _module(self, module: nn.Module) -> nn.Module:
        inner = next((found for name in _WRAPPED if isinstance(found := getattr(module, name, None), nn.Module)), None)
        if inner is not None:
            return self._module(inner)
        if id(module) not in self._copies:
            self._copies[id(module)] = shallow_copy(module, _is_own)
            fill_copy(self._copies[id(module)], module, self._module, self._tensor)
        return self._copies[id(module)]

    def _tensor(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = self._convert(tensor)
        return self._tensors[id(tensor)]

    def _moved(self, item: Any) -> Any:
        """Return what a plain attribute holds, with modules and tensors of the model as copies, and not compiled."""
        if isinstance(item, nn.Module):
            return self._copies.get(id(item), item)
        if isinstance(item, Tensor):
            return self._tensors.get(id(item), item)
        function = uncompiled_function(item)
        if isinstance(function, MethodType) and id(function.__self__) in self._copies:
            return MethodType(function.__func__, self._copies[id(function.__self__)])
        if function is not item:
            return function
        return self._contained(item) if type(item) in (list, tuple, dict) else item

    def _contained(self, item: Any) -> Any:
        """Return a list, tuple or dict of the copies: what a forward pass writes into it is not for the model."""
        if id(item) in self._containers:
            return self._containers[id(item)]
        if isinstance(item, tuple):
            moved = tuple(map(self._moved, item))
            return moved if any(a is not b for a, b in zip(moved, item, strict=True)) else item
        made = self._containers[id(item)] = type(item)()
        if isinstance(item, dict):
            made.update((key, self._moved(each)) for key, each in item.items())
        else:
            made.extend(map(self._moved, item))
        return made


def _is_own(hook: Any) -> bool:
    """Whether a hook is not one by which torch.distributed gathers and scatters."""
    function = getattr(hook, "func", hook)
    return not str(getattr(function, "__module__", "")).startswith("torch.distributed")
