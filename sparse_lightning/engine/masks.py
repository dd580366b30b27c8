"""Masks in checkpoints and in messages: one bit per block."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_lightning.errors import CheckpointError


def pack(mask: Tensor) -> Tensor:
    """Pack a mask into bytes, eight blocks in each, the first in the lowest bit.

    Example:
        >>> pack(torch.tensor([[True, False, True]]))
        tensor([5], dtype=torch.uint8)
    """
    flat = mask.flatten().to(torch.uint8)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % 8)).view(-1, 8)
    return (padded << _bits(mask.device)).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the mask of a shape from its packed bytes.

    Example:
        >>> unpack(torch.tensor([5], dtype=torch.uint8), (1, 3))
        tensor([[ True, False,  True]])
    """
    bits = packed.unsqueeze(-1) >> _bits(packed.device) & 1
    return bits.flatten()[: math.prod(shape)].view(*shape).bool()


def _bits(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def pack_all(masks: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Pack masks by name, with their shapes, as tensors and numbers."""
    return {name: {"shape": list(mask.shape), "bits": pack(mask).cpu()} for name, mask in masks.items()}


def unpack_all(saved: Mapping[str, Mapping[str, Any]], grids: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Return saved masks, for the grids of a model.

    Raises:
        CheckpointError: where names or shapes differ.
    """
    if set(saved) != set(grids):
        missing, unknown = sorted(set(grids) - set(saved)), sorted(set(saved) - set(grids))
        lacks = [f"has no masks for {_few(missing)}"] if missing else []
        extra = [f"has masks for {_few(unknown)}, which the model does not have"] if unknown else []
        raise CheckpointError(f"the checkpoint {' and '.join(lacks + extra)}: resume with the same model and patterns")
    for name, entry in saved.items():
        if tuple(entry["shape"]) != tuple(grids[name]):
            raise CheckpointError(
                f"the checkpoint has a mask of shape {tuple(entry['shape'])} for {name}, whose grid of blocks has the "
                f"shape {tuple(grids[name])}: resume with the model and the block shape that it was saved with"
            )
        if entry["bits"].numel() != -(-math.prod(entry["shape"]) // 8):
            raise CheckpointError(
                f"the checkpoint has {entry['bits'].numel()} bytes of the mask of {name}, whose shape "
                f"{tuple(entry['shape'])} needs {-(-math.prod(entry['shape']) // 8)}: it is damaged, use another one"
            )
    return {name: unpack(entry["bits"], entry["shape"]) for name, entry in saved.items()}


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
