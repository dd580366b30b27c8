"""Two sets of masks, brought together grid by grid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sparse_lightning.errors import LayoutError

Masks: TypeAlias = Tensor | Mapping[Any, Tensor]
"""A boolean grid, True = pruned; or several, in a mapping from names (or blocks) to grids."""


def pairs(first: Masks, second: Masks) -> list[tuple[Tensor, Tensor]]:
    """The grids of two masks that belong together, checked to be boolean and of one shape.

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
            f"masks to compare came as {type(first).__name__} and {type(second).__name__}: give two grids, or two "
            "mappings from names to grids"
        )
    return [_pair("the mask", first, second)]


def _check_names(first: Mapping[Any, Tensor], second: Mapping[Any, Tensor]) -> None:
    only = [[name for name in a if name not in b] for a, b in ((first, second), (second, first))]
    if any(only):
        raise LayoutError(
            f"masks to compare have different names: only the first has {only[0]}, only the second {only[1]}. Give "
            "masks of the same parameters"
        )


def _pair(name: str, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    _check_mask(name, first)
    _check_mask(name, second)
    if first.shape != second.shape:
        raise LayoutError(
            f"{name} has the shape {tuple(first.shape)} first and {tuple(second.shape)} second: only masks of one "
            "grid can be compared"
        )
    return first, second.to(first.device)


def _check_mask(name: str, grid: object) -> None:
    kind = grid.dtype if isinstance(grid, Tensor) else type(grid).__name__
    if kind != torch.bool:
        raise LayoutError(f"{name} is {kind}: a mask is a boolean tensor, True where a block is pruned")
