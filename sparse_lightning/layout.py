"""Layout: a function from coordinates to element offsets. Integers only; torch is not imported here."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from sparse_lightning.errors import LayoutError
from sparse_lightning.reach import reaches

if TYPE_CHECKING:
    import torch

    from sparse_lightning.movements import Movement


@dataclass(frozen=True, init=False, eq=False)
class Layout:
    """A shape with one stride for each dimension and an offset: coordinate → element of a storage.

    Strides may be any integers: non-unit, zero, negative. Without strides the layout is row-major.
    Two layouts are equal when they are the same function; the stride of a dimension of size 1 is kept
    as it was given but does not count.

    Example:
        >>> columns = Layout((2, 3)).permute((1, 0))
        >>> columns
        Layout((3, 2), stride=(1, 3), offset=0)
        >>> columns((2, 1))
        5
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def __init__(self, shape: Sequence[int], stride: Sequence[int] | None = None, offset: int = 0) -> None:
        sizes = _integers("shape", shape)
        strides = row_major(sizes) if stride is None else _integers("stride", stride)
        if len(sizes) != len(strides):
            raise LayoutError(
                f"shape {sizes} has {len(sizes)} dimensions and stride {strides} has {len(strides)}: "
                "give one stride for each dimension"
            )
        if any(n < 0 for n in sizes):
            raise LayoutError(f"shape {sizes} has a negative size")
        object.__setattr__(self, "shape", sizes)
        object.__setattr__(self, "stride", strides)
        object.__setattr__(self, "offset", _integer("offset", offset))

    def __call__(self, coord: Sequence[int]) -> int:
        """The offset of a coordinate, `offset + Σ coord · stride`."""
        if len(coord) != self.ndim or not all(0 <= x < n for x, n in zip(coord, self.shape, strict=True)):
            raise LayoutError(f"coordinate {tuple(coord)} lies outside of shape {self.shape}")
        return self.offset + sum(x * s for x, s in zip(coord, self.stride, strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._function == other._function

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
        """How many dimensions there are."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """How many coordinates there are."""
        return math.prod(self.shape)

    @property
    def span(self) -> tuple[int, int]:
        """The lowest and the highest offset; of an empty layout `(offset, offset − 1)`."""
        if not self.numel:
            return self.offset, self.offset - 1
        ends = [(n - 1) * s for n, s in zip(self.shape, self.stride, strict=True)]
        return self.offset + sum(min(e, 0) for e in ends), self.offset + sum(max(e, 0) for e in ends)

    @property
    def cosize(self) -> int:
        """The highest offset, counted from the layout's own, plus one."""
        return self.span[1] - self.offset + 1

    @property
    def storage_size(self) -> int:
        """The number of elements of the least buffer that holds the layout."""
        low, high = self.span
        return high - low + 1

    def is_injective(self) -> bool:
        """Whether no element is reached twice; exact for any strides."""
        return _is_injective(self.shape, self.stride)

    def overlaps(self, other: Layout) -> bool:
        """Whether some element is reached by both layouts; exact for any strides."""
        mine = [(s, 0, n - 1) for n, s in zip(self.shape, self.stride, strict=True)]
        theirs = [(-s, 0, n - 1) for n, s in zip(other.shape, other.stride, strict=True)]
        return reaches(mine + theirs, other.offset - self.offset)

    def permute(self, dims: Sequence[int]) -> Layout:
        """The dimensions in another order."""
        dims = tuple(dims)
        if sorted(dims) != list(range(self.ndim)):
            raise LayoutError(f"{dims} is not an order of the {self.ndim} dimensions of {self}")
        return Layout([self.shape[d] for d in dims], [self.stride[d] for d in dims], self.offset)

    def flip(self, dims: Iterable[int]) -> Layout:
        """The same elements, counted backwards along `dims`."""
        chosen = {self._dim(d) for d in dims}
        stride = [-s if d in chosen else s for d, s in enumerate(self.stride)]
        shift = sum((self.shape[d] - 1) * self.stride[d] for d in chosen if self.shape[d])
        return Layout(self.shape, stride, self.offset + shift)

    def slice(self, dim: int, start: int | None = None, stop: int | None = None, step: int = 1) -> Layout:
        """Part of one dimension, as Python slices it; `step` is any integer but zero."""
        dim = self._dim(dim)
        if step == 0:
            raise LayoutError(f"step 0 in a slice of dimension {dim} of {self}: give a positive or a negative one")
        part = range(self.shape[dim])[start:stop:step]
        first = part.start if part else 0
        return self._replace(dim, [(len(part), self.stride[dim] * step)], first * self.stride[dim])

    def split(self, dim: int, sizes: Sequence[int]) -> Layout:
        """One dimension as several, row-major; one size may be −1."""
        dim = self._dim(dim)
        sizes = _fill_in(tuple(sizes), self.shape[dim])
        if math.prod(sizes) != self.shape[dim]:
            raise LayoutError(f"dimension {dim} of size {self.shape[dim]} of {self} can't be split into {sizes}")
        strides = [s * self.stride[dim] for s in row_major(sizes)]
        return self._replace(dim, list(zip(sizes, strides, strict=True)))

    def merge(self, dims: Sequence[int]) -> Layout:
        """Several dimensions as one, row-major in the order given; it stands at the place of the lowest."""
        dims = tuple(self._dim(d) for d in dims)
        if not dims or len(set(dims)) != len(dims):
            raise LayoutError(f"{dims} does not name dimensions of {self} to merge, each once")
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

    def reshape(self, shape: Sequence[int]) -> Layout:
        """The same elements in the same order under another shape, where strides can say that."""
        shape = _fill_in(tuple(shape), self.numel)
        if math.prod(shape) != self.numel:
            raise LayoutError(f"{self} has {self.numel} elements and can't become {shape}")
        if not self.numel:
            return Layout(shape, None, self.offset)
        runs, strides = self._runs(), []
        size, stride = runs.pop()
        for n in reversed(shape):
            while size == 1 and n > 1:
                size, stride = runs.pop()
            if size % n:
                raise LayoutError(f"{self} can't be seen as {shape} without a copy")
            strides.append(stride)
            size, stride = size // n, stride * n
        return Layout(shape, strides[::-1], self.offset)

    def expand(self, shape: Sequence[int]) -> Layout:
        """Dimensions of size 1 (and new leading ones) repeated with stride zero; −1 keeps a size."""
        new = len(shape) - self.ndim
        if new < 0:
            raise LayoutError(f"{self} can't be expanded to the fewer dimensions of {tuple(shape)}")
        sizes, strides = (1,) * new + self.shape, (0,) * new + self.stride
        wanted = [n if m == -1 else m for n, m in zip(sizes, shape, strict=True)]
        for n, m in zip(sizes, wanted, strict=True):
            if n not in (1, m):
                raise LayoutError(f"{self} can't be expanded to {tuple(shape)}: {n} is neither 1 nor {m}")
        kept = [s if n == m else 0 for n, m, s in zip(sizes, wanted, strides, strict=True)]
        return Layout(wanted, kept, self.offset)

    def tile(self, block_shape: Sequence[int]) -> Layout:
        """The layout cut into equal blocks: `(B0, B1, …, b0, b1, …)`, the grid first.

        Example:
            >>> Layout((4, 6)).tile((2, 3))
            Layout((2, 2, 2, 3), stride=(12, 3, 6, 1), offset=0)
        """
        block = resolve_block_shape(self.shape, block_shape)
        check_division(self.shape, block)
        strides = [b * s for b, s in zip(block, self.stride, strict=True)]
        return Layout([*grid_shape(self.shape, block), *block], [*strides, *self.stride], self.offset)

    def positive(self) -> tuple[Layout, tuple[int, ...]]:
        """The window without negative strides, and the dimensions that it counts the other way round."""
        return self._positive

    @cached_property
    def _positive(self) -> tuple[Layout, tuple[int, ...]]:
        if not self.numel:
            return Layout(self.shape, [max(s, 0) for s in self.stride], max(self.offset, 0)), ()
        flipped = tuple(d for d, (n, s) in enumerate(zip(self.shape, self.stride, strict=True)) if s < 0 and n > 1)
        upright = self.flip(flipped)
        return Layout(upright.shape, [max(s, 0) for s in upright.stride], upright.offset), flipped

    def movements(self, base: Layout) -> tuple[Movement, ...]:
        """This layout as view operations on `base`; see `sparse_lightning.movements`."""
        from sparse_lightning.movements import movements

        return movements(self, base)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """The layout of a tensor in its storage; made once for all tensors that lie alike."""
        return _interned(tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def on(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements that this layout reaches in the storage of a tensor; see `sparse_lightning.window`."""
        from sparse_lightning.window import window

        return window(tensor, self)

    def _dim(self, dim: int) -> int:
        if not -self.ndim <= dim < self.ndim:
            raise LayoutError(f"{self} has no dimension {dim}")
        return dim % self.ndim

    def _replace(self, dim: int, sizes_strides: list[tuple[int, int]], shift: int = 0) -> Layout:
        pairs = list(zip(self.shape, self.stride, strict=True))
        pairs[dim : dim + 1] = sizes_strides
        return Layout([n for n, _ in pairs], [s for _, s in pairs], self.offset + shift)

    def _runs(self) -> list[tuple[int, int]]:
        """Size and stride of the dimensions, neighbours that count on through one another merged."""
        runs = [(1, 1)]
        for n, s in zip(self.shape, self.stride, strict=True):
            if n == 1:
                continue
            size, stride = runs[-1]
            if size > 1 and stride == n * s:
                runs[-1] = (size * n, s)
            else:
                runs.append((n, s))
        return runs


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense layout whose last dimension is the fastest, as torch counts them."""
    strides = [1]
    for n in reversed(shape[1:]):
        strides.append(strides[-1] * max(n, 1))
    return tuple(reversed(strides[: len(shape)]))


def resolve_block_shape(shape: Sequence[int], block_shape: Sequence[int]) -> tuple[int, ...]:
    """A block shape with all its entries: −1 spans its dimension, missing trailing entries are 1.

    Example:
        >>> resolve_block_shape((64, 32, 3, 3), (1, -1))
        (1, 32, 1, 1)
    """
    block = _integers("block shape", block_shape)
    if len(block) > len(shape):
        raise LayoutError(f"block {block} has more dimensions than the shape {tuple(shape)}: drop some entries")
    if any(b == 0 or b < -1 for b in block):
        raise LayoutError(f"block {block} has an entry that is neither positive nor −1 (the whole dimension)")
    block += (1,) * (len(shape) - len(block))
    return tuple(max(n, 1) if b == -1 else b for n, b in zip(shape, block, strict=True))


def check_division(shape: Sequence[int], block: Sequence[int]) -> None:
    """Raise where the blocks do not divide the shape, and say which dimension."""
    for d, (n, b) in enumerate(zip(shape, block, strict=True)):
        if n % b:
            raise LayoutError(
                f"blocks of {tuple(block)} do not divide the shape {tuple(shape)}: dimension {d} has {n} "
                f"elements, which is not a multiple of {b}"
            )


def grid_shape(shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """How many blocks stand along each dimension, a smaller one at the edge included."""
    return tuple(-(-n // b) for n, b in zip(shape, block, strict=True))


def is_chained(outer: tuple[int, int], inner: tuple[int, int]) -> bool:
    """Whether an outer `(size, stride)` counts on where the inner one ends, so that the two are one run."""
    return outer[0] <= 1 or outer[1] == inner[0] * inner[1]


@lru_cache(maxsize=4096)
def _interned(shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Layout:
    return Layout(shape, stride, offset)


@lru_cache(maxsize=4096)
def _is_injective(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    if 0 in shape:
        return True
    dims = sorted(((s, n) for n, s in zip(shape, stride, strict=True) if n > 1), key=lambda d: abs(d[0]))
    for k, (s, n) in enumerate(dims):
        below = [(t, 1 - m, m - 1) for t, m in dims[:k]]
        if reaches([(s, 1, n - 1), *below], 0):
            return False
    return True


def _integers(what: str, values: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(v) for v in values)
    except TypeError:
        raise LayoutError(f"{what} {values!r} is not a sequence of integers") from None


def _integer(what: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise LayoutError(f"{what} {value!r} is not an integer") from None


def _fill_in(sizes: tuple[int, ...], numel: int) -> tuple[int, ...]:
    """Put the size that makes the product right in the place of a −1."""
    if sizes.count(-1) != 1:
        return sizes
    rest = math.prod(n for n in sizes if n != -1)
    return tuple((numel // rest if rest else 0) if n == -1 else n for n in sizes)
