"""Private names of torch. Each has a test in `tests/test_compat_torch.py` that fails by name if torch changes it."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_descriptor = attrgetter("_cdata")


def descriptors(tensors: Sequence[Tensor]) -> list[int]:
    """Return the address of the description of each tensor, which torch exchanges only in `swap_tensors`.

    Private: `Tensor._cdata`, a `c10::TensorImpl`.
    """
    return list(map(_descriptor, tensors))


def has_dispatch_mode() -> bool:
    """Whether a `TorchDispatchMode` is active, such as one that counts operations: it can't see into compiled code.

    Private: `torch.utils._python_dispatch._get_current_dispatch_mode`.
    """
    return torch.utils._python_dispatch._get_current_dispatch_mode() is not None


def recompile_limit(variants: int) -> AbstractContextManager[None]:
    """Allow a compiled function that many variants.

    Private: `torch._dynamo.config`; it is imported here because `torch._dynamo` takes seconds to load.
    """
    import torch._dynamo

    context: AbstractContextManager[None] = torch._dynamo.config.patch(recompile_limit=variants)
    return context


def recompile_limit_error() -> type[Exception]:
    """Return the error that a function compiled with `fullgraph=True` raises beyond the limit of variants.

    Private: `torch._dynamo.exc.FailOnRecompileLimitHit`; imported here because `torch._dynamo` takes seconds to load.
    """
    import torch._dynamo

    return torch._dynamo.exc.FailOnRecompileLimitHit


def recompile() -> None:
    """Let all compiled code be compiled again when it is next called, as after hooks of modules have changed.

    Private: the module name `torch._dynamo`, without which nothing has been compiled.
    """
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def local_shape_and_offset(
    shape: Sequence[int], mesh: Any, placements: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of the shard of a DTensor on this process, and its offset in the whole tensor.

    Private: `torch.distributed.tensor._utils.compute_local_shape_and_global_offset`; imported here because
    `torch.distributed.tensor` is slow to load and only needed for DTensors.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offset = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    return tuple(sizes), tuple(offset)


def without_step_hooks(optimizer: Optimizer) -> Optimizer:
    """Remove the step hooks from a shallow copy of an optimizer, and leave those of the original; return the copy.

    Private: `Optimizer._optimizer_step_pre_hooks` and `Optimizer._optimizer_step_post_hooks`.
    """
    vars(optimizer).update(_optimizer_step_pre_hooks=OrderedDict(), _optimizer_step_post_hooks=OrderedDict())
    return optimizer


def step_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Return the functions that run after each step of an optimizer.

    Private: `Optimizer._optimizer_step_post_hooks`.
    """
    found: list[Callable[..., Any]] = list(vars(optimizer)["_optimizer_step_post_hooks"].values())
    return found


def is_hooks(name: str) -> bool:
    """Whether an attribute of an optimizer holds its hooks.

    Private: `Optimizer._optimizer_step_pre_hooks` and others that begin alike.
    """
    return name.startswith("_optimizer_")


def is_fsdp1_flattened(parameter: Tensor) -> bool:
    """Whether a parameter is a flat parameter of FSDP1, or a view into one.

    Private: the class name `FlatParameter` and the attribute `_fsdp_flattened`.
    """
    return type(parameter).__name__ == "FlatParameter" or bool(getattr(parameter, "_fsdp_flattened", False))


def local_tensors(params: Sequence[Any]) -> list[Tensor]:
    """Return the live local parts of DTensors.

    Private: `DTensor._local_tensor`. The public `to_local` takes a hundred times as long, and this is called at every
    step.
    """
    return [param._local_tensor for param in params]


def multiply_all_(tensors: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
    """Multiply each tensor in place by its factor, in one call.

    Private: `torch._foreach_mul_`.
    """
    torch._foreach_mul_(list(tensors), list(factors))


def slots(model: nn.Module, wanted: set[int]) -> list[tuple[dict[str, Any], str]]:
    """Return where some parameters of a model, by their ids, and the modules on the way to them are held: dict and key.

    Private: `nn.Module._parameters` and `nn.Module._modules`.
    """
    found: list[tuple[dict[str, Any], str]] = []
    for key, param in model._parameters.items():
        if id(param) in wanted:
            found.append((model._parameters, key))
    for key, module in model._modules.items():
        inner = [] if module is None else slots(module, wanted)
        found += [(model._modules, key), *inner] if inner else []
    return found


def put_in_place_by_fsdp(model: nn.Module) -> dict[int, Tensor]:
    """Return the sharded parameters of FSDP2 for the ids of those that it puts in their place for a while.

    A module holds gathered parameters from its forward pass on, until FSDP reshards them.

    Private: `FSDPModule._get_fsdp_state`, `FSDPState._fsdp_param_groups` or before torch 2.12 `_fsdp_param_group`, and
    of its `fsdp_params` the attributes `_unsharded_param` and `_sharded_post_forward_param`.
    """
    from torch.distributed.fsdp import FSDPModule  # here, because it is slow to load and only needed for DTensors

    found: dict[int, Tensor] = {}
    for module in model.modules():
        state: Any = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for param in [param for group in groups if group is not None for param in group.fsdp_params]:
            for name in ("_unsharded_param", "_sharded_post_forward_param"):
                other = getattr(param, name, None)
                found.update({} if other is None else {id(other): param.sharded_param})
    return found


def version(tensor: Tensor) -> int:
    """Return a number that each change of a tensor in place increases; 0 for tensors of inference mode."""
    try:
        return int(tensor._version)
    except RuntimeError:
        return 0


def is_operation(target: object) -> bool:
    """Whether the target of a node of a traced graph is an operation of torch with its overload.

    Private: `torch._ops.OpOverload`.
    """
    return isinstance(target, torch._ops.OpOverload)


def writes_in_place(target: Any) -> bool:
    """Whether an operation of a traced graph changes one of its arguments.

    Private: `torch._ops.OpOverload` and its `_schema`.
    """
    return is_operation(target) and bool(target._schema.is_mutable)


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has forward or backward hooks.

    Private: `nn.Module._forward_hooks`, `_forward_pre_hooks` and `_backward_hooks`.
    """
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def map_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    """Return nested tuples, lists and dicts with each leaf changed.

    Private: `torch.utils._pytree`.
    """
    return torch.utils._pytree.tree_map(change, tree)


def leaves(tree: Any) -> list[Any]:
    """Return the leaves of nested tuples, lists, dicts and outputs of models.

    Private: `torch.utils._pytree`.
    """
    return torch.utils._pytree.tree_leaves(tree)


def shallow_copy(module: nn.Module, keeps: Callable[[Any], bool]) -> nn.Module:
    """Return a module of the same class with the same attributes, in eval mode, and with some of the forward hooks.

    It is not compiled, as `Module.compile` has done.

    Private: `Module._forward_hooks`, `Module._forward_pre_hooks` and `Module._compiled_call_impl`.

    Args:
        module: to copy; it is not changed.
        keeps: whether to keep a hook.
    """
    copied: nn.Module = object.__new__(type(module))  # the class of FSDP2 would build a new module
    vars(copied).update(vars(module), training=False, _compiled_call_impl=None)
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        hooks = vars(module)[name]
        vars(copied)[name] = type(hooks)((key, hook) for key, hook in hooks.items() if keeps(hook))
    return copied


def fill_copy(
    copied: nn.Module, module: nn.Module, child: Callable[[nn.Module], nn.Module], tensor: Callable[[Tensor], Tensor]
) -> None:
    """Give a shallow copy of a module its own submodules, parameters and buffers.

    Private: `Module._modules`, `Module._parameters` and `Module._buffers`.
    """
    makers: dict[str, Callable[[Any], Any]] = {"_modules": child, "_parameters": tensor, "_buffers": tensor}
    for name, make in makers.items():
        held = vars(module)[name]
        vars(copied)[name] = {key: None if item is None else make(item) for key, item in held.items()}


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model that `torch.compile` has wrapped; another model as it is.

    Private: `OptimizedModule._orig_mod`.
    """
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def uncompiled_function(function: Any) -> Any:
    """Return the function that `torch.compile` has wrapped, as Lightning does with `forward`; another one as it is.

    Private: `_torchdynamo_orig_callable`, and the module `torch._dynamo`, whose functions wrap it once more.
    """
    found = getattr(function, "_torchdynamo_orig_callable", function)
    is_wrapper = str(getattr(found, "__globals__", {}).get("__name__")).startswith("torch._dynamo")
    return getattr(found, "__wrapped__", found) if found is not function and is_wrapper else found


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` has compiled a module, or a function that it holds.

    Private: `OptimizedModule._orig_mod`, `Module._compiled_call_impl`, and `_torchdynamo_orig_callable` of functions.
    """
    held = vars(module).values()
    is_own = hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
    return is_own or any(uncompiled_function(each) is not each for each in held)


def builtin_of(operator: Any) -> Callable[..., Any]:
    """Return the function in C++ that an operator of `torch.ops` calls: without a frame of Python in between."""
    found: Callable[..., Any] = operator._op
    return found
