"""block_fill for CPUs, in C++: one call for all tensors, its bytes divided evenly among the threads.

Only pruned blocks are written where they span a cache line; shorter ones are masked without a branch. In tables that
no cache holds, zeros are stored past the caches: any other store first loads the cache line that it writes to.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparse_lightning.kernels.block_fill.windows import Pair, Window
from sparse_lightning.kernels.native import library

SOURCE = Path(__file__).with_suffix(".cpp")

LARGE = 1 << 24
"""Bytes of all windows from which on the weights are not expected to be in a cache."""

SMALL = 1 << 18
"""Bytes of all windows up to which one thread is faster than waking others."""

ROW = 1 << 16
"""The most bytes of a row: what one thread does at a time."""

MOST_PAIRS = 32
"""The most pairs that the kernel counts."""


def is_available() -> bool:
    """Whether the kernel is built, or can be built now, on this machine."""
    return library(SOURCE) is not None


class NativeFill:
    """The table of the kernel, made once: where blocks lie does not change when masks do.

    Args:
        windows: the blocks.
        sizes: the bytes of an element of each tensor.
    """

    def __init__(self, windows: Sequence[Window], sizes: Sequence[int]) -> None:
        built = library(SOURCE)
        assert built is not None, "`is_available` was checked"
        self._kernel = built.fill
        phases = sorted({window.phase for window in windows})
        self._tables = [_Table([w for w in windows if w.phase == phase], sizes) for phase in phases]
        self._pointers: Sequence[int] = ()
        self._addresses = torch.empty(0, dtype=torch.int64)
        self._mask = 0
        self._calls: list[Sequence[Any]] = []

    def fill(self, pointers: Sequence[int], mask: Tensor) -> None:
        """Zero the blocks where the flat mask is True.

        Args:
            pointers: the address of the first element of each tensor; 0 for a tensor to pass over.
            mask: boolean, contiguous.
        """
        if pointers is not self._pointers and pointers != self._pointers:
            self._pointers, self._addresses = pointers, torch.tensor(pointers, dtype=torch.int64)
            self._mask = 0
        if (at := mask.data_ptr()) != self._mask:
            self._mask, self._calls = at, [table.arguments(self._addresses, at) for table in self._tables]
        for table, arguments in zip(self._tables, self._calls, strict=True):
            self._kernel(*arguments, table.threads())


class _Table:
    """Windows that share no element: threads may write to them in any order."""

    def __init__(self, windows: Sequence[Window], sizes: Sequence[int]) -> None:
        rows, pairs, self._total = _rows(windows, sizes)
        self._count = len(rows)
        self._windows, self._pairs = (torch.tensor(table, dtype=torch.int64) for table in (rows, pairs))

    def arguments(self, addresses: Tensor, mask: int) -> Sequence[Any]:
        """Return what the kernel is called with, but for the threads: the same at each step between two updates."""
        return (
            ctypes.c_void_p(addresses.data_ptr()),
            ctypes.c_void_p(self._windows.data_ptr()),
            ctypes.c_int64(self._count),
            ctypes.c_void_p(self._pairs.data_ptr()),
            ctypes.c_void_p(mask),
            ctypes.c_int64(self._total),
            ctypes.c_int(self._total >= LARGE),
        )

    def threads(self) -> int:
        """Return how many threads fill the windows."""
        return torch.get_num_threads() if self._total > SMALL else 1


def _rows(windows: Sequence[Window], sizes: Sequence[int]) -> tuple[list[list[int]], list[list[int]], int]:
    """Return the rows of windows and of pairs, in bytes, and the bytes of all windows."""
    rows: list[list[int]] = []
    pairs: list[list[int]] = []
    total = 0
    for window, size in ((part, sizes[w.tensor]) for w in windows for part in _divided(w, ROW // sizes[w.tensor])):
        assert len(window.pairs) <= MOST_PAIRS, "so many dimensions of two elements have more elements than any memory"
        outer, last = window.pairs[:-1], window.pairs[-1]
        count = math.prod(p.blocks * p.elements for p in outer)
        row_bytes = last.blocks * last.elements * size
        at = [window.tensor, window.offset * size, window.mask, size]
        rows.append([*at, len(pairs), len(window.pairs), count, row_bytes, total])
        for p in window.pairs:
            pairs.append([p.blocks, p.elements, p.block_stride * size, p.element_stride * size, p.mask_stride])
        total += count * row_bytes
    return rows, pairs, total


def _divided(window: Window, most: int) -> Iterator[Window]:
    """Divide the last pair of a window so that a row has at most this many elements."""
    *outer, last = window.pairs
    if last.blocks * last.elements <= most:
        yield window
    elif last.elements > most:
        blocks = [Pair(last.blocks, 1, last.block_stride, 0, last.mask_stride)] if last.blocks > 1 else []
        for start, number, length in _chunks(last.elements, most):
            run = [Pair(1, number, 0, length * last.element_stride, 0), Pair(1, length, 0, last.element_stride, 0)]
            shift = start * last.element_stride
            yield window._replace(offset=window.offset + shift, pairs=(*outer, *blocks, *run))
    else:
        for start, number, length in _chunks(last.blocks, most // last.elements):
            strides = length * last.block_stride, length * last.mask_stride
            run = [Pair(number, 1, strides[0], 0, strides[1]), last._replace(blocks=length)]
            offset, mask = window.offset + start * last.block_stride, window.mask + start * last.mask_stride
            yield window._replace(offset=offset, mask=mask, pairs=(*outer, *run))


def _chunks(count: int, most: int) -> Iterator[tuple[int, int, int]]:
    """Yield start, number and length of equal chunks, and of a shorter one at the end."""
    yield 0, count // most, most
    if count % most:
        yield count - count % most, 1, count % most
