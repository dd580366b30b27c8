"""tile_linear for GPUs, in Triton: a program computes some rows of the outputs of one row of tiles.

It walks over the kept tiles of that row and adds their products in registers, on tensor cores for fp16 and bf16. In
fp32 products are exact, without TF32. Addresses are 64-bit.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparse_lightning.kernels.tile import power_of_two

SMALLEST, LARGEST = 16, 64
"""The sizes that a program multiplies at once: from what tensor cores take to what registers hold."""


def tile_linear(
    inputs: Tensor, tiles: Tensor, pointers: Tensor, columns: Tensor, bias: Tensor | None, out_features: int
) -> Tensor:
    """Return the outputs; see `reference.tile_linear`."""
    rows, features = math.prod(inputs.shape[:-1]), inputs.shape[-1]
    outputs = inputs.new_empty((*inputs.shape[:-1], out_features))
    if not outputs.numel():
        return outputs
    flat = inputs.reshape(rows, features)
    _, tile_in, tile_out = tiles.shape
    row_block, in_block, out_block = _block(rows), _block(tile_in, inputs.dtype), _block(tile_out)
    pieces = -(-tile_out // out_block)
    grid = (-(-rows // row_block), (len(pointers) - 1) * pieces)
    with torch.cuda.device_of(inputs):  # type: ignore[no-untyped-call]
        _multiply[grid](
            flat, tiles, pointers, columns, outputs if bias is None else bias, outputs, rows, features, out_features,
            *flat.stride(), tile_in, tile_out, pieces, bias is not None, row_block, in_block, out_block,
            enable_fp_fusion=True,
        )  # fmt: skip
    return outputs


def _block(size: int, dtype: torch.dtype = torch.float16) -> int:
    """Return how much is multiplied at once; half as much in fp32, whose operands stay in registers."""
    return max(SMALLEST, min(power_of_two(size), LARGEST * 2 // dtype.itemsize))


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def _multiply(  # type: ignore[no-untyped-def]
    inputs, tiles, pointers, columns, bias, outputs, rows, in_features, out_features, row_stride, column_stride,
    TILE_IN: tl.constexpr, TILE_OUT: tl.constexpr, PIECES: tl.constexpr, BIASED: tl.constexpr,
    ROWS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
):
    """Multiply ROWS rows of the inputs by OUT outputs of one row of tiles, IN inputs at a time.

    A kept tile is loaded once for each ROWS rows, and the inputs once for each kept tile; outputs are stored once.
    """
    tile_row, piece = tl.program_id(1) // PIECES, tl.program_id(1) % PIECES
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    out = piece * OUT + tl.arange(0, OUT)
    step = tl.arange(0, IN)
    sums = tl.zeros((ROWS, OUT), tl.float32)
    for t in range(tl.load(pointers + tile_row), tl.load(pointers + tile_row + 1)):
        start = tl.load(columns + t).to(tl.int64) * TILE_IN
        tile = tiles + tl.cast(t, tl.int64) * TILE_IN * TILE_OUT
        for k in tl.static_range(0, TILE_IN, IN):
            depth = k + step
            column = start + depth
            inside = (depth < TILE_IN) & (column < in_features)
            x = tl.load(inputs + row[:, None] * row_stride + column[None, :] * column_stride,
                        mask=(row < rows)[:, None] & inside[None, :], other=0)
            w = tl.load(tile + depth[:, None] * TILE_OUT + out[None, :],
                        mask=(depth < TILE_IN)[:, None] & (out < TILE_OUT)[None, :], other=0)
            sums = tl.dot(x, w, sums, input_precision="ieee")
    place = tile_row.to(tl.int64) * TILE_OUT + out
    stored = (out < TILE_OUT) & (place < out_features)
    if BIASED:
        sums += tl.load(bias + place, mask=stored, other=0).to(tl.float32)[None, :]
    tl.store(outputs + row[:, None] * out_features + place[None, :], sums.to(outputs.dtype.element_ty),
             mask=(row < rows)[:, None] & stored[None, :])
# fmt: on
