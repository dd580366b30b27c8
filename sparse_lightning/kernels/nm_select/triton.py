"""nm_select for GPUs, in Triton: a program loads a tile of whole groups, ranks them in registers and stores it back.

Addresses are 64-bit. Contiguous dimensions are merged, so contiguous weights are a single row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparse_lightning.kernels.nm_select import reference
from sparse_lightning.kernels.tile import OUTER, launches, power_of_two, tile_shape
from sparse_lightning.layout.coalesce import Run, coalesce

LARGEST_GROUP = 64
"""The comparisons of a group are unrolled: larger groups would be compiled for minutes, and are sorted instead."""


def nm_select(weight: Tensor, n: int, m: int, other: Tensor | None = None, pruned: Tensor | None = None) -> Tensor:
    """Keep n of every m neighbours; `other` and `pruned` have the shape of the weight. Large groups use the reference.

    The kernel replaces what is pruned before by what is pruned after it.
    """
    if m > LARGEST_GROUP:
        return reference.nm_select(weight, n, m, other, pruned)
    mask = torch.empty(weight.shape, dtype=torch.bool, device=weight.device)
    if pruned is not None:
        mask.copy_(pruned)
    if not weight.numel():
        return mask
    factor = weight if other is None else other
    tensors = (weight, factor, mask.view(torch.uint8))
    axes = coalesce(weight.shape, *(t.stride() for t in tensors))
    for index in launches([a.size for a in axes]):
        starts = [sum(i * a.strides[t] for i, a in zip(index, axes, strict=False)) for t in range(3)]
        parts = [t.as_strided((1,), (1,), t.storage_offset() + s) for t, s in zip(tensors, starts, strict=True)]
        _launch(parts, axes[len(index) :], n, m, other is not None, pruned is not None)
    # Triton writes without the knowledge of autograd.
    if not weight.is_inference():
        torch.autograd.graph.increment_version(weight)
    return mask


def _launch(parts: list[Tensor], axes: list[Run], n: int, m: int, multiplied: bool, again: bool) -> None:
    axes = [Run(1, (0, 0, 0), ())] * (OUTER + 2 - len(axes)) + axes
    *outer, rows, length = [a.size for a in axes]
    lanes = power_of_two(m)
    tall, wide = tile_shape(rows, length // m * lanes)
    programs = -(-rows // tall) * -(-(length // m) * lanes // wide) * math.prod(outer)
    numbers: list[Any] = [x for a in axes for x in (a.size, *a.strides)]
    numbers[-4] = length // m
    with torch.cuda.device_of(parts[0]):  # type: ignore[no-untyped-call]
        _select[(programs,)](*parts, *numbers, n, m, lanes, multiplied, again, tall, wide, enable_fp_fusion=False)


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def _select(  # type: ignore[no-untyped-def]
    weight, other, mask,
    n0, w0, o0, m0, n1, w1, o1, m1, n2, w2, o2, m2, n3, w3, o3, m3, groups, w4, o4, m4,
    N: tl.constexpr, M: tl.constexpr, LANES: tl.constexpr, MULTIPLIED: tl.constexpr, AGAIN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Rank each group of M and zero all but N of it. A group takes LANES columns of the tile, a power of two.

    Bytes for each weight of b bytes: b loaded, b stored, 1 of the mask stored, those of `other` loaded where it is
    passed, and 1 of the mask where some are pruned before (AGAIN). The minimum is the same, except that only (M − N)/M
    of the weights have to be stored: they are scattered over all sectors of the memory, so whole vectors cost no more.
    """
    pid = tl.program_id(0).to(tl.int64)
    across = tl.cdiv(groups * LANES, COLUMNS)
    down = tl.cdiv(n3, ROWS)
    column, pid = pid % across * COLUMNS, pid // across
    row, pid = pid % down * ROWS, pid // down
    x2, pid = pid % n2, pid // n2
    x1, x0 = pid % n1, pid // n1
    rows = (row + tl.arange(0, ROWS))[:, None]
    columns = (column + tl.arange(0, COLUMNS))[None, :]
    inside = (rows < n3) & (columns < groups * LANES)
    if LANES != M:
        inside = inside & (columns % LANES < M)
        columns = columns // LANES * M + columns % LANES

    weights = weight + x0 * w0 + x1 * w1 + x2 * w2 + rows * w3 + columns * w4
    values = tl.load(weights, mask=inside, other=0)
    score = values.to(tl.float32)
    if MULTIPLIED:
        others = other + x0 * o0 + x1 * o1 + x2 * o2 + rows * o3 + columns * o4
        score = score * tl.load(others, mask=inside, other=0).to(tl.float32)
    # The bits of magnitudes are in their order; −1 ranks NaN below all of them, what stays pruned ranks below NaN, and
    # lanes outside rank last.
    key = tl.where(score == score, tl.abs(score).to(tl.int32, bitcast=True), -1)
    masks = mask + x0 * m0 + x1 * m1 + x2 * m2 + rows * m3 + columns * m4
    if AGAIN:
        before = tl.load(masks, mask=inside, other=0) != 0
        key = tl.where(before, -2, key)
    key = tl.reshape(tl.where(inside, key, -3), (ROWS, COLUMNS // LANES, LANES))
    lane = tl.arange(0, LANES)[None, None, :]
    rank = tl.zeros((ROWS, COLUMNS // LANES, LANES), tl.int32)
    for j in tl.static_range(M):
        rival = tl.sum(tl.where(lane == j, key, 0), axis=2, keep_dims=True)
        rank += (rival + (lane > j).to(tl.int32) > key).to(tl.int32)
    pruned = tl.reshape(rank, (ROWS, COLUMNS)) >= N
    if AGAIN:
        pruned = pruned | before
    tl.store(masks, pruned.to(tl.uint8), mask=inside)
    tl.store(weights, tl.where(pruned, 0.0, values).to(values.dtype), mask=inside)
# fmt: on
