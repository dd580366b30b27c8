"""The tensors of a model's state dict: unsharded, and with the names of tied ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparse_lightning.blocks.shards import is_rank_zero, is_sharded
from sparse_lightning.errors import SparseLightningError


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict with the parameters themselves, tied ones under each of their names.

    Raises:
        SparseLightningError: if an entry is not a tensor: safetensors files store tensors only.
    """
    state = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise SparseLightningError(
                f"{name} in the state dict of {type(model).__name__} is a {type(value).__name__}, not a tensor, and "
                "cannot be exported: remove it from get_extra_state, or save a checkpoint instead"
            )
    return dict(state)


def first_names(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Map each name to the first name of the same tensor: to itself, unless it is tied to an earlier one.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        >>> model[1].weight = model[0].weight
        >>> first_names(tensors_of(model))
        {'0.weight': '0.weight', '1.weight': '0.weight'}
    """
    known: dict[tuple[object, ...], str] = {}
    return {name: known.setdefault(_identity(tensor), name) for name, tensor in state.items()}


def _identity(tensor: Tensor) -> tuple[object, ...]:
    # Empty tensors share one address, and a sharded tensor has one on each rank.
    address = id(tensor) if is_sharded(tensor) or not tensor.numel() else tensor.data_ptr()
    return address, tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def check_whole(model: nn.Module, why: str, exporter: str) -> None:
    """Check that no parameter is sharded.

    Args:
        model: to export.
        why: what happens in one process.
        exporter: its name.

    Raises:
        SparseLightningError: if one is.
    """
    sharded = next((name for name, parameter in model.named_parameters() if is_sharded(parameter)), None)
    if sharded is not None:
        raise SparseLightningError(
            f"{sharded} is sharded over processes, and {why}: export `Weights` instead, load them into the plain "
            f"model, and call {exporter} there"
        )


def writes() -> bool:
    """Whether this process writes files: rank 0, or the only process."""
    return is_rank_zero()


def plain(tensor: Tensor) -> Tensor | None:
    """Return a contiguous copy on the CPU; None on ranks that do not write.

    A sharded tensor is gathered, so all ranks must call this for the same tensors in the same order.
    """
    whole = cast(Any, tensor.detach()).full_tensor() if is_sharded(tensor) else tensor.detach()
    return whole.to("cpu", copy=True, memory_format=torch.contiguous_format) if writes() else None
