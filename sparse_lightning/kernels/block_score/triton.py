"""block_score for GPUs: each stage becomes a Triton kernel that reads the windows once and computes all folds.

A program takes a tile of blocks × rows × columns: columns run along the last dimension of a block, rows along the
others, and the tile is moved over blocks that are larger than it. Lanes outside of the windows hold the identity of the
fold. Addresses are 64-bit, values and folds are fp32.

Bytes for each weight, in blocks of k weights, with windows of b0, b1, … bytes and F folds: b0 + b1 + … loaded, 4·F/k
stored. That is the minimum: no intermediate value goes through memory. Only blocks that are too large and too few to
occupy the GPU are split, and then the grids of their parts are read again.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from functools import cache, lru_cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparse_lightning.kernels.availability import TRITON_DTYPES
from sparse_lightning.kernels.block_score import reference
from sparse_lightning.kernels.stage import FoldKind, Ref, Stage, Step
from sparse_lightning.kernels.tile import ELEMENTS, power_of_two

PAIRS = 5
"""Windows of more pairs `(n, l)` than this are rare and use the reference."""

ALIGNED = 16
"""Triton specializes integer arguments only on divisibility by this; smaller factors are passed as constants."""

OPTIONS = {"num_warps": 8, "maxnreg": 128, "enable_fp_fusion": False}
"""Each thread has 8 elements of a tile: one or two 128-bit loads for each window, and few registers.

Without `maxnreg`, ptxas spills some registers to fit more threads; with it, it does not. Products are rounded before
they are added, as in torch.
"""

PROGRAMS = 1024
"""With fewer programs than this, parts of a GPU are idle."""

EXPRESSIONS = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "tl.div_rn({}, {})",
    "neg": "-{}",
    "abs": "tl.abs({})",
    "square": "{0} * {0}",
    "sqrt": "tl.sqrt_rn({})",
    "log": "tl.log({})",
    "exp": "tl.exp({})",
    "power": "power({}, {})",
    "maximum": "highest({}, {})",
    "minimum": "lowest({}, {})",
    "where": "tl.where({}, {}, {})",
    "relu": "highest({}, tl.zeros((1, 1, 1), tl.float32))",
    "sigmoid": "tl.sigmoid({})",
    "gt": "{} > {}",
    "ge": "{} >= {}",
    "lt": "{} < {}",
    "le": "{} <= {}",
}
"""The operations of a stage as Triton expressions of their arguments."""

_COMBINE: dict[FoldKind, str] = {"sum": "{} + {}", "max": "highest({}, {})", "min": "lowest({}, {})"}
_REDUCE: dict[FoldKind, str] = {
    "sum": "tl.sum({}, {})",
    "max": "tl.reduce({}, {}, highest)",
    "min": "tl.reduce({}, {}, lowest)",
}
_IDENTITY: dict[FoldKind, str] = {"sum": "0.0", "max": 'float("-inf")', "min": 'float("inf")'}


def fold(stage: Stage, windows: Sequence[Tensor]) -> list[Tensor]:
    """Run a stage on windows `(n0, l0, n1, l1, …)` of one shape; each fold returns a grid `(n0, n1, …)`.

    The windows may differ in strides and in dtype. Dtypes other than fp32, bf16 and fp16 use the reference.
    """
    shape = windows[0].shape
    if not _takes(windows):
        return reference.fold(stage, windows)
    d, parts = split_of(shape)
    if parts == 1:
        return _launch(stage, windows)
    pieces = [w.unflatten(2 * d + 1, (parts, -1)).unsqueeze(2 * d + 1) for w in windows]  # type: ignore[no-untyped-call]
    as_blocks = (math.prod(shape[: 2 * d + 1 : 2]), parts, math.prod(shape[2 * d + 2 :: 2]), 1)
    grids = zip(_launch(stage, pieces), stage.folds, strict=True)
    return [reference.fold_blocks(kind, grid.view(as_blocks)).view(shape[0::2]) for grid, (_, kind) in grids]


def _takes(windows: Sequence[Tensor]) -> bool:
    """Whether a kernel can run on these windows: they are not empty and have supported dtypes."""
    known = all(window.dtype in TRITON_DTYPES for window in windows)
    return known and windows[0].numel() > 0 and 0 < windows[0].ndim <= 2 * PAIRS


def split_of(shape: Sequence[int]) -> tuple[int, int]:
    """Return which dimension of the blocks to split, and into how many parts, so that a few large blocks fill a GPU.

    Example:
        >>> split_of((128, 32, 128, 32)), split_of((1, 4096, 1, 4096)), split_of((8, 1, 1, 1 << 20))
        ((0, 1), (0, 1024), (1, 128))
    """
    blocks, size = math.prod(shape[0::2]), math.prod(shape[1::2])
    most = min(PROGRAMS // blocks, size // ELEMENTS)
    parts = [max((p for p in range(1, most + 1) if n % p == 0), default=1) for n in shape[1::2]]
    return max(enumerate(parts), key=lambda part: part[1])


def _launch(stage: Stage, windows: Sequence[Tensor]) -> list[Tensor]:
    """Launch one kernel for all folds of a stage."""
    first = windows[0]
    blocks, rows, columns = math.prod(first.shape[0::2]), math.prod(first.shape[1:-1:2]), first.shape[-1]
    grids = [torch.empty(first.shape[0::2], dtype=torch.float32, device=first.device) for _ in stage.folds]
    unit = math.gcd(columns, ALIGNED)
    sizes = (blocks, rows, columns // unit, *first.shape[2::2], *first.shape[3:-1:2])
    steps = [_step(window) for window in windows]
    strides = [s for window, step in zip(windows, steps, strict=True) for s in _strides(window, step)]
    index, tile = _index(blocks, rows, columns), _tile(blocks, rows, columns)
    kernel = _kernel(source_of(stage, first.ndim // 2))
    with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
        kernel[(-(-blocks // tile[0]),)](*windows, *grids, *sizes, *strides, *steps, index, unit, *tile, **OPTIONS)
    return grids


def _index(*counts: int) -> Any:
    """Return the shortest integer type for indices of blocks, rows and columns: dividing longer ones is slow."""
    return tl.int32 if max(counts) <= torch.iinfo(torch.int32).max - ELEMENTS else tl.int64


def _tile(blocks: int, rows: int, columns: int) -> tuple[int, int, int]:
    """Return the blocks, rows and columns of a tile, powers of two.

    Example:
        >>> _tile(16384, 32, 32), _tile(4096, 1, 4096), _tile(1 << 20, 4, 1), _tile(100, 63, 9)
        ((2, 32, 32), (1, 1, 2048), (512, 4, 1), (2, 64, 16))
    """
    wide = min(power_of_two(columns), ELEMENTS)
    tall = min(power_of_two(rows), ELEMENTS // wide)
    return min(power_of_two(blocks), ELEMENTS // (wide * tall)), tall, wide


def _step(window: Tensor) -> int:
    """Return the power of two up to 16 that divides all strides but the last: the alignment of rows, for Triton."""
    strides = zip(window.shape[:-1], window.stride()[:-1], strict=True)
    return math.gcd(ALIGNED, *(s for n, s in strides if n > 1))


def _strides(window: Tensor, step: int) -> list[int]:
    """Return the strides of a window divided by `step`, the last one undivided; 0 for dimensions of size 1."""
    *strides, last = (s if n > 1 else 0 for n, s in zip(window.shape, window.stride(), strict=True))
    return [*(s // step for s in strides), last if window.shape[-1] > 1 else 1]


@lru_cache(maxsize=256)
def _kernel(source: str) -> Any:
    """Return the kernel of a module's source. Triton reads the source of a kernel, so it must be in a file."""
    name = f"stage_{sha256(source.encode()).hexdigest()[:32]}"
    path = Path(_directory().name) / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.score


@cache
def _directory() -> TemporaryDirectory[str]:
    """Return the directory of the kernel sources of this process."""
    return TemporaryDirectory(prefix="sparse_lightning_")


@lru_cache(maxsize=1024)
def source_of(stage: Stage, pairs: int) -> str:
    """Return the source of a module with the kernel `score` of a stage, for windows of `pairs` pairs `(n, l)`."""
    inputs, folds, inner = range(stage.inputs), range(len(stage.folds)), range(1, pairs)
    dims = [f"{kind}{d}" for d in range(pairs) for kind in "nl"]
    return _MODULE.format(
        stage=stage,
        pairs=pairs,
        tensors=", ".join([*(f"w{i}" for i in inputs), *(f"grid{f}" for f in folds)]),
        sizes=_list([f"n{d}" for d in inner] + [f"l{d}" for d in inner[:-1]]),
        strides=_list([f"w{i}_{dim}" for i in inputs for dim in dims]),
        steps=_list([f"STEP{i}: tl.constexpr" for i in inputs]),
        block_digits=_lines(4, _digits("block", "b", "n", pairs)),
        block_offsets=_lines(4, [f"from{i} = ({_dot(i, 'b', 'n', pairs)})[:, None, None]" for i in inputs]),
        starts=_lines(4, [f"fold{f} = {_start(kind)}" for f, (_, kind) in enumerate(stage.folds)]),
        row_digits=_lines(8, _digits("row", "r", "l", pairs - 1)),
        row_offsets=_lines(8, [f"row{i} = ({_dot(i, 'r', 'l', pairs - 1)})[None, :, None]" for i in inputs]),
        loads=_lines(12, [_load(i, pairs) for i in inputs]),
        computed=_lines(12, [f"v{stage.inputs + i} = {_expression(step)}" for i, step in enumerate(stage.steps)]),
        folds=_lines(12, [_fold(f, *fold) for f, fold in enumerate(stage.folds)]),
        stores=_lines(4, [_store(f, kind) for f, (_, kind) in enumerate(stage.folds)]),
    )


def _list(names: Sequence[str]) -> str:
    return "".join(f"{name}, " for name in names).rstrip()


def _lines(indent: int, lines: Sequence[str]) -> str:
    return ("\n" + " " * indent).join(lines)


def _digits(number: str, digit: str, size: str, count: int) -> list[str]:
    """Return statements that compute the digits of a number, last first: `block → b0, b1, …` by the sizes `n1, …`."""
    lines = [f"{digit}0 = {number}"]
    for d in range(count - 1, 0, -1):
        lines += [f"{digit}{d} = {digit}0 % {size}{d}", f"{digit}0 = {digit}0 // {size}{d}"]
    return lines


def _dot(window: int, digit: str, kind: str, count: int) -> str:
    """Return the expression of the offset of digits in a window, in its steps; 0 without digits."""
    products = [f"{digit}{d}.to(tl.int64) * w{window}_{kind}{d}" for d in range(count)]
    return " + ".join(products) or f"{digit}0 * 0"


def _load(i: int, pairs: int) -> str:
    offset = f"(from{i} + row{i}) * STEP{i} + column[None, None, :].to(tl.int64) * w{i}_l{pairs - 1}"
    return f"v{i} = tl.load(w{i} + ({offset}), mask=inside, other=0.0).to(tl.float32)"


def _expression(step: Step) -> str:
    return EXPRESSIONS[step.operation].format(*(_argument(a) for a in step.arguments))


def _argument(argument: Ref | float) -> str:
    if isinstance(argument, Ref):
        return f"v{argument.at}"
    return f'tl.full((1, 1, 1), float("{float(argument)!r}"), tl.float32)'


def _start(kind: FoldKind) -> str:
    return f"tl.full((BLOCKS, ROWS, COLUMNS), {_IDENTITY[kind]}, tl.float32)"


def _fold(f: int, ref: Ref, kind: FoldKind) -> str:
    value = f"tl.where(inside, v{ref.at}.to(tl.float32), {_IDENTITY[kind]})"
    return f"fold{f} = {_COMBINE[kind].format(f'fold{f}', value)}"


def _store(f: int, kind: FoldKind) -> str:
    folded = _REDUCE[kind].format(_REDUCE[kind].format(f"fold{f}", 2), 1)
    return f"tl.store(grid{f} + block, {folded}, mask=block < blocks)"


_MODULE = '''\
"""A stage on windows of {pairs} pairs `(n, l)`, generated by sparse_lightning from {stage}."""

import triton
import triton.language as tl

from sparse_lightning.kernels.block_score.triton import highest, lowest, power


@triton.jit
def score(
    {tensors},
    blocks, rows, columns, {sizes}
    {strides}
    {steps}
    INDEX: tl.constexpr, UNIT: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    block = tl.program_id(0).to(INDEX) * BLOCKS + tl.arange(0, BLOCKS)
    {block_digits}
    {block_offsets}
    {starts}
    length = columns * UNIT
    for top in range(0, rows, ROWS):
        row = top + tl.arange(0, ROWS).to(INDEX)
        {row_digits}
        {row_offsets}
        for left in range(0, length, COLUMNS):
            column = left + tl.arange(0, COLUMNS).to(INDEX)
            inside = (block < blocks)[:, None, None] & (row < rows)[None, :, None] & (column < length)[None, None, :]
            {loads}
            {computed}
            {folds}
    {stores}
'''


@triton.jit
def highest(a, b):  # type: ignore[no-untyped-def]
    """Return the maximum; NaN if one of the two is, as in torch."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def lowest(a, b):  # type: ignore[no-untyped-def]
    """Return the minimum; NaN if one of the two is, as in torch."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def power(x, y):  # type: ignore[no-untyped-def]
    """Return `x^y` for finite x; in fp64, as the logarithm of a large power leaves too few bits of fp32."""
    x, y = x.to(tl.float64), y.to(tl.float64)
    size = tl.exp2(y * tl.log2(tl.abs(x)))
    odd = tl.floor(y * 0.5) * 2 != y
    of_negative = tl.where(tl.floor(y) == y, tl.where(odd, -size, size), float("nan"))
    return tl.where((y == 0) | (x == 1), 1.0, tl.where(x < 0, of_negative, size)).to(tl.float32)
