"""block_fill for GPUs, in Triton: one launch for all tensors, with a program for each tile that holds a pruned block.

Tables on the device, one row of integers each:

- windows: tensor, offset in bytes, first mask value, bytes of an element, kind of tile, and five axes, outermost first,
  each with its size, stride in bytes, length of a block, and stride of the mask;
- tiles: window, position within the window, and whether all of its blocks are pruned. They are listed when the mask
  changes, by a launch over all tiles; between two changes a fill is a single launch, without a synchronisation, and can
  be captured in a CUDA graph.

Zeros have the same bits in all dtypes of a size, so that one kernel serves them all. Addresses are 64-bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparse_lightning.kernels.block_fill.windows import Pair, Window

AXES = 5
"""The axes of a window: three outer ones, rows and columns."""

TILES = ((8, 256), (1, 2048), (128, 16))
"""Rows and columns of the three kinds of tiles."""

FIELDS = tl.constexpr(5 + 4 * AXES)
"""The number of integers in a row of the table of windows."""

VECTOR = tl.constexpr(16)
"""The bytes of the widest store."""


class Axis(NamedTuple):
    """Elements along one axis, their stride, the length of a block, and the stride of the mask."""

    size: int
    stride: int
    length: int
    step: int


class TritonFill:
    """The tables of the kernel.

    Args:
        windows: the blocks.
        sizes: the bytes of an element of each tensor.
        device: of the tensors.
    """

    def __init__(self, windows: Sequence[Window], sizes: Sequence[int], device: torch.device) -> None:
        rows = [row for window in windows for row in _rows(window, sizes[window.tensor])]
        self._device = device
        self._windows = torch.tensor([row for row, _ in rows], dtype=torch.int64, device=device).view(-1, FIELDS.value)
        counts = torch.tensor([count for _, count in rows], dtype=torch.int64, device=device)
        of_window = torch.arange(len(rows), device=device).repeat_interleave(counts)
        position = torch.arange(len(of_window), device=device) - (counts.cumsum(0) - counts)[of_window]
        self._all_tiles = torch.stack([of_window, position, torch.zeros_like(position)], -1)
        self._tiles, self._mask = self._all_tiles[:0], torch.empty(0)
        self._pointers: Sequence[int] = ()
        self._addresses = torch.empty(0, dtype=torch.int64, device=device)

    def fill(self, pointers: Sequence[int], mask: Tensor) -> None:
        """Zero the blocks where the flat mask is True; a tensor at address 0 is passed over."""
        if pointers is not self._pointers and pointers != self._pointers:
            self._pointers, self._addresses = pointers, self._upload(pointers)
        if mask is not self._mask:
            self._mask, self._tiles = mask, self._pruned_tiles(mask)
        if len(self._tiles):
            with torch.cuda.device_of(self._windows):  # type: ignore[no-untyped-call]
                tables = self._addresses, self._windows, self._tiles, mask.view(torch.uint8)
                _fill[(len(self._tiles),)](*tables, enable_fp_fusion=False)

    def _upload(self, pointers: Sequence[int]) -> Tensor:
        """Copy addresses to the device without waiting for it."""
        here = torch.tensor(pointers, dtype=torch.int64)
        return here.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else here

    def _pruned_tiles(self, mask: Tensor) -> Tensor:
        """Return the tiles with a pruned block, and note which of them are pruned entirely."""
        marks = torch.zeros(len(self._all_tiles), dtype=torch.int64, device=self._device)
        if len(marks):
            with torch.cuda.device_of(self._windows):  # type: ignore[no-untyped-call]
                tables = self._windows, self._all_tiles, mask.view(torch.uint8), marks
                _mark[(len(marks),)](*tables, enable_fp_fusion=False)
        self._all_tiles[:, 2] = marks == 2
        return self._all_tiles[marks > 0]


def _rows(window: Window, size: int) -> Iterator[tuple[list[int], int]]:
    """Yield the rows of a window in the table, and the number of tiles of each: several only beyond five axes."""
    axes = [axis for pair in window.pairs for axis in _axes(pair)]
    if size > 8:  # such as complex128: each element is two of half the size
        axes = [Axis(a.size, 2 * a.stride, a.length, a.step) for a in axes] + [Axis(2, 1, 2, 0)]
    unit = min(size, 8)
    axes = [Axis(1, 0, 1, 0)] * (AXES - len(axes)) + axes
    extra, axes = axes[: len(axes) - AXES], axes[len(axes) - AXES :]
    kind = _kind(axes[-2].size, axes[-1].size)
    tall, wide = TILES[kind]
    count = math.prod(a.size for a in axes[:-2]) * -(-axes[-2].size // tall) * -(-axes[-1].size // wide)
    numbers = [x for a in axes for x in (a.size, a.stride * unit, a.length, a.step)]
    for index in product(*(range(a.size) for a in extra)):
        offset = window.offset * size + sum(i * a.stride * unit for i, a in zip(index, extra, strict=True))
        first = window.mask + sum(i // a.length * a.step for i, a in zip(index, extra, strict=True))
        yield [window.tensor, offset, first, unit, kind, *numbers], count


def _axes(pair: Pair) -> list[Axis]:
    """Return blocks and their elements as one axis where they are contiguous."""
    blocks, elements, block_stride, element_stride, step = pair
    if elements == 1:
        return [Axis(blocks, block_stride, 1, step)]
    if blocks == 1:
        return [Axis(elements, element_stride, elements, 0)]
    if block_stride == elements * element_stride:
        return [Axis(blocks * elements, element_stride, elements, step)]
    return [Axis(blocks, block_stride, 1, step), Axis(elements, element_stride, elements, 0)]


def _kind(rows: int, columns: int) -> int:
    """Return the kind of tile that wastes the fewest elements on rows and columns that do not exist."""
    return min(range(len(TILES)), key=lambda i: -(-rows // TILES[i][0]) * -(-columns // TILES[i][1]))


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def _tile(windows, window, position, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the offset of a tile in bytes, its first mask value, and its rows and columns."""
    row = windows + window * FIELDS
    n2, n1 = tl.load(row + 13), tl.load(row + 9)
    n3, n4 = tl.load(row + 17), tl.load(row + 21)
    across, down = tl.cdiv(n4, COLUMNS), tl.cdiv(n3, ROWS)
    column, position = position % across * COLUMNS, position // across
    first, position = position % down * ROWS, position // down
    x2, position = position % n2, position // n2
    x1, x0 = position % n1, position // n1
    offset = tl.load(row + 1) + x0 * tl.load(row + 6) + x1 * tl.load(row + 10) + x2 * tl.load(row + 14)
    mask = (tl.load(row + 2) + x0 // tl.load(row + 7) * tl.load(row + 8)
            + x1 // tl.load(row + 11) * tl.load(row + 12) + x2 // tl.load(row + 15) * tl.load(row + 16))
    rows, columns = first + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    return row, offset, mask, rows, columns, n3, n4


@triton.jit
def _pruned(row, mask, first, rows, columns, inside):  # type: ignore[no-untyped-def]
    """Load which elements of a tile are pruned: the values of neighbours come from the same few bytes."""
    values = (first + (rows // tl.load(row + 19) * tl.load(row + 20))[:, None]
              + (columns // tl.load(row + 23) * tl.load(row + 24))[None, :])
    return tl.load(mask + values, mask=inside, other=0) != 0


@triton.jit  # type: ignore[untyped-decorator]
def _zero(row, at, full, mask, first, rows, columns, n3, n4,  # type: ignore[no-untyped-def]
          WORD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store zeros of one size into a tile: as vectors where all of it is pruned and aligned."""
    size: tl.constexpr = WORD.primitive_bitwidth // 8
    s3, s4 = tl.load(row + 18), tl.load(row + 22)
    zero = tl.zeros((ROWS, COLUMNS), WORD)
    inside = (rows < n3)[:, None] & (columns < n4)[None, :]
    if full and s4 == size and (at | s3 | n4 * size) % VECTOR == 0:
        # Written so that the compiler sees what is divisible.
        begin = tl.multiple_of(at.to(tl.pointer_type(WORD)), VECTOR)
        step, wide = s3 // VECTOR * (VECTOR // size), n4 * size // VECTOR * (VECTOR // size)
        aligned = (rows < n3)[:, None] & (columns < wide)[None, :]
        tl.store(begin + rows[:, None] * step + columns[None, :], zero, mask=aligned)
    elif full:
        places = (at + rows[:, None] * s3 + columns[None, :] * s4).to(tl.pointer_type(WORD))
        tl.store(places, zero, mask=inside)
    else:
        places = (at + rows[:, None] * s3 + columns[None, :] * s4).to(tl.pointer_type(WORD))
        tl.store(places, zero, mask=_pruned(row, mask, first, rows, columns, inside) & inside)


@triton.jit  # type: ignore[untyped-decorator]
def _zero_tile(addresses, windows, window, position, full, mask,  # type: ignore[no-untyped-def]
               ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, offset, first, rows, columns, n3, n4 = _tile(windows, window, position, ROWS, COLUMNS)
    address = tl.load(addresses + tl.load(row))
    size = tl.load(row + 3)
    if address != 0:
        at = address + offset
        if size == 4:
            _zero(row, at, full, mask, first, rows, columns, n3, n4, tl.int32, ROWS, COLUMNS)
        elif size == 2:
            _zero(row, at, full, mask, first, rows, columns, n3, n4, tl.int16, ROWS, COLUMNS)
        elif size == 8:
            _zero(row, at, full, mask, first, rows, columns, n3, n4, tl.int64, ROWS, COLUMNS)
        else:
            _zero(row, at, full, mask, first, rows, columns, n3, n4, tl.int8, ROWS, COLUMNS)


@triton.jit
def _fill(addresses, windows, tiles, mask):  # type: ignore[no-untyped-def]
    """Store zeros into the pruned blocks of one tile.

    Bytes for each weight of b bytes, in blocks of k weights of which the fraction p is pruned: p·b stored, and 1/k of
    the mask loaded in tiles that are not pruned entirely.
    """
    tile = tiles + tl.program_id(0).to(tl.int64) * 3
    window, position, full = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2) != 0
    kind = tl.load(windows + window * FIELDS + 4)
    if kind == 0:
        _zero_tile(addresses, windows, window, position, full, mask, 8, 256)
    elif kind == 1:
        _zero_tile(addresses, windows, window, position, full, mask, 1, 2048)
    else:
        _zero_tile(addresses, windows, window, position, full, mask, 128, 16)


@triton.jit  # type: ignore[untyped-decorator]
def _mark_tile(windows, window, position, mask, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row, _, first, rows, columns, n3, n4 = _tile(windows, window, position, ROWS, COLUMNS)
    inside = (rows < n3)[:, None] & (columns < n4)[None, :]
    pruned = _pruned(row, mask, first, rows, columns, inside)
    kept = tl.sum((inside & ~pruned).to(tl.int32))
    return tl.where(kept == 0, 2, (tl.sum(pruned.to(tl.int32)) > 0).to(tl.int32))


@triton.jit
def _mark(windows, tiles, mask, marks):  # type: ignore[no-untyped-def]
    """Mark a tile: 0 if no block of it is pruned, 2 if all are, 1 otherwise."""
    pid = tl.program_id(0).to(tl.int64)
    window, position = tl.load(tiles + pid * 3), tl.load(tiles + pid * 3 + 1)
    kind = tl.load(windows + window * FIELDS + 4)
    if kind == 0:
        mark = _mark_tile(windows, window, position, mask, 8, 256)
    elif kind == 1:
        mark = _mark_tile(windows, window, position, mask, 1, 2048)
    else:
        mark = _mark_tile(windows, window, position, mask, 128, 16)
    tl.store(marks + pid, mark)
# fmt: on
