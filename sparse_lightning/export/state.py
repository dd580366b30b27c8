"""What a model's state dict holds: each tensor once and whole, and the names that share one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparse_lightning.distributed import has_others, is_sharded
from sparse_lightning.errors import SparseLightningError


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The state dict as it is in the model: parameters as the model holds them, tied ones under each name.

    Raises:
        SparseLightningError: where an entry is no tensor, which no file of tensors can hold.
    """
    state = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise SparseLightningError(
                f"{name} in the state of {type(model).__name__} is a {type(value).__name__}, not a tensor, and can't "
                "be exported: leave it out of get_extra_state, or save a checkpoint instead"
            )
    return dict(state)


def first_names(state: Mapping[str, Tensor]) -> dict[str, str]:
    """For each name the first that stands for the same tensor: its own, where it is not tied to an earlier one.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        >>> model[1].weight = model[0].weight
        >>> first_names(tensors_of(model))
        {'0.weight': '0.weight', '1.weight': '0.weight'}
    """
    known: dict[tuple[object, ...], str] = {}
    return {name: known.setdefault(_identity(tensor), name) for name, tensor in state.items()}


def _identity(tensor: Tensor) -> tuple[object, ...]:
    # Tensors without elements all have the same address, and one in shards has as many as there are processes.
    place = id(tensor) if is_sharded(tensor) or not tensor.numel() else tensor.data_ptr()
    return place, tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def writes() -> bool:
    """Whether this process is the one that writes files."""
    return not has_others() or dist.get_rank() == 0


def plain(tensor: Tensor) -> Tensor | None:
    """A copy on the CPU in row-major order, which shares its memory with nothing; None where this process won't write.

    One in shards is gathered, so all processes have to ask for the same ones in the same order.
    """
    whole = cast(Any, tensor.detach()).full_tensor() if is_sharded(tensor) else tensor.detach()
    return whole.to("cpu", copy=True, memory_format=torch.contiguous_format) if writes() else None
