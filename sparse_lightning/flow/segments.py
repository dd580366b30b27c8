"""Segments: which entries of a ragged value belong together, and sums, maxima and ranks over each group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """The group of each entry.

    Attributes:
        index: `(S,)`, integers from 0 on.
        count: how many groups there are.
    """

    index: Tensor
    count: int

    def sum(self, x: Tensor) -> Tensor:
        """`(S, D0, D1)` → `(count, D0, D1)`."""
        return x.new_zeros(self.count, *x.shape[1:]).index_add_(0, self.index, x)

    def max(self, x: Tensor) -> Tensor:
        """`(S, D0, D1)` → `(count, D0, D1)`."""
        start = x.new_full((self.count, *x.shape[1:]), -torch.inf)
        return start.scatter_reduce_(0, self.index.view(-1, 1, 1).expand_as(x), x, "amax")

    def spread(self, grouped: Tensor) -> Tensor:
        """`(count, D0, D1)` → `(S, D0, D1)`."""
        return grouped[self.index]

    def rank(self, x: Tensor) -> Tensor:
        """Places from 0 (lowest) to 1 (highest) within each group; of equals the lower entry ranks higher.

        Example:
            >>> one = Segments(torch.tensor([0, 0, 0, 1]), 2)
            >>> one.rank(torch.tensor([3.0, 1.0, 3.0, 9.0]).view(4, 1, 1)).flatten().tolist()
            [1.0, 0.0, 0.5, 1.0]
        """
        flat = x.reshape(x.shape[0], -1)
        order = torch.sort(-flat, dim=0, stable=True).indices  # NaN behind all numbers
        groups = self.index[order]
        by_group = torch.sort(groups, dim=0, stable=True)
        sizes = torch.bincount(self.index, minlength=self.count)
        first = sizes.cumsum(0) - sizes
        place = torch.arange(x.shape[0], device=x.device).unsqueeze(-1) - first[by_group.values]
        last = (sizes[by_group.values] - 1).clamp(min=1)
        ranks = torch.empty_like(flat)
        ranks.scatter_(0, order.gather(0, by_group.indices), 1 - place.to(flat.dtype) / last)
        return ranks.view(x.shape)
