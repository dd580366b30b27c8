"""block_score in plain torch operations, in cache-sized chunks of the windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparse_lightning.kernels.chunks import chunks
from sparse_lightning.kernels.stage import FoldKind, Stage, elementwise


def fold(stage: Stage, windows: Sequence[Tensor]) -> list[Tensor]:
    """Run a stage on windows `(n0, l0, n1, l1, …)` of one shape; each fold returns a grid `(n0, n1, …)`.

    The dimensions of a block are folded from the outermost to the innermost, so that the longest contiguous runs are
    added to one another.
    """
    shape, dtype = windows[0].shape, accumulation_dtype(windows[0].dtype)
    grids = [start(kind, shape[0::2], windows[0]) for _, kind in stage.folds]
    # The values of all steps of a chunk exist at once: the more steps, the smaller the chunk.
    for piece in chunks(shape, windows[0].device, each=max(2, len(stage.steps))):
        values = elementwise(stage, [window[piece].to(dtype) for window in windows])
        for grid, value, (_, kind) in zip(grids, values, stage.folds, strict=True):
            here = grid[piece[0::2]]
            combine_(kind, here, fold_blocks(kind, value).view(here.shape))
        del values, value  # before the next chunk allocates its own
    return grids


def fold_blocks(kind: FoldKind, value: Tensor) -> Tensor:
    """Fold the odd dimensions of `(n0, l0, n1, l1, …)`, keeping them with size 1."""
    for d in range(1, value.ndim, 2):
        if value.shape[d] > 1:
            value = FOLDS[kind](value, d, keepdim=True)
    return value


FOLDS: dict[FoldKind, Callable[..., Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}
_COMBINE: dict[FoldKind, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
_IDENTITY = {"sum": 0.0, "max": -math.inf, "min": math.inf}


def combine(kind: FoldKind, a: Tensor, b: Tensor) -> Tensor:
    """Combine two partial grids of the same blocks."""
    return _COMBINE[kind](a, b)


def combine_(kind: FoldKind, a: Tensor, b: Tensor) -> None:
    """Combine in place of the first."""
    _COMBINE[kind](a, b, out=a)


def start(kind: FoldKind, shape: Sequence[int], values: Tensor) -> Tensor:
    """Return the grid of an empty fold, in the dtype that `values` accumulate in."""
    dtype = accumulation_dtype(values.dtype)
    return start_over(kind, torch.empty(tuple(shape), dtype=dtype, device=values.device))


def start_over(kind: FoldKind, grid: Tensor) -> Tensor:
    """Fill a grid with what an empty fold has, in place; return it."""
    identity: float = _IDENTITY[kind]
    if math.isinf(identity) and not grid.dtype.is_floating_point:
        identity = torch.iinfo(grid.dtype).max if identity > 0 else torch.iinfo(grid.dtype).min
    return grid.fill_(identity)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return fp32 for narrower floats, int64 for integers, otherwise the dtype itself."""
    if not dtype.is_floating_point:
        return torch.int64
    return dtype if dtype.itemsize >= 4 else torch.float32
