"""Sparsifier: the engine. Patterns, a schedule, a criterion, a budget and a method, in any training loop."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from sparse_lightning.attached import Attached
from sparse_lightning.budgets import Budget, Uniform
from sparse_lightning.criteria import Magnitude
from sparse_lightning.errors import SparseLightningError, SparsityError
from sparse_lightning.flow import Criterion
from sparse_lightning.methods import Gradual, Method
from sparse_lightning.patterns import Attachment, Pattern, summary
from sparse_lightning.schedule import Schedule
from sparse_lightning.scope import SparseScope
from sparse_lightning.settings import Settings, Update, masks_in, rewound
from sparse_lightning.work import Work


class Sparsifier:
    """Trains a model to structured sparsity, in any loop that calls a torch optimizer.

    Args:
        patterns: which parameters are cut into which blocks.
        schedule: the target sparsity at each optimizer step.
        criterion: scores the blocks; the default is `Magnitude()`.
        method: what happens at an update; the default is `Gradual()`.
        budget: splits the target over the scopes; the default is `Uniform()`.
        update_every: the optimizer steps between two updates.
        seed: of random scores, the same on all ranks.
        lowering: how scores are computed; None chooses what is fastest, see `Scorer`.

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
        patterns: Sequence[Pattern],
        schedule: Schedule,
        criterion: Criterion | None = None,
        method: Method | None = None,
        budget: Budget | None = None,
        update_every: int = 100,
        seed: int = 0,
        lowering: str | None = None,
    ) -> None:
        if update_every < 1:
            raise SparsityError(f"an update every {update_every} steps: it must be at least 1")
        parts = criterion or Magnitude(), method or Gradual(), budget or Uniform()
        self.settings = Settings(list(patterns), schedule, *parts, update_every, seed, lowering)
        self._work: Work | None = None
        self._waiting: dict[str, Any] = {}
        self._is_own = False

    @property
    def is_attached(self) -> bool:
        """Whether there is a model to work on."""
        return self._work is not None

    def attach(
        self, model: nn.Module, optimizers: Optimizer | Sequence[Optimizer], total_steps: int | None = None
    ) -> None:
        """Begin to work on a model, or go on where a loaded state or the last `detach` left off.

        Args:
            model: where the patterns look for parameters.
            optimizers: all that change its parameters.
            total_steps: how long the run is, for schedules that are given as parts of it.
        """
        if self.is_attached:
            raise SparseLightningError("this Sparsifier is attached to a model already: call detach() first")
        listed = list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]
        work = Work(self.settings, model, listed, total_steps)
        foreign = _not_zero(work.attached, masks_in(self._waiting)) if self._is_own else []
        if self._waiting:
            try:
                work.load_state_dict(self._waiting)
            except SparseLightningError:
                work.close()
                raise
        self._work, self._waiting = work, {}
        if foreign:
            warnings.warn(
                f"{', '.join(foreign)} had blocks pruned in the last model, and they were not zero in this one: they "
                "are zeroed now. If it is to begin dense, give it a Sparsifier, or a SparsityCallback, of its own",
                stacklevel=2,
            )

    def detach(self) -> None:
        """Leave the model as it is, and take the hooks off it. What was learned stays for the next `attach`.

        All ranks must call it, as they must call `state_dict`: what each has seen of the inputs is added up.
        """
        if self._work is not None:
            self._waiting, self._is_own = self._work.state_dict(), True
            self._work.close()
            self._work = None

    def abandon(self) -> None:
        """`detach` on this rank alone, after an error: between several, inputs seen since the last update are lost."""
        if self._work is not None:
            self._waiting, self._is_own = self._work.close_alone(), True
            self._work = None

    def rewind(self) -> None:
        """Start the schedule again at the next `attach`; masks and state stay."""
        self._waiting = rewound(self._waiting) if self._waiting else {}

    def seek(self, step: int) -> None:
        """Go to a step of the schedule, for a run that began without this Sparsifier; missed updates become one."""
        self._at_work().seek(step)

    @property
    def step(self) -> int:
        """The optimizer steps that were made."""
        return self._work.step if self._work is not None else self._waiting.get("step", 0)

    @property
    def last_update(self) -> Update | None:
        """What the last update did, None before the first."""
        update = self._at_work().last_update
        return None if update.step < 0 else update

    @property
    def attachments(self) -> list[Attachment]:
        """What the patterns have named in the model."""
        return [] if self._work is None else [a.attachment for a in self._work.attached]

    @property
    def scopes(self) -> dict[str, SparseScope]:
        """The scopes in which the budget holds, by name."""
        return {a.name: a.scope for a in self._at_work().attached}

    @property
    def masks(self) -> dict[str, Tensor]:
        """The mask of each grid of blocks, by name; True = pruned."""
        return self._work.masks() if self._work is not None else masks_in(self._waiting)

    @property
    def target(self) -> float:
        """The sparsity that the schedule asks for at this step."""
        work = self._at_work()
        return work.plan(work.step)

    def sparsity(self) -> float:
        """The share of the weights that lie in blocks that are zero, counted from the weights."""
        return _share(self._at_work().attached)

    def sparsities(self) -> dict[str, float]:
        """What `sparsity` counts, for each pattern apart."""
        attached = self._at_work().attached
        patterns = dict.fromkeys(a.pattern for a in attached)
        return {name: _share(a for a in attached if a.pattern == name) for name in patterns}

    def summary(self) -> str:
        """A table of what was attached, with the sparsity that each is to reach."""
        return summary(self.attachments, self._at_work().final_sparsities())

    def before_step(self, optimizer: Optimizer | None = None) -> None:
        """Update the masks where it is time, and mask the gradients.

        Call it after `backward`, when gradients are unscaled and not yet clipped. A loop that does not call it gets
        its updates right after the optimizer step; its gradients are then not masked when they are clipped.

        Args:
            optimizer: the one that is about to make a step; None means all.
        """
        self.update(optimizer)
        self.mask_gradients(optimizer)

    def update(self, optimizer: Optimizer | None = None) -> None:
        """The first half of `before_step`: update the masks where it is time."""
        self._at_work().update(optimizer)

    def mask_gradients(self, optimizer: Optimizer | None = None) -> None:
        """The second half of `before_step`: zero the pruned blocks of the gradients.

        It costs a pass over the gradients. Optimizers that treat each weight for itself, as Adam and SGD do, need it
        only where gradients are clipped by their norm, or read by others.
        """
        self._at_work().mask_gradients(optimizer)

    def hold(self) -> None:
        """Zero all pruned blocks in the weights. The optimizer's hook has done so; this is for weights set by hand."""
        self._at_work().hold()

    def mask_copy(self, module: nn.Module) -> None:
        """Zero all pruned blocks in a copy of the model, such as an average of its weights."""
        self._at_work().mask_copy(module)

    def state_dict(self) -> dict[str, Any]:
        """Masks, state of the flow, and the place in the schedule: tensors and numbers only."""
        return self._waiting if self._work is None else self._work.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave: now, or when a model is attached, whichever comes second."""
        if self._work is None:
            self._waiting, self._is_own = dict(state), False
        elif state:
            self._work.load_state_dict(state)

    def _at_work(self) -> Work:
        if self._work is None:
            raise SparseLightningError("this Sparsifier is not attached to a model: call attach(model, optimizers)")
        return self._work


def _not_zero(attached: Iterable[Attached], masks: Mapping[str, Tensor]) -> list[str]:
    """The masks of the last model that prune what is not zero in this one: in the same model, there are none."""
    return [name for a in attached for name in a.not_zero(masks)]


def _share(attached: Iterable[Attached]) -> float:
    blocks = [block for a in attached for block in a.scope.blocks()]
    weights = sum(block.numel() for block in blocks)
    return sum(int(block.zeros()) for block in blocks) / weights if weights else 0.0
