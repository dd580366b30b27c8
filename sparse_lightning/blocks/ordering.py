"""The order in which blocks compete: descending scores, NaN last, ties broken by the lower index."""

from __future__ import annotations

import torch
from torch import Tensor


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
