"""block_score: a stage of elementwise steps on windows, folded over the elements of each block into grids."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparse_lightning.errors import FlowError
from sparse_lightning.kernels.availability import has_triton
from sparse_lightning.kernels.block_score import compiled, reference
from sparse_lightning.kernels.block_score.stage import Stage
from sparse_lightning.nearest import did_you_mean


def fold_in_triton(stage: Stage, windows: Sequence[Tensor]) -> list[Tensor]:
    """`triton.fold`; Triton is imported when it is first needed."""
    from sparse_lightning.kernels.block_score import triton

    return triton.fold(stage, windows)


LOWERINGS: dict[str, Callable[[Stage, Sequence[Tensor]], list[Tensor]]] = {
    "reference": reference.fold,
    "compiled": compiled.fold,
    "triton": fold_in_triton,
}

PAYS = 1 << 22
"""From this many weights on, compiling (seconds, once) is repaid by the runs of a training."""


def choose(
    device: torch.device, elements: int, lowering: str | None = None
) -> Callable[[Stage, Sequence[Tensor]], list[Tensor]]:
    """The way to run a stage: the one asked for; else the device's own where it pays and can be; else plain."""
    if lowering is not None:
        return LOWERINGS[lowering]
    if device.type == "cuda" and has_triton():
        return fold_in_triton
    if device.type == "cpu" and elements >= PAYS and compiled.has_compiler():
        return compiled.fold
    return reference.fold


def check_lowering(lowering: str | None) -> str | None:
    """The name of a lowering, or None, as it is; anything else is refused."""
    if lowering is not None and lowering not in LOWERINGS:
        raise FlowError(f"there is no lowering {lowering!r}{did_you_mean(lowering, LOWERINGS)}")
    if lowering == "triton" and not has_triton():
        raise FlowError("the lowering 'triton' needs Triton, which is not installed: pip install triton")
    if lowering == "compiled" and not compiled.has_compiler():
        raise FlowError("the lowering 'compiled' needs a C++ compiler (g++, clang++ or CXX), and there is none")
    return lowering
