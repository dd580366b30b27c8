"""rank_select: the mask that keeps the highest scores of each row, in time that grows with their number.

Descending scores, NaN last, ties broken by the lower index. Sorting takes n·log n; the kernel looks for the lowest
score that is kept and compares with it.
"""

from __future__ import annotations

from torch import Tensor

from sparse_lightning.kernels.rank_select import native, reference
from sparse_lightning.kernels.rank_select.reference import descending_order

__all__ = ["descending_order", "rank_select"]


def rank_select(scores: Tensor, keep: Tensor) -> Tensor:
    """Return the mask, True = pruned, that keeps this many of the highest scores in each row.

    Args:
        scores: `(…, n)`.
        keep: from 0 to n for each row, `(…)`.

    Example:
        >>> import torch
        >>> rank_select(torch.tensor([[1.0, float("nan"), 3.0, 3.0, 3.0]]), torch.tensor([2]))
        tensor([[ True,  True, False, False,  True]])
    """
    select = native.rank_select if native.takes(scores) else reference.rank_select
    return select(scores, keep)
