"""block_score: elementwise steps on windows, folded over the elements of each block into grids."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparse_lightning.errors import FlowError, did_you_mean
from sparse_lightning.kernels.availability import has_triton, is_interpreted
from sparse_lightning.kernels.block_score import compiled, native, reference
from sparse_lightning.kernels.stage import Stage


def fold_in_triton(stage: Stage, windows: Sequence[Tensor]) -> list[Tensor]:
    """Call `triton.fold`; Triton is imported when it is first needed."""
    from sparse_lightning.kernels.block_score import triton

    return triton.fold(stage, windows)


LOWERINGS: dict[str, Callable[[Stage, Sequence[Tensor]], list[Tensor]]] = {
    "reference": reference.fold,
    "compiled": compiled.fold,
    "native": native.fold,
    "triton": fold_in_triton,
}

FoldMany = Callable[
    [Stage, Sequence[Tensor], Sequence[Sequence[Tensor]], Tensor | None, Sequence[Tensor] | None], list[Tensor] | None
]
"""Runs a stage on the windows of several tensors that lie alike; see `native.fold_many`."""


def fold_many(fold: Callable[[Stage, Sequence[Tensor]], list[Tensor]]) -> FoldMany | None:
    """Return how a lowering reads several tensors where they are, in one call; None if it can't."""
    return native.fold_many if fold is native.fold else None


PAYS = 1 << 22
"""From this many weights on, compilation (seconds, in every process) pays off over a training run."""

PAYS_ONCE = 1 << 18
"""The same for kernels that are built once on a machine, and kept on disk."""


def choose(
    device: torch.device, elements: int, lowering: str | None = None
) -> Callable[[Stage, Sequence[Tensor]], list[Tensor]]:
    """Return how to run a stage: the requested lowering, else the fastest that pays off on the device."""
    if lowering is not None:
        return LOWERINGS[lowering]
    if device.type == "cuda" and has_triton():
        return fold_in_triton
    if device.type == "cpu" and elements >= PAYS_ONCE and native.is_available():
        return native.fold
    if device.type == "cpu" and elements >= PAYS and compiled.has_compiler():
        return compiled.fold
    return reference.fold


def check_lowering(lowering: str | None, device: torch.device | None = None) -> str | None:
    """Return the name of a lowering, or None, unchanged; raise an error if it cannot run.

    Args:
        lowering: its name; None for the fastest.
        device: of the parameters, if it is known already.
    """
    if lowering is not None and lowering not in LOWERINGS:
        raise FlowError(f"there is no lowering {lowering!r}{did_you_mean(lowering, LOWERINGS)}")
    if lowering == "triton":
        _check_triton(device)
    if lowering == "compiled" and not compiled.has_compiler():
        raise FlowError(
            "the lowering 'compiled' needs a C++ compiler, and there is none: install g++ or clang++, or set CXX"
        )
    if lowering == "native" and not native.is_available():
        raise FlowError(
            "the lowering 'native' needs a C++ compiler on x86 Linux: install g++ or clang++, or set CXX; elsewhere "
            "choose None, for the fastest"
        )
    return lowering


def _check_triton(device: torch.device | None) -> None:
    if not has_triton():
        raise FlowError("the lowering 'triton' needs Triton, which is not installed: pip install triton")
    advice = "choose another lowering, or None for the fastest. Tests without a GPU run it with TRITON_INTERPRET=1"
    if is_interpreted():
        return
    if device is not None and device.type != "cuda":
        raise FlowError(f"the lowering 'triton' needs parameters on a CUDA device, not on {device}: {advice}")
    if not torch.cuda.is_available():
        raise FlowError(f"the lowering 'triton' needs a CUDA device, and there is none: {advice}")
