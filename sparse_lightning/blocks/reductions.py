"""Reductions over blocks that can be computed in parts: chunks, cut blocks, coupled parameters, shards."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_lightning.errors import SparsityError
from sparse_lightning.kernels.block_score import reference
from sparse_lightning.kernels.stage import FoldKind, Ref, Stage, Step


@dataclass(frozen=True)
class Reduction:
    """A reduction of the elements of a block: elementwise steps, a fold, `combine` for partial grids, `finish`.

    Steps run on elements; `combine` and `finish` run on grids. Parts may be combined in any order.
    """

    steps: tuple[Step, ...]
    kind: FoldKind
    finish: Callable[[Tensor], Tensor]

    @property
    def stage(self) -> Stage:
        """The steps and the fold as a program on the elements of one tensor."""
        return Stage(1, self.steps, ((Ref(len(self.steps)), self.kind),))

    def combine(self, a: Tensor, b: Tensor) -> Tensor:
        """Combine two partial grids of the same blocks."""
        return reference.combine(self.kind, a, b)


def _same(x: Tensor) -> Tensor:
    return x


SUM = Reduction((), "sum", _same)
MAX = Reduction((), "max", _same)
MIN = Reduction((), "min", _same)

_ABS = Step("abs", (Ref(0),))


def norm(p: float = 2) -> Reduction:
    """Return the p-norm of each block: `(Σ |x|^p)^(1/p)`, the largest magnitude for p = inf.

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
        raise SparsityError(f"p={p} is out of range: a norm takes a positive p")
    return Reduction((_ABS, Step("power", (Ref(1), p))), "sum", lambda x: x.pow(1 / p))
