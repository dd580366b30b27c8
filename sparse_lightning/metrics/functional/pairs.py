"""Pairs of corresponding grids from two sets of masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sparse_lightning.errors import LayoutError

Masks: TypeAlias = Tensor | Mapping[Any, Tensor]
"""A boolean grid, True = pruned; or a mapping from names (or blocks) to such grids."""


def pairs(first: Masks, second: Masks) -> list[tuple[Tensor, Tensor]]:
    """Return corresponding grids of two masks; raise a LayoutError unless they are boolean and of equal shape.

    Example:
        >>> up, down = torch.tensor([True]), torch.tensor([False])
        >>> pairs({"up": up, "down": down}, {"down": up, "up": up})
        [(tensor([True]), tensor([True])), (tensor([False]), tensor([True]))]
    """
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        _check_names(first, second)
        return [_pair(repr(name), grid, second[name]) for name, grid in first.items()]
    if isinstance(first, Mapping) or isinstance(second, Mapping):
        raise LayoutError(
            f"cannot compare masks of type {type(first).__name__} and {type(second).__name__}: pass two grids, or two "
            "mappings from names to grids"
        )
    return [_pair("the mask", first, second)]


def _check_names(first: Mapping[Any, Tensor], second: Mapping[Any, Tensor]) -> None:
    only = [[name for name in a if name not in b] for a, b in ((first, second), (second, first))]
    if any(only):
        raise LayoutError(
            f"cannot compare masks with different names: only the first has {only[0]}, only the second has {only[1]}. "
            "Pass masks of the same parameters"
        )


def _pair(name: str, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    _check_mask(name, first)
    _check_mask(name, second)
    if first.shape != second.shape:
        raise LayoutError(
            f"cannot compare {name} of shapes {tuple(first.shape)} and {tuple(second.shape)}: pass masks of the same "
            "grid"
        )
    return first, second.to(first.device)


def _check_mask(name: str, grid: object) -> None:
    kind = grid.dtype if isinstance(grid, Tensor) else type(grid).__name__
    if kind != torch.bool:
        raise LayoutError(f"{name} is of type {kind}: pass a boolean tensor, True where a block is pruned")
