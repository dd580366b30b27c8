"""rank_select for CPUs, in C++: a histogram of the bits of the scores, then one pass that compares."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from sparse_lightning.kernels.native import library

SOURCE = Path(__file__).with_suffix(".cpp")

WORTH = 1 << 9
"""Scores from which on the kernel is worth building, which takes about two seconds per machine."""

LONG = 1 << 4
"""Scores of a row from which on searching them costs less than sorting them."""

SMALL = 1 << 14
"""Scores up to which one thread is faster than waking others."""


def takes(scores: Tensor) -> bool:
    """Whether the kernel is worth running on these scores, and can be built on this machine."""
    fits = scores.device.type == "cpu" and scores.dtype == torch.float32 and scores.ndim > 0
    return fits and scores.numel() >= WORTH and scores.shape[-1] >= LONG and library(SOURCE) is not None


def rank_select(scores: Tensor, keep: Tensor) -> Tensor:
    """Return the mask that keeps the highest scores of each row."""
    built = library(SOURCE)
    assert built is not None, "`takes` has checked"
    rows, length = scores.contiguous(), scores.shape[-1]
    mask = torch.empty(scores.shape, dtype=torch.bool)
    counts = keep.to(torch.int64).contiguous()
    built.rank_select(
        ctypes.c_void_p(rows.data_ptr()),
        ctypes.c_void_p(counts.data_ptr()),
        ctypes.c_void_p(mask.data_ptr()),
        ctypes.c_int64(scores.numel() // length),
        ctypes.c_int64(length),
        ctypes.c_int(torch.get_num_threads() if scores.numel() > SMALL else 1),
    )
    return mask
