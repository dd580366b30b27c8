"""KeptIndices: which coordinates of a tensor are left, and tensors that are cut to them or widened again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from sparse_lightning.layout import Layout
from sparse_lightning.layout.cutting import Indices
from sparse_lightning.layout.permutation import inverse, permuted

LARGE = 1 << 18
"""Elements of a matrix from which on gathering its columns takes less time than selecting them."""


@dataclass(frozen=True, eq=False)
class KeptIndices:
    """What is left of a tensor.

    Args:
        shape: of the whole tensor.
        kept: for each dimension the indices that are left, increasing; None for all of them.
        order: the dimensions in memory, outermost first, as `order_of` returns them: channels_last stays so.

    Example:
        >>> middle = KeptIndices.of((3, 2), [np.array([1]), np.array([0, 1])], order=(0, 1))
        >>> small = middle.cut(torch.tensor([[1, 2], [3, 4], [5, 6]]))
        >>> small, middle.widened(small)
        (tensor([[3, 4]]), tensor([[0, 0],
                [3, 4],
                [0, 0]]))
    """

    shape: tuple[int, ...]
    kept: tuple[Indices | None, ...]
    order: tuple[int, ...]
    _indices: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, shape: Sequence[int], kept: Sequence[Indices], order: Sequence[int]) -> KeptIndices:
        """Return the kept indices of a tensor of this shape; dimensions of which all are kept are whole."""
        pairs = zip(kept, shape, strict=True)
        return cls(tuple(shape), tuple(own if len(own) < size else None for own, size in pairs), tuple(order))

    @classmethod
    def whole(cls, tensor: Tensor) -> KeptIndices:
        """Return the kept indices of a tensor of which nothing was removed."""
        return cls(tuple(tensor.shape), (None,) * tensor.ndim, order_of(tensor))

    @property
    def is_whole(self) -> bool:
        """Whether nothing was removed."""
        return all(own is None for own in self.kept)

    @property
    def small_shape(self) -> tuple[int, ...]:
        """The shape of what is left."""
        return tuple(n if own is None else len(own) for n, own in zip(self.shape, self.kept, strict=True))

    def numel(self) -> int:
        """Return the number of elements that are left."""
        return math.prod(self.small_shape)

    def is_same(self, other: KeptIndices) -> bool:
        """Whether the same is left."""
        return all(_are_same(a, b) for a, b in zip(self.kept, other.kept, strict=True))

    def within(self, earlier: KeptIndices) -> KeptIndices | None:
        """Return the indices in what an earlier removal has left; None if it has removed some of them."""
        places: list[Indices | None] = []
        for own, before in zip(self.kept, earlier.kept, strict=True):
            if own is None and before is not None:
                return None
            place = own if own is None or before is None else _places(own, before)
            if own is not None and place is None:
                return None
            places.append(place if place is None or before is None or len(place) < len(before) else None)
        return KeptIndices(earlier.small_shape, tuple(places), self.order)

    @property
    def layout(self) -> Layout:
        """Return the layout of a tensor that `cut` returns."""
        return _layout(self.small_shape, self.order)

    def cut(self, whole: Tensor) -> Tensor:
        """Return what is left of a whole tensor: a copy, or the tensor itself if nothing is cut."""
        small = whole
        for dim, own in enumerate(self.kept):
            if own is not None:
                small = _selected(small, dim, self._index(dim, whole.device))
        return small if small is whole else self._in_order(small)

    def widened(self, small: Tensor, rest: Tensor | None = None) -> Tensor:
        """Return the whole tensor of which this is left; the rest is zero, or that of another whole tensor."""
        wide = small
        for dim, own in enumerate(self.kept):
            if own is not None:
                shape = [*self.shape[: dim + 1], *wide.shape[dim + 1 :]]
                made = small.new_zeros(shape)
                wide = made.index_copy_(dim, self._index(dim, small.device), wide)
        if wide is not small and rest is not None:
            wide = torch.where(self._is_kept(small.device), wide, rest.to(wide))
        return wide if wide is small else self._in_order(wide)

    def _index(self, dim: int, device: torch.device) -> Tensor:
        """Return the indices of a dimension that are left, on a device; made once."""
        if (dim, device) not in self._indices:
            self._indices[dim, device] = torch.from_numpy(self.kept[dim]).to(device)
        return self._indices[dim, device]

    def _in_order(self, tensor: Tensor) -> Tensor:
        if self.order == tuple(range(tensor.ndim)):
            return tensor.contiguous()
        return tensor.permute(self.order).contiguous().permute(inverse(self.order))

    def _is_kept(self, device: torch.device) -> Tensor:
        """Return for each element of the whole tensor whether it is left."""
        marks = torch.ones(self.small_shape, dtype=torch.bool, device=device)
        return self.widened(marks)


def change(before: KeptIndices, after: KeptIndices) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Return what cuts tensors in one way that are cut in another; what was removed before is zero, or the rest."""
    further = after.within(before)
    if further is None:
        return lambda tensor, rest: after.cut(before.widened(tensor, rest))
    return lambda tensor, rest: further.cut(tensor)


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions of a tensor from the largest stride to the smallest; of equal ones in their order.

    Example:
        >>> order_of(torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last))
        (0, 2, 3, 1)
    """
    strides = tensor.stride()
    return tuple(sorted(range(tensor.ndim), key=lambda d: (-strides[d], d)))


def _selected(tensor: Tensor, dim: int, index: Tensor) -> Tensor:
    """Return some indices of a dimension. Columns of a large matrix are gathered by all threads, selected by one."""
    if dim == tensor.ndim - 1 and dim > 0 and tensor.numel() >= LARGE:
        return tensor.gather(dim, index.expand(*tensor.shape[:-1], len(index)))
    return tensor.index_select(dim, index)


@lru_cache(maxsize=4096)
def _layout(shape: tuple[int, ...], order: tuple[int, ...]) -> Layout:
    return Layout(permuted(shape, order)).permute(inverse(order))


def _places(wanted: Indices, among: Indices) -> Indices | None:
    """Return where increasing indices are among others; None if one of them is missing."""
    if len(wanted) > len(among) or (len(wanted) and wanted[-1] > among[-1]):
        return None
    places = among.searchsorted(wanted)
    return places if (among[places] == wanted).all() else None


def _are_same(one: Indices | None, other: Indices | None) -> bool:
    if one is None or other is None:
        return one is other
    return np.array_equal(one, other)
