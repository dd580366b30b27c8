"""Reductions over blocks that can be taken in parts: chunks, cut blocks, coupled parameters, shards."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_lightning.kernels.block_score import reference
from sparse_lightning.kernels.block_score.stage import FoldKind, Ref, Stage, Step


@dataclass(frozen=True)
class Reduction:
    """What becomes of the elements of a block: prepare each, fold them, combine parts, finish.

    Only the preparing steps see elements; `combine` and `finish` see grids. Parts may be combined in any order.
    """

    steps: tuple[Step, ...]
    kind: FoldKind
    finish: Callable[[Tensor], Tensor]

    @property
    def stage(self) -> Stage:
        """The program on the elements of one tensor."""
        return Stage(1, self.steps, ((Ref(len(self.steps)), self.kind),))

    def start(self, shape: tuple[int, ...], values: Tensor) -> Tensor:
        """A grid of the reduction of nothing, in the dtype that parts of `values` accumulate in."""
        return reference.start(self.kind, shape, values)

    def combine(self, a: Tensor, b: Tensor) -> Tensor:
        """Two grids of parts of the same blocks as one."""
        return reference.combine(self.kind, a, b)


def _same(x: Tensor) -> Tensor:
    return x


SUM = Reduction((), "sum", _same)
MAX = Reduction((), "max", _same)
MIN = Reduction((), "min", _same)

_ABS = Step("abs", (Ref(0),))


def norm(p: float = 2) -> Reduction:
    """The p-norm of each block: `(Σ |x|^p)^(1/p)`, the largest magnitude for p = inf.

    Example:
        >>> from sparse_lightning import BlockSpec
        >>> BlockSpec(torch.tensor([[3.0, 4.0]]), (1, 2)).norms(p=2)
        tensor([[5.]])
    """
    if p == 2:
        return Reduction((Step("square", (Ref(0),)),), "sum", torch.sqrt)
    if p == 1:
        return Reduction((_ABS,), "sum", _same)
    if p == math.inf:
        return Reduction((_ABS,), "max", _same)
    if not p > 0:
        raise ValueError(f"there is no {p}-norm: p must be positive")
    return Reduction((_ABS, Step("power", (Ref(1), p))), "sum", lambda x: x.pow(1 / p))
