"""block_score through `torch.compile`: one pass over the weights on a CPU.

The windows of all parameters have four dimensions and dynamic sizes, so that a few compiled kernels serve them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from types import FunctionType

import torch
from torch import Tensor

from sparse_lightning.compat.torch import has_dispatch_mode, recompile_limit, recompile_limit_error
from sparse_lightning.kernels.availability import cpp_compiler
from sparse_lightning.kernels.block_score import reference
from sparse_lightning.kernels.stage import FoldKind, Stage, elementwise

VARIANTS = 64
"""How many kinds of windows (which sizes are 1, which strides, which dtypes) one stage may be compiled for."""

WORTH = 1 << 16
"""Elements of a window from which on a compiled kernel is faster."""


@lru_cache(maxsize=1)
def has_compiler() -> bool:
    """Whether there is a C++ compiler for `torch.compile` to use."""
    return cpp_compiler() is not None


def fold(stage: Stage, windows: Sequence[Tensor]) -> list[Tensor]:
    """Run a stage on windows `(n0, l0, n1, l1, …)` of one shape; each fold returns a grid `(n0, n1, …)`.

    Windows of more than two pairs of dimensions are rare, and small ones gain nothing but would need more variants:
    both use the reference. So do calls beyond the limit of variants, and calls under a dispatch mode, such as one that
    counts operations: it can't see into compiled code.
    """
    shape = windows[0].shape
    if len(shape) > 4 or windows[0].numel() < WORTH or has_dispatch_mode():
        return reference.fold(stage, windows)
    four = [window.view([1] * (4 - len(shape)) + list(shape)) for window in windows]
    try:
        with _limit(VARIANTS):
            grids = _compiled(stage)(four)
    except recompile_limit_error():
        return reference.fold(stage, windows)
    return [grid.view(shape[0::2]) for grid in grids]


@lru_cache(maxsize=1)
def _limit(variants: int) -> AbstractContextManager[None]:
    """Return `recompile_limit`, cached because it costs more to create than to enter."""
    return recompile_limit(variants)


@lru_cache(maxsize=256)
def _compiled(stage: Stage) -> Callable[[list[Tensor]], list[Tensor]]:
    def run(windows: list[Tensor]) -> list[Tensor]:
        dtype = reference.accumulation_dtype(windows[0].dtype)
        values = elementwise(stage, [window.to(dtype) for window in windows])
        folds = zip(values, stage.folds, strict=True)
        return [_fold(kind, value) for value, (_, kind) in folds]

    # torch.compile caches and counts variants by code object: each stage needs its own.
    code = run.__code__.replace(co_name=f"stage_{hash(stage) & 0xFFFFFFFF:x}")
    own = FunctionType(code, run.__globals__, code.co_name, None, run.__closure__)
    compiled: Callable[[list[Tensor]], list[Tensor]] = torch.compile(own, dynamic=True, fullgraph=True)
    return compiled


def _fold(kind: FoldKind, value: Tensor) -> Tensor:
    """Fold the elements of blocks, the innermost dimension first: the compiler vectorizes this order."""
    for d in (3, 1):
        value = reference.FOLDS[kind](value, d)
    return value
