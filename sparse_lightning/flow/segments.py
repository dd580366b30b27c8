"""Segments: sums, maxima and ranks over groups of the entries of a ragged value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sparse_lightning.kernels.rank_select import descending_order


def floating(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which groups are compared: fp32 for integers, otherwise the dtype itself."""
    return dtype if dtype.is_floating_point else torch.float32


@dataclass(frozen=True)
class SameSize:
    """The groups with the same number of entries.

    Attributes:
        groups: `(k,)`, their indices.
        entries: `(k, size)`, the entries of each.
    """

    groups: Tensor
    entries: Tensor


@dataclass(frozen=True)
class Segments:
    """The group of each entry of a ragged value.

    Reductions are deterministic on every device: the entries of a group are gathered into a row, and rows of the same
    length are reduced together. Nothing is added by atomic operations, in an order that differs from run to run.

    Attributes:
        index: `(S,)`, the group of each entry, an integer from 0.
        count: the number of groups.
        order: `(S,)`, the order of entries that breaks ties between equal values; None for their own order.
    """

    index: Tensor
    count: int
    order: Tensor | None = None

    def sum(self, x: Tensor) -> Tensor:
        """Sum over each group: `(S, D0, D1)` → `(count, D0, D1)`."""
        return self._reduce(x, torch.sum, 0.0)

    def max(self, x: Tensor) -> Tensor:
        """Take the maximum over each group: `(S, D0, D1)` → `(count, D0, D1)`; −inf for an empty one."""
        return self._reduce(x, torch.amax, -torch.inf)

    def _reduce(self, x: Tensor, reduce: Callable[..., Tensor], empty: float) -> Tensor:
        reduced = x.new_full((self.count, *x.shape[1:]), empty)
        for same in self._by_size:
            # index_copy_ has a deterministic form on CUDA; no index occurs twice.
            reduced.index_copy_(0, same.groups, reduce(x[same.entries], 1))
        return reduced

    @cached_property
    def _by_size(self) -> list[SameSize]:
        """The groups by their number of entries, without empty ones. Parameters of one shape share a row length."""
        sizes = torch.bincount(self.index, minlength=self.count)
        first = sizes.cumsum(0) - sizes
        order = torch.sort(self.index, stable=True).indices
        found = []
        for size in sorted(set(sizes.tolist())):
            if size:
                groups = (sizes == size).nonzero().flatten()
                places = first[groups].unsqueeze(-1) + torch.arange(size, device=order.device)
                found.append(SameSize(groups, order[places]))
        return found

    def spread(self, grouped: Tensor) -> Tensor:
        """Expand the value of each group to its entries: `(count, D0, D1)` → `(S, D0, D1)`."""
        return grouped[self.index]

    def rank(self, x: Tensor) -> Tensor:
        """Return ranks from 0 (lowest) to 1 (highest) within each group; NaN is lowest, ties favour the first entry.

        Example:
            >>> one = Segments(torch.tensor([0, 0, 0, 1]), 2)
            >>> one.rank(torch.tensor([3.0, 1.0, 3.0, 9.0]).view(4, 1, 1)).flatten().tolist()
            [1.0, 0.0, 0.5, 1.0]
        """
        if self.order is not None:
            ranks = torch.empty_like(x, dtype=floating(x.dtype))
            ranks[self.order] = Segments(self.index[self.order], self.count).rank(x[self.order])
            return ranks
        flat = x.reshape(x.shape[0], -1)
        order = descending_order(flat, dim=0)
        by_group = torch.sort(self.index[order], dim=0, stable=True)
        sizes = torch.bincount(self.index, minlength=self.count)
        first = sizes.cumsum(0) - sizes
        place = torch.arange(x.shape[0], device=x.device).unsqueeze(-1) - first[by_group.values]
        last = (sizes[by_group.values] - 1).clamp(min=1)
        ranks = torch.empty_like(flat, dtype=floating(x.dtype))
        ranks.scatter_(0, order.gather(0, by_group.indices), 1 - place.to(ranks.dtype) / last)
        return ranks.view(x.shape)
