"""Sparsifier: patterns, a schedule, a criterion, a budget and a method, in any training loop."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from sparse_lightning.blocks.scope import SparseScope
from sparse_lightning.blocks.shards import is_rank_zero
from sparse_lightning.budgets import Budget, Uniform
from sparse_lightning.compaction.shrink import Shrink
from sparse_lightning.compat.wrapped import unwrapped
from sparse_lightning.compensation import Compensation
from sparse_lightning.engine.configuration import Configuration, Update, masks_in, rewound
from sparse_lightning.engine.defaults import in_force, resumed, warn_of_rhythm
from sparse_lightning.engine.engine import Engine
from sparse_lightning.engine.first_masks import FirstMasks, check_first_masks, first_masks
from sparse_lightning.engine.masked_scope import MaskedScope
from sparse_lightning.engine.saved_state import check_form
from sparse_lightning.engine.short_forms import (
    as_budget,
    as_compensation,
    as_criterion,
    as_method,
    as_schedule,
    as_shrink,
)
from sparse_lightning.engine.shrinkable import check_method
from sparse_lightning.errors import ShortRunWarning, SparseLightningError, SparsityError
from sparse_lightning.flow import Criterion
from sparse_lightning.kernels.block_score import check_lowering
from sparse_lightning.methods import Gradual, Method
from sparse_lightning.patterns import Patterns, summary
from sparse_lightning.patterns.given import collected
from sparse_lightning.renamed import renamed_attribute
from sparse_lightning.schedules import Schedule


class Sparsifier:
    """Trains a model to structured sparsity, in any loop that calls a torch optimizer.

    Args:
        patterns: which parameters are divided into which blocks: a pattern, a list or a mapping of patterns, and of
            blocks and scopes on parameters of the model.
        schedule: the target sparsity at each optimizer step; a number is that of a `Constant`.
        criterion: scores the blocks, an object or its name, such as "taylor". The default is `AverageTaylor()`;
            `Magnitude()` if a parameter is frozen; for N:M patterns alone `Wanda()`, or `Magnitude()` if a weight is
            not that of a linear or convolutional layer.
        method: what happens at an update; the default is `Gradual()`.
        budget: splits the target over the scopes; the default is `Uniform()`.
        update_every: the optimizer steps between two updates; None makes about 30 over the schedule.
        seed: of random scores, the same on all ranks.
        lowering: how scores are computed; None chooses the fastest, see `Scorer`.
        observe_every: the optimizer steps between two runs of a criterion that keeps state, such as a moving average:
            it observes gradients at this rhythm, and masks change at updates only. None observes gradients every step
            for a sum over the steps, as `Movement` is, the last steps up to each update for a moving average, which
            starts anew after steps that are passed over, and updates only if the criterion reads none.
        masks: what is pruned from the start: masks by name, as the attribute `masks` has them, or "from weights" for
            the blocks that are zero in a pruned model. None starts dense. A state that is loaded comes first.
        compensation: changes the kept weights at each update that prunes, such as `Refit()`; None for no change.
        shrink: `Shrink()` removes pruned units from the model while it trains; None leaves them where they are, zero.

    Example:
        >>> import torch
        >>> from sparse_lightning import Blocks, Linear
        >>> model = nn.Linear(8, 8)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> sparsifier = Sparsifier([Blocks("weight", (4, 4))], Linear(final=0.5, end=3), update_every=1)
        >>> sparsifier.attach(model, optimizer)
        >>> for _ in range(5):
        ...     model(torch.randn(2, 8)).square().sum().backward()
        ...     sparsifier.before_step()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> sparsifier.target, sparsifier.sparsity()
        (0.5, 0.5)
        >>> sparsifier.detach()
    """

    def __init__(
        self,
        patterns: Patterns,
        schedule: Schedule | float,
        criterion: Criterion | str | None = None,
        method: Method | str | None = None,
        budget: Budget | str | None = None,
        update_every: int | None = None,
        seed: int = 0,
        lowering: str | None = None,
        observe_every: int | None = None,
        masks: FirstMasks = None,
        compensation: Compensation | None = None,
        shrink: Shrink | None = None,
    ) -> None:
        for name, steps in (("observe_every", observe_every), ("update_every", update_every)):
            if steps is not None and (not _is_whole(steps) or steps < 1):
                raise SparsityError(f"{name}={steps!r} is out of range: pass 1 or more optimizer steps, a whole number")
        if not _is_whole(seed):
            raise SparsityError(f"seed={seed!r} is not a whole number: pass one")
        patterns = unwrapped(patterns)
        check_lowering(lowering)
        check_first_masks(masks)
        parts = (
            None if criterion is None else as_criterion(criterion),
            Gradual() if method is None else as_method(method),
            Uniform() if budget is None else as_budget(budget),
        )
        found, plan = collected(patterns), as_schedule(schedule)
        rest = as_compensation(compensation), as_shrink(shrink)
        if shrink is not None:
            check_method(parts[1])
        self.configuration = Configuration(found, plan, *parts, update_every, seed, lowering, observe_every, *rest)
        self.wraps_again = False
        """Whether something wraps the model again, for several processes, when `resizes` has changed."""
        self._first_masks = masks
        self._engine: Engine | None = None
        self._pending: dict[str, Any] = {}
        self._is_own = False

    settings = renamed_attribute("settings", "configuration")

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy gets: it is detached, with the masks and the state of this one."""
        return {**vars(self), "_engine": None, "_pending": copy.deepcopy(self.state_dict()), "_is_own": True}

    @property
    def is_attached(self) -> bool:
        """Whether a model is attached."""
        return self._engine is not None

    def attach(
        self, model: nn.Module, optimizers: Optimizer | Sequence[Optimizer], total_steps: int | None = None
    ) -> None:
        """Start to prune a model, or resume from a loaded state or from the last `detach`.

        Args:
            model: where the patterns look for parameters.
            optimizers: all that change its parameters.
            total_steps: the length of the run, for schedules in fractions of it.
        """
        if self.is_attached:
            raise SparseLightningError("this Sparsifier is already attached to a model: call detach() first")
        listed = list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]
        configuration = resumed(self.configuration, self._pending)
        engine = Engine(configuration, model, listed, total_steps, self.wraps_again)
        foreign = _not_zero(engine.scopes, masks_in(self._pending)) if self._is_own else []
        try:
            self._start(engine)
        except SparseLightningError:
            engine.close()
            raise
        self._engine, self._pending = engine, {}
        warn_of_rhythm(engine.configuration, total_steps)
        if foreign:
            warnings.warn(
                f"{', '.join(foreign)} had pruned blocks in the previous model that were not zero in this one: they "
                "are zeroed now. To start dense, use a new Sparsifier or SparsityCallback for this model",
                stacklevel=2,
            )

    def _start(self, engine: Engine) -> None:
        """Load the state of an earlier run, or take the first masks."""
        if self._pending:
            engine.load_state_dict(self._pending)
        elif self._first_masks is not None:
            engine.start_with(first_masks(self._first_masks, engine.scopes))

    def detach(self) -> None:
        """Remove the hooks and leave the model as it is. Masks and state are kept for the next `attach`.

        Units that `shrink` has removed are put back, with weights of zero.

        All ranks must call it, as they must call `state_dict`: input norms are summed over ranks.
        """
        if self._engine is not None:
            self._pending, self._is_own = self._engine.state_dict(), True
            self._engine.close()
            self._engine = None

    def abandon(self) -> None:
        """Detach on this rank only, after an error: with several ranks, input norms since the last update are lost."""
        if self._engine is not None:
            self._pending, self._is_own = self._engine.close_alone(), True
            self._engine = None

    def rewind(self) -> None:
        """Restart the schedule at the next `attach`; masks and state stay."""
        self._pending = rewound(self._pending) if self._pending else {}

    def seek(self, step: int) -> None:
        """Move to a step of the schedule, for a run that started without this Sparsifier; missed updates become one."""
        self._attached().seek(step)

    @property
    def step(self) -> int:
        """The number of optimizer steps made."""
        return self._engine.position.step if self._engine is not None else self._pending.get("step", 0)

    @property
    def last_update(self) -> Update | None:
        """The record of the last update, None before the first."""
        update = self._attached().position.last_update
        return None if update.step < 0 else update

    @property
    def attachments(self) -> list[MaskedScope]:
        """What the patterns have attached: scopes with their names, blocks and masks."""
        return [] if self._engine is None else list(self._engine.scopes)

    @property
    def scopes(self) -> dict[str, SparseScope]:
        """The scopes in which the budget holds, by name, with the grids of `masks`.

        While `shrink` has removed units of a scope, its weights are on the meta device: call `put_back` to read them.
        """
        return {scope.name: scope.scope for scope in self._attached().scopes}

    @property
    def masks(self) -> dict[str, Tensor]:
        """A copy of the mask of each grid of blocks, by name; True = pruned."""
        if self._engine is None:
            return masks_in(self._pending)
        return {name: mask.clone() for name, mask in self._engine.masks().items()}

    @property
    def target(self) -> float:
        """The target sparsity at this step."""
        return self._attached().position.target

    @property
    def final_target(self) -> float:
        """The target sparsity at the end of the schedule."""
        return self._attached().position.final_target

    @property
    def is_due(self) -> bool:
        """Whether the masks are updated before the next optimizer step."""
        return self._attached().position.is_due()

    @property
    def is_final(self) -> bool:
        """Whether the last update had the target sparsity of the end of the schedule."""
        return self._attached().position.last_update.target >= self.final_target - 1e-9

    def sparsity(self) -> float:
        """Return the fraction of weights in blocks that are zero, counted from the weights, each of them once.

        Weights of removed units count as zero.
        """
        return self._attached().sparsity()

    def sparsities(self) -> dict[str, float]:
        """Return `sparsity` for each pattern."""
        engine = self._attached()
        return {name: engine.sparsity(name) for name in dict.fromkeys(scope.pattern for scope in engine.scopes)}

    @property
    def resizes(self) -> int:
        """How often `shrink` has changed the sizes of parameters."""
        return self._attached().resizes

    def put_back(self) -> None:
        """Put the units back that `shrink` has removed, with weights of zero; `detach` does so, too."""
        self._attached().put_back()

    def summary(self) -> str:
        """Return a table of what is attached, with the final sparsity of each scope, below what is in force."""
        engine = self._attached()
        table = summary(self.attachments, engine.final_sparsities(), engine.passed_over)
        return f"{in_force(engine.configuration, engine.scoring.observation)}\n{table}"

    def before_step(self, optimizer: Optimizer | None = None) -> None:
        """Update the masks where the schedule has an update, and mask the gradients.

        Call it after `backward`, when gradients are unscaled and not yet clipped. A loop that does not call it is
        updated right after the optimizer step, and its gradients are not masked when they are clipped.

        Args:
            optimizer: the one that is about to make a step; None means all.
        """
        self.update(optimizer)
        self.mask_gradients(optimizer)

    def update(self, optimizer: Optimizer | None = None) -> None:
        """Update the masks where the schedule has an update: the first half of `before_step`."""
        self._attached().update(optimizer)

    def update_now(self) -> None:
        """Update the masks to the target of this step, whether or not the schedule has an update."""
        self._attached().update_now()

    def finish(self) -> None:
        """Make the last update if it is due now, at the end of a run; all ranks must call it.

        A schedule that ends at the number of steps has its last update after the last step. Call `finish` after the
        loop: it makes this update, while the last gradients are still there. A run that has missed the final target
        sparsity gets a `ShortRunWarning`, which says by how much and why.
        """
        missing = self._attached().finish()
        if missing is not None and is_rank_zero():
            warnings.warn(missing, ShortRunWarning, stacklevel=2)

    def mask_gradients(self, optimizer: Optimizer | None = None) -> None:
        """Zero the pruned blocks of the gradients: the second half of `before_step`.

        It costs a pass over the gradients. Elementwise optimizers, such as Adam and SGD, need it only where gradients
        are clipped by their norm, or read by others.
        """
        self._attached().mask_gradients(optimizer)

    def hold(self) -> None:
        """Zero all pruned blocks in the weights, after they were changed without the optimizer."""
        self._attached().hold()

    def zero_removed(self) -> None:
        """Zero the weights that were loaded into units that `shrink` has removed; `hold` does so, too."""
        self._attached().zero_removed()

    def mask_copy(self, module: nn.Module) -> None:
        """Zero all pruned blocks in a copy of the model, such as an average of its weights."""
        self._attached().mask_copy(module)

    def state_dict(self) -> dict[str, Any]:
        """Return masks, state of the flows, and the position in the schedule: tensors and numbers only."""
        return self._pending if self._engine is None else self._engine.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned: now, or when a model is attached, whichever comes second."""
        check_form(state)
        if self._engine is None:
            self._pending, self._is_own = dict(state), False
        elif state:
            self._engine.load_state_dict(state)

    def _attached(self) -> Engine:
        if self._engine is None:
            raise SparseLightningError("this Sparsifier is not attached to a model: call attach(model, optimizers)")
        return self._engine


def _not_zero(scopes: Iterable[MaskedScope], masks: Mapping[str, Tensor]) -> list[str]:
    """Return the masks of the last model that prune non-zero blocks of this one: in the same model, there are none."""
    return [name for scope in scopes for name in scope.not_zero(masks)]


def _is_whole(number: Any) -> bool:
    """Whether a number is an integer, of Python or numpy."""
    return isinstance(number, Integral) and not isinstance(number, bool)
