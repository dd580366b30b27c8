"""Methods: what happens to the blocks of a scope at an update. Each overrides one decision.

Grids come gathered by scope, `(*grid of scopes, blocks per scope)`; see `SparseScope`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparse_lightning.criteria import Gradient, Random
from sparse_lightning.errors import SparsityError
from sparse_lightning.flow import Criterion
from sparse_lightning.scope import SparseScope


@dataclass(frozen=True)
class Case:
    """What a method decides on: one scope, or a grid of scopes, at one update.

    Args:
        scope: the blocks that compete.
        scores: their scores, −inf for those that are pruned now.
        mask: which are pruned now.
        keeps: how many blocks the budget lets each scope keep: at this update, and at those that follow as far as
            the method looks `ahead`.
        growth: the scores by which blocks may grow, where the method asks for them.
        memory: what the method remembered at the update before, None at the first.
        target: the sparsity that the schedule asks for.
        progress: how far the schedule is, from 0 at its first update to 1 at its last.
        every: how many steps lie between two updates.
    """

    scope: SparseScope
    scores: Tensor
    mask: Tensor
    keeps: list[Tensor]
    growth: Tensor | None = None
    memory: Tensor | None = None
    target: float = 0.0
    progress: float = 0.0
    every: int = 1

    @property
    def active(self) -> Tensor:
        """How many blocks each scope has now."""
        return (~self.mask).sum(-1)

    def select(self, scores: Tensor, keep: Tensor) -> Tensor:
        """The mask that keeps this many blocks with the highest scores in each scope."""
        mask = self.scope.select(scores, keep)
        assert isinstance(mask, Tensor), "gathered scores give a gathered mask"
        return mask


class Method(ABC):
    """Decides at each update which blocks are pruned."""

    growth: ClassVar[Criterion | None] = None
    """The criterion by which pruned blocks grow again; None where they never do."""

    ahead: int = 0
    """How many updates the method looks ahead."""

    @abstractmethod
    def choose(self, case: Case) -> Tensor:
        """The new mask."""

    def is_open(self, case: Case) -> bool:
        """Whether the mask may change at this update."""
        return True

    def remember(self, case: Case, mask: Tensor) -> Tensor | None:
        """What the method has to know at the next update, and in a checkpoint: one tensor for the scope."""
        return None

    def change(self, case: Case, memory: Tensor | None) -> None:
        """Change the weights of blocks that stay, at an update."""
        return

    def after_step(self, scope: SparseScope, memory: Tensor | None) -> None:
        """Change the weights of blocks that stay, after each optimizer step."""
        return


@dataclass(frozen=True)
class Gradual(Method):
    """Prunes the lowest scores, a few more at each update. What is pruned stays pruned.

    Example:
        >>> import torch
        >>> from sparse_lightning import BlockSpec, ScopeSpec
        >>> scope = ScopeSpec(BlockSpec(torch.ones(1, 4), (1, 1)))
        >>> scores, mask = torch.tensor([[[3.0, 1.0, 4.0, -math.inf]]]), torch.tensor([[[False, False, False, True]]])
        >>> Gradual().choose(Case(scope, scores, mask, keeps=[torch.tensor([[2]])]))
        tensor([[[False,  True, False,  True]]])
    """

    def choose(self, case: Case) -> Tensor:
        """Never more than are left."""
        return case.select(case.scores, case.keeps[0].minimum(case.active))


@dataclass(frozen=True)
class OneShot(Method):
    """Prunes once, at the first update that asks for any sparsity; then the masks stay.

    Example:
        >>> import torch
        >>> from sparse_lightning import BlockSpec, ScopeSpec
        >>> scope = ScopeSpec(BlockSpec(torch.ones(1, 4), (1, 1)))
        >>> scores, mask = torch.tensor([[[3.0, 1.0, 4.0, -math.inf]]]), torch.tensor([[[False, False, False, True]]])
        >>> again = Case(scope, scores, mask, keeps=[torch.tensor([[2]])], memory=torch.tensor(True))
        >>> OneShot().choose(again).equal(mask)
        True
    """

    def choose(self, case: Case) -> Tensor:
        """As `Gradual`, where it has not pruned yet."""
        return Gradual().choose(case) if self.is_open(case) else case.mask

    def is_open(self, case: Case) -> bool:
        """Only until it has pruned."""
        return case.memory is None or not bool(case.memory)

    def remember(self, case: Case, mask: Tensor) -> Tensor:
        """Whether it has pruned."""
        return torch.tensor(not self.is_open(case) or case.target > 0)


@dataclass(frozen=True)
class SET(Method):
    """Sparse evolutionary training: drops the lowest scores, and lets as many others grow at random.

    Of the k blocks that a scope is to keep, `⌊share·k⌋` are dropped, and as many of those that were pruned before
    grow; fewer where fewer are pruned. A grown block starts at zero, with fresh optimizer state.

    Args:
        share: the part of the blocks that is exchanged.

    Example:
        >>> import torch
        >>> from sparse_lightning import BlockSpec, ScopeSpec
        >>> scope = ScopeSpec(BlockSpec(torch.ones(1, 4), (1, 1)))
        >>> mask = torch.tensor([[[False, False, True, True]]])
        >>> scores = torch.tensor([[[2.0, 1.0, -math.inf, -math.inf]]])
        >>> case = Case(scope, scores, mask, keeps=[torch.tensor([[2]])], growth=torch.tensor([[[0.0, 9.0, 0.1, 0.7]]]))
        >>> SET(share=0.5).choose(case)
        tensor([[[False,  True,  True, False]]])
    """

    share: float = 0.3
    growth: ClassVar[Criterion | None] = Random()

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise SparsityError(f"a share of {self.share} to exchange: it must lie between 0 and 1")

    def share_at(self, progress: float) -> float:
        """The part of the blocks that is exchanged at a point of the schedule."""
        return self.share

    def choose(self, case: Case) -> Tensor:
        """Drop among the blocks that are there, grow among those that were pruned before."""
        assert case.growth is not None, "the engine scores growth for a method that asks for it"
        keep, active = case.keeps[0], case.active
        exchanged = (keep * self.share_at(case.progress) + 1e-9).long().minimum(case.mask.sum(-1))
        kept = active.minimum(keep - exchanged)
        dropped = case.select(case.scores, kept)
        stays = case.select(case.growth.masked_fill(~case.mask, -math.inf), keep - kept)
        return dropped & stays


@dataclass(frozen=True)
class RigL(SET):
    """The rigged lottery: drops the lowest scores and grows where the gradient is largest.

    As `SET`, but grown by the 2-norm of a block's gradient, and with a share that falls along a cosine:
    `share·(1 + cos(π·progress))/2`.

    Args:
        share: the part of the blocks that is exchanged at the first update.

    Example:
        >>> RigL(share=0.3).share_at(0.0), RigL(share=0.3).share_at(1.0)
        (0.3, 0.0)
    """

    growth: ClassVar[Criterion | None] = Gradient()

    def share_at(self, progress: float) -> float:
        """The cosine."""
        return self.share * (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True)
class Soft(Method):
    """Scales blocks down to zero over several updates, so that they are gone when the schedule wants them gone.

    A block that will be pruned j updates from now has j/updates of its size left, as far as updates lie ahead in the
    schedule; those next in line are chosen by the scores of now, and what has begun to shrink goes first. Pruned
    stays pruned.

    Args:
        updates: over how many updates a block shrinks; with 1, `Soft` is `Gradual`.
    """

    updates: int = 4

    def __post_init__(self) -> None:
        if self.updates < 1:
            raise SparsityError(f"{self.updates} updates to shrink over: it must be at least 1")

    @property
    def ahead(self) -> int:  # type: ignore[override]
        """All updates at which a block is not whole, but for this one."""
        return self.updates - 1

    def choose(self, case: Case) -> Tensor:
        """As `Gradual`, but what has begun to shrink goes first."""
        return self._masks(case)[0]

    def remember(self, case: Case, mask: Tensor) -> Tensor:
        """How much is left of each block, from 0 to 1."""
        left = 1 - torch.stack(self._masks(case)).float().mean(0)
        return left if case.memory is None else left.minimum(case.memory)

    def change(self, case: Case, memory: Tensor | None) -> None:
        """Shrink each block from what was left of it to what is left now."""
        assert memory is not None, "`remember` says what is left"
        before = torch.ones_like(memory) if case.memory is None else case.memory
        shrunk = torch.where(memory > 0, memory / before, 1.0)
        for block, multiplier in case.scope.scatter(shrunk).items():
            block.apply_multiplier(multiplier)

    def _masks(self, case: Case) -> list[Tensor]:
        """What is pruned at this update and at each of those ahead: each mask includes the one before."""
        ranks = case.scores.argsort(dim=-1, stable=True, descending=True).argsort(dim=-1).neg()
        if case.memory is not None:
            steps_left = (case.memory * self.updates).round().long()
            ranks = ranks + steps_left * case.scores.shape[-1]
        masks, keep = [], case.active
        for allowed in case.keeps:
            keep = keep.minimum(allowed)
            masks.append(case.select(ranks.to(torch.float64), keep))
        return masks


@dataclass(frozen=True)
class Proximal(Method):
    """Shrinks all blocks a little after each step, so hard that those to be pruned next arrive at zero.

    After each step every block of norm n is scaled by `max(0, 1 − t/n)`, the proximal step of the penalty `t·‖block‖`.
    At each update the strength t of a scope is set anew: `t = n/every`, n the largest norm among the blocks that
    the schedule wants gone at the next update, by the norms of now. An update prunes the lowest scores, as `Gradual`
    does, so that the count is exact whatever the gradients did.

    Args:
        strength: a factor on t; below 1 blocks are pruned before they have arrived at zero.
    """

    strength: float = 1.0
    ahead: int = 1

    def __post_init__(self) -> None:
        if not self.strength >= 0:
            raise SparsityError(f"a strength of {self.strength}: it must not be negative")

    def choose(self, case: Case) -> Tensor:
        """As `Gradual`."""
        return Gradual().choose(case)

    def remember(self, case: Case, mask: Tensor) -> Tensor:
        """The strength in each scope."""
        left = (~mask).sum(-1)
        norms = case.scope.block_norms()
        going = case.select(norms, case.keeps[1].minimum(left)) & ~mask
        return norms.masked_fill(~going, 0).amax(-1) * (self.strength / case.every)

    def after_step(self, scope: SparseScope, memory: Tensor | None) -> None:
        """One proximal step."""
        if memory is not None:
            scope.soft_threshold(memory)
