"""Methods: what happens to the blocks of a scope at an update. Each overrides one decision.

Grids are gathered by scope, `(*grid of scopes, blocks per scope)`; see `SparseScope`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparse_lightning.blocks.scope import SparseScope
from sparse_lightning.criteria import Gradient, Random
from sparse_lightning.errors import SparsityError
from sparse_lightning.flow import Criterion
from sparse_lightning.kernels.rank_select import descending_order
from sparse_lightning.renamed import adopt_renamed_method, renamed_arguments, renamed_attribute, renamed_names
from sparse_lightning.schedules import Schedule


@dataclass(frozen=True)
class UpdateContext:
    """What a method decides on: one scope, or a grid of scopes, at one update.

    Args:
        scope: the blocks that compete.
        scores: their scores, −inf for blocks that are pruned now.
        mask: which blocks are pruned now.
        keeps: how many blocks the budget lets each scope keep: at this update, and at the following ones as far as
            the method looks `ahead`.
        growth: the scores by which pruned blocks may grow, for methods with a `growth` criterion.
        memory: what `Method.remember` returned at the previous update, None at the first.
        target: the target sparsity of the schedule.
        progress: the fraction of the schedule that has passed, from 0 at its first update to 1 at its last.
        every: the optimizer steps between two updates.
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
        """How many blocks of each scope are not pruned now."""
        return (~self.mask).sum(-1)

    def select(self, scores: Tensor, keep: Tensor) -> Tensor:
        """Return the mask that keeps this many blocks with the highest scores in each scope."""
        mask = self.scope.select(scores, keep)
        assert isinstance(mask, Tensor), "gathered scores give a gathered mask"
        return mask


class Method(ABC):
    """Decides at each update which blocks are pruned."""

    growth: ClassVar[Criterion | None] = None
    """The criterion by which pruned blocks grow again; None where they never do."""

    first: Criterion | None = None
    """The criterion of the first mask, where the first update is at the final sparsity; None for that of the run."""

    ahead: int = 0
    """How many later updates `UpdateContext.keeps` covers."""

    decides_scopes_apart: ClassVar[bool] = False
    """Declares that the class decides on each scope of a grid by itself. Scopes of several parameters that lie alike
    are then decided in one call, as one grid whose first dimension counts the parameters; what `remember` returns has
    that dimension too. A subclass that overrides a decision does not inherit it, and is called for each parameter."""

    def check_schedule(self, schedule: Schedule, every: int) -> None:
        """Raise a SparsityError if the method cannot follow a schedule in optimizer steps, with updates at a rhythm."""
        return

    @abstractmethod
    def choose(self, context: UpdateContext) -> Tensor:
        """Return the new mask."""

    def remember(self, context: UpdateContext, mask: Tensor) -> Tensor | None:
        """Return what the method needs at the next update: one tensor per scope, saved in checkpoints."""
        return None

    def change(self, context: UpdateContext, memory: Tensor | None) -> None:
        """Change the weights of blocks that are kept, at an update."""
        return

    def after_step(self, scope: SparseScope, memory: Tensor | None) -> None:
        """Change the weights of blocks that are kept, after each optimizer step."""
        return


@dataclass(frozen=True)
class Gradual(Method):
    """Gradual pruning: prune the lowest scores, a few more at each update. Pruned blocks stay pruned.

    Example:
        >>> import torch
        >>> from sparse_lightning import BlockSpec, ScopeSpec
        >>> scope = ScopeSpec(BlockSpec(torch.ones(1, 4), (1, 1)))
        >>> scores, mask = torch.tensor([[[3.0, 1.0, 4.0, -math.inf]]]), torch.tensor([[[False, False, False, True]]])
        >>> Gradual().choose(UpdateContext(scope, scores, mask, keeps=[torch.tensor([[2]])]))
        tensor([[[False,  True, False,  True]]])
    """

    decides_scopes_apart: ClassVar[bool] = True
    decides_by_count: ClassVar[bool] = True
    """Declares that the class reads scores only in `choose`, and there only to keep the highest `kept` blocks. N:M
    groups are then scored and chosen in one pass. A subclass that overrides a decision does not inherit it."""

    def kept(self, context: UpdateContext) -> Tensor:
        """Return how many blocks each scope keeps: what the budget allows, never more than are left."""
        return context.keeps[0].minimum(context.active)

    def choose(self, context: UpdateContext) -> Tensor:
        """Keep the highest scores."""
        return context.select(context.scores, self.kept(context))


@dataclass(frozen=True)
class PruneOnce(Gradual):
    """One-shot pruning: prune at the first update with a target above zero; then the masks stay.

    The schedule must be at its final sparsity there, as `OneShot` and `Constant` are.

    Example:
        >>> import torch
        >>> from sparse_lightning import BlockSpec, ScopeSpec
        >>> scope = ScopeSpec(BlockSpec(torch.ones(1, 4), (1, 1)))
        >>> scores, mask = torch.tensor([[[3.0, 1.0, 4.0, -math.inf]]]), torch.tensor([[[False, False, False, True]]])
        >>> again = UpdateContext(scope, scores, mask, keeps=[torch.tensor([[2]])], memory=torch.tensor(True))
        >>> PruneOnce().choose(again).equal(mask)
        True
    """

    decides_scopes_apart: ClassVar[bool] = True
    decides_by_count: ClassVar[bool] = True

    def check_schedule(self, schedule: Schedule, every: int) -> None:
        """Raise a SparsityError if the sparsity rises after the first update that prunes: it would stay there."""
        begin, end = schedule.span
        updates = (step for step in range(begin, end + 1) if schedule.is_update(step, every))
        first = next((step for step in updates if schedule(step) > 0), None)
        if first is not None and schedule(first) < schedule.final - 1e-9:
            name, final = type(schedule).__name__, schedule.final
            raise SparsityError(
                f"PruneOnce prunes at the first update of {name} alone, at step {first} to a sparsity of "
                f"{schedule(first):.4g}, and would never reach its {final:.4g}: use the schedule OneShot({final:.4g}) "
                f"or Constant({final:.4g}), or the method Gradual()"
            )

    def kept(self, context: UpdateContext) -> Tensor:
        """Return as many as `Gradual` the first time, and all that are left from then on."""
        return context.active if _has_pruned(context) else super().kept(context)

    def remember(self, context: UpdateContext, mask: Tensor) -> Tensor:
        """Return for each scope whether it has pruned."""
        has_pruned = _has_pruned(context) or context.target > 0
        return torch.full(context.scope.grid_shape, has_pruned)


def _has_pruned(context: UpdateContext) -> bool:
    return context.memory is not None and bool(context.memory.any())


@renamed_arguments(share="drop_fraction")
@dataclass(frozen=True)
class SET(Method):
    """Sparse evolutionary training: drop the lowest scores, and grow as many other blocks at random.

    Of the k blocks that a scope is to keep, `⌊drop_fraction·k⌋` are dropped, and as many of those that were pruned
    before grow; fewer where fewer are pruned. A grown block starts at zero, with fresh optimizer state. At constant
    sparsity the first mask is random: scores of untrained weights are no better, and by magnitude even worse.

    Args:
        drop_fraction: the fraction of the blocks that is replaced at each update.
        first: scores the first mask at constant sparsity; None for the criterion of the run, if weights are trained.

    Example:
        >>> import torch
        >>> from sparse_lightning import BlockSpec, ScopeSpec
        >>> scope = ScopeSpec(BlockSpec(torch.ones(1, 4), (1, 1)))
        >>> mask = torch.tensor([[[False, False, True, True]]])
        >>> scores = torch.tensor([[[2.0, 1.0, -math.inf, -math.inf]]])
        >>> growth = torch.tensor([[[0.0, 9.0, 0.1, 0.7]]])
        >>> context = UpdateContext(scope, scores, mask, keeps=[torch.tensor([[2]])], growth=growth)
        >>> SET(drop_fraction=0.5).choose(context)
        tensor([[[False,  True,  True, False]]])
    """

    drop_fraction: float = 0.3
    first: Criterion | None = field(default=Random(), compare=False, repr=False)
    growth: ClassVar[Criterion | None] = Random()
    decides_scopes_apart: ClassVar[bool] = True
    share: ClassVar[Any] = renamed_attribute("share", "drop_fraction")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        adopt_renamed_method(cls, "share_at", "drop_fraction_at")

    def __post_init__(self) -> None:
        if not 0 <= self.drop_fraction <= 1:
            raise SparsityError(f"drop_fraction={self.drop_fraction} is out of range: pass a number from 0 to 1")

    def drop_fraction_at(self, progress: float) -> float:
        """Return the fraction of the blocks that is replaced at a point of the schedule, from 0 to 1."""
        return self.drop_fraction

    def choose(self, context: UpdateContext) -> Tensor:
        """Drop among the blocks that are kept now, grow among those that are pruned now."""
        assert context.growth is not None, "the engine scores growth for methods with a growth criterion"
        keep, active = context.keeps[0], context.active
        replaced = (keep * self.drop_fraction_at(context.progress) + 1e-9).long().minimum(context.mask.sum(-1))
        kept = active.minimum(keep - replaced)
        not_kept = context.select(context.scores, kept)
        not_grown = context.select(context.growth.masked_fill(~context.mask, -math.inf), keep - kept)
        return not_kept & not_grown


@renamed_arguments(share="drop_fraction")
@dataclass(frozen=True)
class RigL(SET):
    """The rigged lottery: drop the lowest scores and grow the blocks with the largest gradients.

    As `SET`, but grown by the 2-norm of a block's gradient, and with a fraction that decays along a cosine:
    `drop_fraction·(1 + cos(π·progress))/2`.

    Args:
        drop_fraction: the fraction of the blocks that is replaced at the first update.
        first: scores the first mask at constant sparsity; None for the criterion of the run, if weights are trained.

    Example:
        >>> RigL(drop_fraction=0.3).drop_fraction_at(0.0), RigL(drop_fraction=0.3).drop_fraction_at(1.0)
        (0.3, 0.0)
    """

    growth: ClassVar[Criterion | None] = Gradient()

    def drop_fraction_at(self, progress: float) -> float:
        """Return the value of the cosine."""
        return self.drop_fraction * (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True)
class Soft(Method):
    """Soft pruning: scale blocks down to zero over several updates, before they are pruned.

    A block that will be pruned j updates from now keeps j/updates of its size, as far as updates lie ahead in the
    schedule. The next blocks to shrink are those with the lowest scores; blocks that already shrink are pruned first.
    Pruned blocks stay pruned.

    Args:
        updates: over how many updates a block shrinks; with 1, `Soft` is `Gradual`.
    """

    updates: int = 4
    decides_scopes_apart: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.updates < 1:
            raise SparsityError(f"updates={self.updates} is out of range: a block shrinks over 1 update or more")

    @property
    def ahead(self) -> int:  # type: ignore[override]
        """All updates at which a block shrinks, except this one."""
        return self.updates - 1

    def choose(self, context: UpdateContext) -> Tensor:
        """Prune as `Gradual`, blocks that already shrink first."""
        return self._masks(context)[0]

    def remember(self, context: UpdateContext, mask: Tensor) -> Tensor:
        """Return the fraction of its size that each block keeps, from 0 to 1."""
        left = 1 - torch.stack(self._masks(context)).float().mean(0)
        return left if context.memory is None else left.minimum(context.memory)

    def change(self, context: UpdateContext, memory: Tensor | None) -> None:
        """Scale each block from the fraction it had to the fraction it keeps now."""
        assert memory is not None, "`remember` returns a fraction for each block"
        before = torch.ones_like(memory) if context.memory is None else context.memory
        shrunk = torch.where(memory > 0, memory / before, 1.0)
        for block, multiplier in context.scope.scatter(shrunk).items():
            block.apply_multiplier(multiplier)

    def _masks(self, context: UpdateContext) -> list[Tensor]:
        """Return what is pruned at this update and at each of those ahead: each mask includes the one before."""
        ranks = descending_order(context.scores).argsort(dim=-1).neg()
        if context.memory is not None:
            steps_left = (context.memory * self.updates).round().long()
            ranks = ranks + steps_left * context.scores.shape[-1]
        masks, keep = [], context.active
        for allowed in context.keeps:
            keep = keep.minimum(allowed)
            masks.append(context.select(ranks.to(torch.float64), keep))
        return masks


@dataclass(frozen=True)
class Proximal(Method):
    """Proximal pruning: shrink the blocks that are to be pruned next after each step, so that they arrive at zero.

    After each step such a block of norm n is scaled by `max(0, 1 − t/n)`, the proximal step of the penalty
    `t·‖block‖`. At each update, t is set to `n/every` for the blocks with the lowest scores, as many as the schedule
    prunes at the next update, and to 0 for all others: a penalty on blocks that stay costs accuracy, and needs tuning.
    An update prunes the lowest scores, as `Gradual` does, so that the count is exact whatever the gradients do.

    Args:
        strength: a factor on t; below 1, blocks are pruned before they arrive at zero.
    """

    strength: float = 1.0
    ahead: int = 1
    decides_scopes_apart: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.strength >= 0:
            raise SparsityError(f"strength={self.strength} is out of range: pass 0 or more")

    def choose(self, context: UpdateContext) -> Tensor:
        """Prune as `Gradual`."""
        return Gradual().choose(context)

    def remember(self, context: UpdateContext, mask: Tensor) -> Tensor:
        """Return the threshold t of each block."""
        scores, left = context.scores.masked_fill(mask, -math.inf), (~mask).sum(-1)
        pruned_next = context.select(scores, context.keeps[1].minimum(left)) & ~mask
        norms = context.scope.block_norms() * (1 + 1e-3)  # rounding in `every` steps must not leave a remainder
        return norms.masked_fill(~pruned_next, 0) * (self.strength / context.every)

    def after_step(self, scope: SparseScope, memory: Tensor | None) -> None:
        """Make one proximal step."""
        if memory is None:
            return
        if memory.shape == scope.grid_shape:  # saved by 0.1.0: one threshold per scope, until the next update
            scope.soft_threshold(memory)
        else:
            for block, thresholds in scope.scatter(memory).items():
                block.soft_threshold(thresholds)


__getattr__ = renamed_names(__name__, Case="UpdateContext", OneShot="PruneOnce")
