"""A skeleton of a model for tracing: the same modules and forward code, in eval mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_forward_module")


def skeleton(model: nn.Module) -> nn.Module:
    """Return a copy of the modules of a model that shares its parameters, for tracing.

    Wrappers of torch.compile, activation checkpointing and Fabric are removed, and hooks of torch.distributed. A model
    with sharded parameters, or some on the meta device, gets parameters of the full shapes on the meta device.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Dropout())
        >>> copied = skeleton(model)
        >>> copied[0].weight is model[0].weight, copied.training, model.training
        (True, False, True)
    """
    tensors = [*model.parameters(), *model.buffers()]
    plain = all(type(t) in (nn.Parameter, Tensor, nn.Buffer) and not t.is_meta for t in tensors)
    return _Skeleton(_same if plain else _on_meta).of(model)


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
        self._modules: dict[int, nn.Module] = {}
        self._tensors: dict[int, Tensor] = {}

    def of(self, model: nn.Module) -> nn.Module:
        copied = self._module(model)
        for module in list(self._modules.values()):
            for name, item in vars(module).items():
                if not name.startswith("_") or isinstance(item, nn.Module):
                    vars(module)[name] = self._moved(item)
        return copied

    def _module(self, module: nn.Module) -> nn.Module:
        for name in _WRAPPED:
            inner = module._modules.get(name)
            if inner is not None:
                return self._module(inner)
        if id(module) not in self._modules:
            copied = type(module).__new__(type(module))
            self._modules[id(module)] = copied
            vars(copied).update(vars(module))
            vars(copied).update(
                training=False,
                _modules={name: child and self._module(child) for name, child in module._modules.items()},
                _parameters={name: self._tensor(t) for name, t in module._parameters.items()},
                _buffers={name: self._tensor(t) for name, t in module._buffers.items()},
                _forward_hooks=_own_hooks(module._forward_hooks),
                _forward_pre_hooks=_own_hooks(module._forward_pre_hooks),
            )
        return self._modules[id(module)]

    def _tensor(self, tensor: Tensor | None) -> Tensor | None:
        if tensor is not None and id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = self._convert(tensor)
        return None if tensor is None else self._tensors[id(tensor)]

    def _moved(self, item: Any) -> Any:
        """Return what a plain attribute holds, with modules of the model replaced by their copies."""
        if isinstance(item, nn.Module):
            return self._modules.get(id(item), item)
        if type(item) in (list, tuple) and any(isinstance(each, nn.Module) for each in item):
            return type(item)(self._moved(each) for each in item)
        if type(item) is dict and any(isinstance(each, nn.Module) for each in item.values()):
            return {key: self._moved(each) for key, each in item.items()}
        return item


def _own_hooks(hooks: Any) -> Any:
    """Return hooks without those by which torch.distributed gathers and scatters."""
    kept = {key: hook for key, hook in hooks.items() if not _module_of(hook).startswith("torch.distributed")}
    return type(hooks)(kept)


def _module_of(hook: Any) -> str:
    function = getattr(hook, "func", hook)
    return str(getattr(function, "__module__", ""))
