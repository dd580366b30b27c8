"""rank_select in plain torch operations: the definition, and the fallback for any device."""

from __future__ import annotations

import torch
from torch import Tensor


def rank_select(scores: Tensor, keep: Tensor) -> Tensor:
    """Return the mask that keeps the first places of the descending order."""
    order = descending_order(scores)
    places = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device)
    return torch.empty_like(order, dtype=torch.bool).scatter_(-1, order, places >= keep.unsqueeze(-1))


def descending_order(scores: Tensor, dim: int = -1) -> Tensor:
    """Return the indices that sort scores in descending order, NaN last, the lower index first among equals.

    Args:
        scores: any shape; floats, integers or booleans.
        dim: the dimension to sort along.

    Returns:
        int64 indices of the shape of `scores`.

    Example:
        >>> descending_order(torch.tensor([1.0, float("nan"), 3.0, 3.0]))
        tensor([2, 3, 0, 1])
    """
    if scores.is_floating_point():
        # An ascending sort of torch puts NaN last, and the negative of NaN is NaN.
        return torch.sort(-scores, dim=dim, stable=True).indices
    return torch.sort(scores, dim=dim, descending=True, stable=True).indices
