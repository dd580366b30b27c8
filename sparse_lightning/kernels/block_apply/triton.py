"""block_apply for GPUs, in Triton: a program covers a tile of the window, many blocks or a part of one.

Every pair `(n, l)` of the window becomes one axis of `n·l` elements, on which the block of element x is `x // l`.
Addresses are 64-bit. A fill reads no weights, and blocks that do not change are not written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparse_lightning.kernels.tile import OUTER, launches, tile_shape
from sparse_lightning.layout.coalesce import coalesce

ONE = tl.constexpr(0x3F800000)
"""The bits of 1.0 in fp32."""


class BlockAxis(NamedTuple):
    """One axis of a window: elements and their stride, the length of a block, and the stride of the grid.

    Length 0 means that one block spans the axis: the kernel then needs no division, and one compiled kernel serves
    every length of an edge block.
    """

    size: int
    stride: int
    length: int
    step: int


def fill_(window: Tensor, mask: Tensor) -> None:
    """Zero the blocks where the mask is True."""
    _launch(_fill, window, mask.view(torch.uint8))


def scale_(window: Tensor, multiplier: Tensor) -> None:
    """Multiply each block by its grid value, in fp32; a block whose value is 1 is not touched."""
    _launch(_scale, window, multiplier.float().view(torch.int32))


def _launch(kernel: Any, window: Tensor, grid: Tensor) -> None:
    if not window.numel():
        return
    axes = _axes(window, grid)
    for index in launches([a.size for a in axes]):
        skipped = list(zip(index, axes, strict=False))
        start = sum(i * a.stride for i, a in skipped)
        block = sum(i // a.length * a.step for i, a in skipped if a.length)
        _launch_on(kernel, _from(window, start), _from(grid, block), axes[len(index) :])
    # Triton writes without the knowledge of autograd.
    if not window.is_inference():
        torch.autograd.graph.increment_version(window)


def _launch_on(kernel: Any, window: Tensor, grid: Tensor, axes: list[BlockAxis]) -> None:
    axes = [BlockAxis(1, 0, 0, 0)] * (OUTER + 2 - len(axes)) + axes
    rows, columns = tile_shape(axes[-2].size, axes[-1].size)
    programs = -(-axes[-2].size // rows) * -(-axes[-1].size // columns)
    for axis in axes[:-2]:
        programs *= axis.size
    numbers = [x for a in axes for x in (a.size, a.stride, a.step)]
    lengths = [a.length for a in axes]
    with torch.cuda.device_of(window):  # type: ignore[no-untyped-call]
        kernel[(programs,)](window, grid, *numbers, *lengths, rows, columns, enable_fp_fusion=False)


def _axes(window: Tensor, grid: Tensor) -> list[BlockAxis]:
    """Return the axes of a window; blocks and their elements are one axis where they are contiguous."""
    axes: list[BlockAxis] = []
    for d, step in enumerate(grid.stride()):
        pair = slice(2 * d, 2 * d + 2)
        blocks = {(0,): (1, step), (1,): (0, 0), (0, 1): (window.shape[2 * d + 1], step)}
        runs = coalesce(window.shape[pair], window.stride()[pair])
        axes += [BlockAxis(run.size, run.strides[0], *blocks[run.dims]) for run in runs if run.size > 1]
    return axes


def _from(t: Tensor, start: int) -> Tensor:
    """Return a tensor that begins `start` elements later; only its address matters."""
    return t.as_strided((1,), (1,), t.storage_offset() + start)


@triton.jit  # type: ignore[untyped-decorator]
def _block(x, LENGTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the block of one element x of an axis."""
    if LENGTH == 0:
        return x * 0
    else:
        return x // LENGTH


@triton.jit  # type: ignore[untyped-decorator]
def _blocks(start, LENGTH: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the blocks of the TILE elements from start on: `(TILE,)`, or `(1,)` if all are in one."""
    if LENGTH == 0 or LENGTH % TILE == 0:
        return _block(start + tl.arange(0, 1), LENGTH)
    else:
        return _block(start + tl.arange(0, TILE), LENGTH)


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def _tile(  # type: ignore[no-untyped-def]
    window, grid,
    n0, s0, g0, n1, s1, g1, n2, s2, g2, n3, s3, g3, n4, s4, g4,
    L0: tl.constexpr, L1: tl.constexpr, L2: tl.constexpr, L3: tl.constexpr, L4: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Return the tile of this program: pointers to weights and grid values, and which rows and columns exist."""
    pid = tl.program_id(0).to(tl.int64)
    across = tl.cdiv(n4, COLUMNS)
    down = tl.cdiv(n3, ROWS)
    column, pid = pid % across * COLUMNS, pid // across
    row, pid = pid % down * ROWS, pid // down
    x2, pid = pid % n2, pid // n2
    x1, x0 = pid % n1, pid // n1
    window += x0 * s0 + x1 * s1 + x2 * s2
    grid += _block(x0, L0) * g0 + _block(x1, L1) * g1 + _block(x2, L2) * g2

    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    weights = window + rows[:, None] * s3 + columns[None, :] * s4
    values = grid + _blocks(row, L3, ROWS)[:, None] * g3 + _blocks(column, L4, COLUMNS)[None, :] * g4
    return weights, values, (rows < n3)[:, None], (columns < n4)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _inside(  # type: ignore[no-untyped-def]
    values, rows_inside, columns_inside,
    L3: tl.constexpr, L4: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Whether each grid value of a tile exists; a value for all rows or columns always does."""
    if (L3 == 0 or L3 % ROWS == 0) and (L4 == 0 or L4 % COLUMNS == 0):
        return tl.full(values.shape, 1, tl.int1)
    elif L3 == 0 or L3 % ROWS == 0:
        return columns_inside
    elif L4 == 0 or L4 % COLUMNS == 0:
        return rows_inside
    else:
        return rows_inside & columns_inside


@triton.jit  # type: ignore[untyped-decorator]
def _fill(  # type: ignore[no-untyped-def]
    window, grid,
    n0, s0, g0, n1, s1, g1, n2, s2, g2, n3, s3, g3, n4, s4, g4,
    L0: tl.constexpr, L1: tl.constexpr, L2: tl.constexpr, L3: tl.constexpr, L4: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Store +0.0 into the pruned blocks.

    Bytes for each weight of b bytes, in blocks of k weights of which the fraction p is pruned: p·b stored, 1/k of the
    mask loaded, nothing else; that is the minimum. If blocks are shorter than a 32-byte sector, part of a sector is
    written, which may cost as much as the whole sector.
    """
    weights, values, rows, columns = _tile(
        window, grid, n0, s0, g0, n1, s1, g1, n2, s2, g2, n3, s3, g3, n4, s4, g4, L0, L1, L2, L3, L4, ROWS, COLUMNS
    )
    pruned = tl.load(values, mask=_inside(values, rows, columns, L3, L4, ROWS, COLUMNS), other=0) != 0
    zero = tl.zeros((ROWS, COLUMNS), window.dtype.element_ty)
    tl.store(weights, zero, mask=pruned & rows & columns)


@triton.jit  # type: ignore[untyped-decorator]
def _scale(  # type: ignore[no-untyped-def]
    window, grid,
    n0, s0, g0, n1, s1, g1, n2, s2, g2, n3, s3, g3, n4, s4, g4,
    L0: tl.constexpr, L1: tl.constexpr, L2: tl.constexpr, L3: tl.constexpr, L4: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Multiply the blocks whose value is not 1.

    Bytes for each weight of b bytes, in blocks of k weights of which the fraction p changes, with fp32 multipliers:
    p·b loaded, p·b stored, 4/k of the multipliers loaded; that is the minimum.
    """
    weights, values, rows, columns = _tile(
        window, grid, n0, s0, g0, n1, s1, g1, n2, s2, g2, n3, s3, g3, n4, s4, g4, L0, L1, L2, L3, L4, ROWS, COLUMNS
    )
    # As integers: the compiler then knows that a block changes as a whole, and loads and stores vectors.
    bits = tl.load(values, mask=_inside(values, rows, columns, L3, L4, ROWS, COLUMNS), other=ONE)
    changes = (bits != ONE) & rows & columns
    factor = bits.to(tl.float32, bitcast=True)
    scaled = tl.load(weights, mask=changes, other=0).to(tl.float32) * factor
    tl.store(weights, scaled.to(window.dtype.element_ty), mask=changes)
# fmt: on
