"""Shapes, strides and offsets as functions from coordinates to offsets: the integer algebra behind `Layout`."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from sparse_lightning.errors import LayoutError
from sparse_lightning.layout.coalesce import coalesce
from sparse_lightning.layout.overlap import has_solution
from sparse_lightning.layout.permutation import permuted

L = TypeVar("L", bound="LayoutAlgebra")


@dataclass(frozen=True, init=False, eq=False)
class LayoutAlgebra:
    """The arithmetic of a `Layout`; each operation returns a layout of the same class.

    Two layouts are equal when they are the same function; the stride of a dimension of size 1 is kept as passed, but
    ignored in comparisons.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def __init__(self, shape: Sequence[int], stride: Sequence[int] | None = None, offset: int = 0) -> None:
        sizes = _integers("shape", shape)
        strides = row_major(sizes) if stride is None else _integers("stride", stride)
        if len(sizes) != len(strides):
            raise LayoutError(
                f"shape {sizes} has {len(sizes)} dimensions, but stride {strides} has {len(strides)}: "
                "pass one stride for each dimension"
            )
        if min(sizes, default=0) < 0:
            raise LayoutError(f"shape {sizes} has a negative size: pass sizes that are zero or positive")
        object.__setattr__(self, "shape", sizes)
        object.__setattr__(self, "stride", strides)
        object.__setattr__(self, "offset", _integer("offset", offset))

    def __call__(self, coord: Sequence[int]) -> int:
        """Return the offset of a coordinate, `offset + Σ coord · stride`."""
        if len(coord) != self.ndim or not all(0 <= x < n for x, n in zip(coord, self.shape, strict=True)):
            raise LayoutError(f"coordinate {tuple(coord)} lies outside of shape {self.shape}")
        return self.offset + sum(x * s for x, s in zip(coord, self.stride, strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayoutAlgebra) and self._function == other._function

    def __hash__(self) -> int:
        return hash(self._function)

    def __repr__(self) -> str:
        return f"Layout({self.shape}, stride={self.stride}, offset={self.offset})"

    @cached_property
    def _function(self) -> tuple[object, ...]:
        if not self.numel:
            return (self.shape,)
        strides = tuple(s if n > 1 else 0 for n, s in zip(self.shape, self.stride, strict=True))
        return (self.shape, strides, self.offset)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """The number of coordinates."""
        return math.prod(self.shape)

    @property
    def span(self) -> tuple[int, int]:
        """The lowest and the highest offset; `(offset, offset − 1)` for an empty layout."""
        if not self.numel:
            return self.offset, self.offset - 1
        ends = [(n - 1) * s for n, s in zip(self.shape, self.stride, strict=True)]
        return self.offset + sum(min(e, 0) for e in ends), self.offset + sum(max(e, 0) for e in ends)

    @property
    def cosize(self) -> int:
        """The highest offset relative to the offset of the layout, plus one."""
        return self.span[1] - self.offset + 1

    @property
    def storage_size(self) -> int:
        """The number of elements of the smallest buffer that holds the layout."""
        low, high = self.span
        return high - low + 1

    def is_injective(self) -> bool:
        """Whether no two coordinates share an offset; exact for any strides."""
        return _is_injective(self.shape, self.stride)

    def overlaps(self, other: LayoutAlgebra) -> bool:
        """Whether the two layouts share an offset; exact for any strides."""
        mine = [(s, 0, n - 1) for n, s in zip(self.shape, self.stride, strict=True)]
        theirs = [(-s, 0, n - 1) for n, s in zip(other.shape, other.stride, strict=True)]
        return has_solution(mine + theirs, other.offset - self.offset)

    def permute(self: L, dims: Sequence[int]) -> L:
        """Return the layout with its dimensions in another order."""
        dims = tuple(dims)
        if sorted(dims) != list(range(self.ndim)):
            raise LayoutError(f"{dims} does not permute the {self.ndim} dimensions of {self}")
        if dims == tuple(range(self.ndim)):
            return self
        return type(self)(permuted(self.shape, dims), permuted(self.stride, dims), self.offset)

    def flip(self: L, dims: Iterable[int]) -> L:
        """Return the same elements in reverse order along `dims`."""
        chosen = {self._dim(d) for d in dims}
        if not chosen:
            return self
        stride = [-s if d in chosen else s for d, s in enumerate(self.stride)]
        shift = sum((self.shape[d] - 1) * self.stride[d] for d in chosen if self.shape[d])
        return type(self)(self.shape, stride, self.offset + shift)

    def slice(self: L, dim: int, start: int | None = None, stop: int | None = None, step: int = 1) -> L:
        """Return a Python slice of one dimension; `step` is any integer but zero."""
        dim = self._dim(dim)
        if step == 0:
            raise LayoutError(f"step 0 in a slice of dimension {dim} of {self}: pass a positive or a negative step")
        kept = range(self.shape[dim])[start:stop:step]
        if kept == range(self.shape[dim]):
            return self
        first = kept.start if kept else 0
        return self._replace(dim, [(len(kept), self.stride[dim] * step)], first * self.stride[dim])

    def split(self: L, dim: int, sizes: Sequence[int]) -> L:
        """Return the layout with one dimension split into several, row-major; one size may be −1."""
        dim = self._dim(dim)
        sizes = _fill_in(tuple(sizes), self.shape[dim])
        if math.prod(sizes) != self.shape[dim]:
            raise LayoutError(
                f"dimension {dim} of size {self.shape[dim]} of {self} can't be split into {sizes}: the product of the "
                f"sizes must be {self.shape[dim]}"
            )
        strides = [s * self.stride[dim] for s in row_major(sizes)]
        return self._replace(dim, list(zip(sizes, strides, strict=True)))

    def merge(self: L, dims: Sequence[int]) -> L:
        """Return the layout with several dimensions merged, row-major in the order of `dims`, at the lowest of them."""
        dims = tuple(self._dim(d) for d in dims)
        if not dims or len(set(dims)) != len(dims):
            raise LayoutError(f"dimensions {dims} of {self} can't be merged: pass at least one dimension, each once")
        place = min(dims)
        rest = [d for d in range(self.ndim) if d not in dims]
        front, back = [d for d in rest if d < place], [d for d in rest if d > place]
        ordered = self.permute([*front, *dims, *back])
        shape = [*(self.shape[d] for d in front), math.prod(self.shape[d] for d in dims)]
        try:
            return ordered.reshape([*shape, *(self.shape[d] for d in back)])
        except LayoutError:
            raise LayoutError(
                f"dimensions {dims} of {self} can't be merged: each stride must be the next one's size times its stride"
            ) from None

    def reshape(self: L, shape: Sequence[int]) -> L:
        """Return the same elements in the same order with another shape, without a copy."""
        shape = _fill_in(tuple(shape), self.numel)
        if math.prod(shape) != self.numel:
            raise LayoutError(f"{self} has {self.numel} elements and can't be reshaped to {shape}")
        if not self.numel:
            return type(self)(shape, None, self.offset)
        runs = [(1, 1), *((run.size, run.strides[0]) for run in coalesce(self.shape, self.stride) if run.size > 1)]
        strides: list[int] = []
        size, stride = runs.pop()
        for n in reversed(shape):
            while size == 1 and n > 1:
                size, stride = runs.pop()
            if size % n:
                raise LayoutError(f"{self} can't be reshaped to {shape} without a copy")
            strides.append(stride)
            size, stride = size // n, stride * n
        return type(self)(shape, strides[::-1], self.offset)

    def expand(self: L, shape: Sequence[int]) -> L:
        """Return the layout with dimensions of size 1 and new leading ones repeated by stride zero; −1 keeps a size."""
        new = len(shape) - self.ndim
        if new < 0:
            raise LayoutError(f"{self} can't be expanded to {tuple(shape)}, which has fewer dimensions")
        sizes, strides = (1,) * new + self.shape, (0,) * new + self.stride
        wanted = [n if m == -1 else m for n, m in zip(sizes, shape, strict=True)]
        for n, m in zip(sizes, wanted, strict=True):
            if n not in (1, m):
                raise LayoutError(f"{self} can't be expanded to {tuple(shape)}: size {n} is neither 1 nor {m}")
        kept = [s if n == m else 0 for n, m, s in zip(sizes, wanted, strides, strict=True)]
        return type(self)(wanted, kept, self.offset)

    def tile(self: L, block_shape: Sequence[int]) -> L:
        """Return the layout tiled into equal blocks: `(B0, B1, …, b0, b1, …)`, the grid first.

        Example:
            >>> from sparse_lightning.layout import Layout
            >>> Layout((4, 6)).tile((2, 3))
            Layout((2, 2, 2, 3), stride=(12, 3, 6, 1), offset=0)
        """
        block = resolve_block_shape(self.shape, block_shape)
        check_division(self.shape, block)
        strides = [b * s for b, s in zip(block, self.stride, strict=True)]
        return type(self)([*grid_shape(self.shape, block), *block], [*strides, *self.stride], self.offset)

    def positive(self: L) -> tuple[L, tuple[int, ...]]:
        """Return the same elements without negative strides, and the dimensions that are reversed to get there."""
        return self._positive

    @cached_property
    def _positive(self) -> tuple[Any, tuple[int, ...]]:
        if min(self.stride, default=0) >= 0:
            return self, ()
        if not self.numel:
            return type(self)(self.shape, [max(s, 0) for s in self.stride], max(self.offset, 0)), ()
        flipped = tuple(d for d, (n, s) in enumerate(zip(self.shape, self.stride, strict=True)) if s < 0 and n > 1)
        upright = self.flip(flipped)
        return type(self)(upright.shape, [max(s, 0) for s in upright.stride], upright.offset), flipped

    def _dim(self, dim: int) -> int:
        if not -self.ndim <= dim < self.ndim:
            raise LayoutError(f"{self} has no dimension {dim}")
        return dim % self.ndim

    def _replace(self: L, dim: int, sizes_strides: list[tuple[int, int]], shift: int = 0) -> L:
        pairs = list(zip(self.shape, self.stride, strict=True))
        pairs[dim : dim + 1] = sizes_strides
        return type(self)([n for n, _ in pairs], [s for _, s in pairs], self.offset + shift)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous row-major layout, as torch computes them."""
    strides = [1]
    for n in reversed(shape[1:]):
        strides.append(strides[-1] * max(n, 1))
    return tuple(reversed(strides[: len(shape)]))


def resolve_block_shape(shape: Sequence[int], block_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the full block shape: −1 spans its dimension, missing trailing entries are 1.

    Example:
        >>> resolve_block_shape((64, 32, 3, 3), (1, -1))
        (1, 32, 1, 1)
    """
    block = _integers("block shape", block_shape)
    if len(block) > len(shape):
        raise LayoutError(f"block {block} has more dimensions than the shape {tuple(shape)}: remove some entries")
    if any(b == 0 or b < -1 for b in block):
        raise LayoutError(f"block {block} has an entry that is neither positive nor −1: −1 spans a whole dimension")
    block += (1,) * (len(shape) - len(block))
    return tuple(max(n, 1) if b == -1 else b for n, b in zip(shape, block, strict=True))


def check_division(shape: Sequence[int], block: Sequence[int]) -> None:
    """Raise an error that names the dimension if the blocks do not divide the shape."""
    for d, (n, b) in enumerate(zip(shape, block, strict=True)):
        if n % b:
            raise LayoutError(f"dimension {d} has {n} elements, which is not a multiple of {b}")


def grid_shape(shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """Return the number of blocks along each dimension, a smaller one at the edge included."""
    return tuple(-(-n // b) for n, b in zip(shape, block, strict=True))


@lru_cache(maxsize=4096)
def _is_injective(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    if 0 in shape:
        return True
    dims = sorted(((s, n) for n, s in zip(shape, stride, strict=True) if n > 1), key=lambda d: abs(d[0]))
    for k, (s, n) in enumerate(dims):
        below = [(t, 1 - m, m - 1) for t, m in dims[:k]]
        if has_solution([(s, 1, n - 1), *below], 0):
            return False
    return True


def _integers(what: str, values: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, values))
    except TypeError:
        raise LayoutError(f"{what} {values!r} is not a sequence of integers") from None


def _integer(what: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise LayoutError(f"{what} {value!r} is not an integer") from None


def _fill_in(sizes: tuple[int, ...], numel: int) -> tuple[int, ...]:
    """Replace a single −1 by the size that makes the product `numel`."""
    if sizes.count(-1) != 1:
        return sizes
    rest = math.prod(n for n in sizes if n != -1)
    return tuple((numel // rest if rest else 0) if n == -1 else n for n in sizes)
