"""What must hold before units are removed from a model while it trains; each error says what does not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparse_lightning.blocks.shards import has_others, is_sharded
from sparse_lightning.compat.torch import is_compiled
from sparse_lightning.engine.attached import holders
from sparse_lightning.errors import PatternError, SparseLightningError
from sparse_lightning.flow.optimizer_state import fresh, inner_optimizers, is_elementwise
from sparse_lightning.methods import Method


def check_method(method: Method) -> None:
    """Raise an error if a method lets blocks grow, or changes the weights of blocks that are kept."""
    changes = any(getattr(type(method), name) is not getattr(Method, name) for name in ("change", "after_step"))
    if method.growth is not None or changes:
        why = "lets pruned blocks grow again" if method.growth is not None else "changes the weights of blocks"
        raise SparseLightningError(
            f"shrink cannot be used with {type(method).__name__}, which {why}: use the method Gradual, or no shrink"
        )


def check_processes(wraps_again: bool) -> None:
    """Raise an error if others hold the gradients of parameters that get smaller, as DistributedDataParallel does."""
    if has_others() and not wraps_again:
        raise SparseLightningError(
            "shrink with several processes needs something that wraps the model again whenever units are removed: use "
            "SparsityCallback in a Lightning Trainer with DDPStrategy, or no shrink"
        )


def check_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise an error if tensors of a model cannot get smaller in place.

    Args:
        model: the model.
        tensors: what may be cut, by name.
    """
    compiled = next((name for name, module in model.named_modules() if is_compiled(module)), None)
    if compiled is not None:
        raise SparseLightningError(
            f"{compiled or 'the model'} is compiled by torch.compile, which would compile it again for each size that "
            "units are removed to: train without torch.compile, or without shrink"
        )
    sharded = next((name for name, tensor in tensors.items() if is_sharded(tensor)), None)
    if sharded is not None:
        raise PatternError(
            f"{sharded} is sharded, and units cannot be removed from shards: use shrink with DDP or one device, or "
            "train without it"
        )
    cut, owners = {id(tensor) for tensor in tensors.values()}, dict[int, list[tuple[str, Tensor]]]()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        owners.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    for storage, held in owners.items():
        if storage and len(held) > 1 and any(id(tensor) in cut for _, tensor in held):
            raise PatternError(
                f"{held[0][0]} and {held[1][0]} share memory, and would not when units are removed: make them one "
                "parameter, or exclude their units from the patterns"
            )
    _check_saved(model, tensors)


def _check_saved(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise an error if a tensor that may be cut is saved under another name, or as a view, which would stay cut."""
    cut = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors.values()}
    named = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    # Not a method of the model, which may leave parameters out and take no arguments.
    for key, value in nn.Module.state_dict(model, keep_vars=True).items():
        own = cut.get(value.untyped_storage().data_ptr()) if isinstance(value, Tensor) else None
        if own is not None and not (value is own and named.get(key) is own):
            raise PatternError(
                f"the state dict of {type(model).__name__} has {key!r}, a parameter under another name or a view of "
                "one, so that checkpoints would not be whole while units are removed: exclude its units from the "
                "patterns, or use no shrink"
            )


def check_others(attached: Iterable[Tensor], shrinking: Iterable[Tensor]) -> None:
    """Raise an error if parameters of two Sparsifiers are the same, and one of them makes them smaller.

    Args:
        attached: the parameters of a new one.
        shrinking: those that it may make smaller.
    """
    mine, smaller = {id(tensor) for tensor in attached}, {id(tensor) for tensor in shrinking}
    for holder in holders():
        theirs = {id(param): scope.name for scope in holder.scopes for param in scope.parameters()}
        shared = (smaller & theirs.keys()) | (mine & {id(param) for param in holder.shrinking_parameters()})
        if shared:
            raise PatternError(
                f"another Sparsifier is attached to {theirs.get(min(shared), 'parameters')}, which would get smaller: "
                "use one SparsityCallback or Sparsifier for these parameters, or no shrink"
            )


TRIED: Sequence[tuple[tuple[int, ...], int]] = (
    ((4, 3), 0),
    ((3, 4), 1),
    ((4,), 0),
    ((4, 3, 2, 2), 0),
    ((3, 4, 2, 2), 1),
)
"""Shapes of parameters on which an optimizer is tried, and the dimension of which it loses what is not in `KEPT`."""

KEPT = (0, 2)


def check_optimizers(optimizers: Sequence[Optimizer], tensors: Iterable[Tensor]) -> None:
    """Raise an error if an optimizer would train kept weights otherwise without those that are zero.

    One that is not known makes two steps on small parameters, with and without slices that are zero.
    """
    mine = {id(tensor) for tensor in tensors}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if is_elementwise(optimizer) or not any(id(parameter) in mine for parameter in group["params"]):
                continue
            try:
                reason = "wraps another optimizer" if inner_optimizers(optimizer) else _difference(optimizer, group)
            except Exception as error:  # whatever a class of others raises: it says that it cannot be tried
                reason = f"cannot be tried on a small parameter ({type(error).__name__}: {error})"
            if reason is not None:
                raise SparseLightningError(
                    f"shrink cannot be used with {type(optimizer).__name__}, which {reason}: use an optimizer that "
                    "updates each weight by itself, such as AdamW, or no shrink"
                )


def _difference(optimizer: Optimizer, group: Mapping[str, Any]) -> str | None:
    """Return how steps on a part of a parameter differ from those on all of it; None if they do not."""
    reasons = (_difference_in(optimizer, group, shape, dim) for shape, dim in TRIED)
    return next((reason for reason in reasons if reason is not None), None)


def _difference_in(optimizer: Optimizer, group: Mapping[str, Any], shape: tuple[int, ...], dim: int) -> str | None:
    like, every = group["params"][0], range(shape[dim])
    numbers = torch.Generator().manual_seed(0)
    values, *gradients = (torch.randn(shape, generator=numbers) for _ in range(3))
    for each in (values, *gradients):
        each.index_fill_(dim, torch.tensor([n for n in every if n not in KEPT]), 0)
    kept = torch.tensor(KEPT)
    whole, part = (nn.Parameter(v.to(like)) for v in (values, values.index_select(dim, kept)))
    for parameter, indices in ((whole, torch.tensor(every)), (part, kept)):
        other = fresh(optimizer, group, [parameter])
        for gradient in gradients:
            parameter.grad = gradient.index_select(dim, indices).to(like)
            other.step()
        for key, value in other.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape != parameter.shape and value.numel() > 1:
                return f"keeps the state {key!r} in another shape than that of its parameter"
    is_same = torch.allclose(whole.index_select(dim, kept.to(whole.device)), part, rtol=1e-4)
    return None if is_same else f"makes other steps on a parameter of shape {shape} without its zero slices"
