"""block_apply for GPUs, in Triton: a program covers a tile of the window, many blocks or a part of one.

Every pair `(n, l)` of the window becomes one axis of `n·l` elements, on which the block of element x is `x // l`.
Addresses are 64-bit. No weight is read to fill, and none is written in a block that stays as it is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparse_lightning.kernels.tile import OUTER, launches, tile_shape

ONE = tl.constexpr(0x3F800000)
"""The bits of 1.0 in fp32."""


class BlockAxis(NamedTuple):
    """One axis of a window: elements and their stride, the length of a block, and the stride of the grid.

    Length 0 says that one block spans the axis: the kernel needs no division then, and one compiled kernel
    serves every length of an edge.
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
    # Triton writes behind autograd's back.
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
    """The axes of a window with the pairs that are one element left out."""
    axes: list[BlockAxis] = []
    for d, step in enumerate(grid.stride()):
        (n, length), (far, near) = window.shape[2 * d : 2 * d + 2], window.stride()[2 * d : 2 * d + 2]
        if n > 1 and length > 1 and far == length * near:
            axes.append(BlockAxis(n * length, near, length, step))
            continue
        if n > 1:
            axes.append(BlockAxis(n, far, 1, step))
        if length > 1:
            axes.append(BlockAxis(length, near, 0, 0))
    return axes


def _from(t: Tensor, start: int) -> Tensor:
    """The tensor that begins some elements later; only its address matters."""
    return t.as_strided((1,), (1,), t.storage_offset() + start)


@triton.jit  # type: ignore[untyped-decorator]
def _block(x, LENGTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The block of one element x of an axis."""
    if LENGTH == 0:
        return x * 0
    else:
        return x // LENGTH


@triton.jit  # type: ignore[untyped-decorator]
def _blocks(start, LENGTH: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The blocks of the TILE elements from start on: `(TILE,)`, or `(1,)` where all lie in one."""
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
    """This program's tile: pointers to its weights, pointers to its grid values, and what lies inside the window."""
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
    """Which of a tile's grid values exist. Where one stands for all rows or columns, the first of them does."""
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

    Bytes for each weight of b bytes, in blocks of k weights of which the share p is pruned: p·b stored, 1/k of the
    mask loaded, nothing else; that is the least possible. Where blocks are shorter than a 32-byte sector, part of a
    sector is written, and the memory may count the whole.
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

    Bytes for each weight of b bytes, in blocks of k weights of which the share p changes, with fp32
    multipliers: p·b loaded, p·b stored, 4/k of the multipliers loaded; that is the least possible.
    """
    weights, values, rows, columns = _tile(
        window, grid, n0, s0, g0, n1, s1, g1, n2, s2, g2, n3, s3, g3, n4, s4, g4, L0, L1, L2, L3, L4, ROWS, COLUMNS
    )
    # As integers: the compiler knows then that a block changes as a whole, and loads and stores vectors.
    bits = tl.load(values, mask=_inside(values, rows, columns, L3, L4, ROWS, COLUMNS), other=ONE)
    changes = (bits != ONE) & rows & columns
    factor = bits.to(tl.float32, bitcast=True)
    scaled = tl.load(weights, mask=changes, other=0).to(tl.float32) * factor
    tl.store(weights, scaled.to(window.dtype.element_ty), mask=changes)
# fmt: on
