"""Reductions over blocks that can be taken in parts: chunks, cut blocks, coupled parameters, shards."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Reduction:
    """What becomes of the elements of a block: prepare each, fold them, combine parts, finish.

    Only `prepare` sees elements; `combine` and `finish` see grids. Parts may be combined in any order.
    """

    prepare: Callable[[Tensor], Tensor]
    fold: Callable[[Tensor, int], Tensor]
    combine: Callable[[Tensor, Tensor], Tensor]
    identity: float
    finish: Callable[[Tensor], Tensor]

    def start(self, shape: tuple[int, ...], values: Tensor) -> Tensor:
        """A grid of the reduction of nothing, in the dtype that parts of `values` accumulate in."""
        dtype = accumulation_dtype(values.dtype)
        identity: float = self.identity
        if math.isinf(identity) and not dtype.is_floating_point:
            identity = torch.iinfo(dtype).max if identity > 0 else torch.iinfo(dtype).min
        return torch.full(shape, identity, dtype=dtype, device=values.device)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for the narrower floats, int64 for integers, otherwise the dtype itself."""
    if not dtype.is_floating_point:
        return torch.int64
    return dtype if dtype.itemsize >= 4 else torch.float32


def _same(x: Tensor) -> Tensor:
    return x


def _sum(x: Tensor, dim: int) -> Tensor:
    return x.sum(dim, keepdim=True)


def _max(x: Tensor, dim: int) -> Tensor:
    return x.amax(dim, keepdim=True)


def _min(x: Tensor, dim: int) -> Tensor:
    return x.amin(dim, keepdim=True)


SUM = Reduction(_same, _sum, torch.add, 0.0, _same)
MAX = Reduction(_same, _max, torch.maximum, -math.inf, _same)
MIN = Reduction(_same, _min, torch.minimum, math.inf, _same)


def norm(p: float = 2) -> Reduction:
    """The p-norm of each block: `(Σ |x|^p)^(1/p)`, the largest magnitude for p = inf.

    Example:
        >>> from sparse_lightning import BlockSpec
        >>> BlockSpec(torch.tensor([[3.0, 4.0]]), (1, 2)).norms(p=2)
        tensor([[5.]])
    """
    if p == 2:
        return Reduction(torch.square, _sum, torch.add, 0.0, torch.sqrt)
    if p == 1:
        return Reduction(torch.abs, _sum, torch.add, 0.0, _same)
    if p == math.inf:
        return Reduction(torch.abs, _max, torch.maximum, 0.0, _same)
    if not p > 0:
        raise ValueError(f"there is no {p}-norm: p must be positive")
    return Reduction(lambda x: x.abs().pow(p), _sum, torch.add, 0.0, lambda x: x.pow(1 / p))
