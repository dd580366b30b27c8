"""all_finite: whether tensors have no infinities and no NaN."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

SMALL = 1 << 16
"""The most values of a tensor that is compared with itself: of more, the copy takes longer than an operation."""


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return whether all values are finite, as a tensor on the device of the first; each is read once."""
    found = list(tensors)
    if len(found) == 1 and 0 < found[0].numel() <= SMALL:
        return ~(found[0] - found[0]).any()  # infinities and NaN have no difference of zero
    ends = [end for values in found if values.numel() for end in torch.aminmax(_distinct(values))]
    return torch.stack([end.to(ends[0].device) for end in ends]).isfinite().all() if ends else torch.tensor(True)


def _distinct(values: Tensor) -> Tensor:
    """Return a tensor without the repetitions of dimensions that were expanded."""
    stride = values.stride()
    return values[tuple(slice(None if s else 1) for s in stride)] if 0 in stride else values
