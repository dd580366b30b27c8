"""Work: the settings of a Sparsifier at work on one model.

Data flow of an optimizer step:

1. `update`, when gradients are there and not yet clipped. Where the schedule has an update, the criterion scores all
   blocks, the budget says how many each scope keeps, the method chooses which, and the blocks that change are zeroed
   in the weights and in the optimizer's state.
2. `mask_gradients`, where something reads the gradients of several weights together, as clipping does.
3. The optimizer makes its step.
4. A hook of the optimizer zeroes the pruned blocks in the weights, before anything else can read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from sparse_lightning import masks as packed
from sparse_lightning.attached import Attached
from sparse_lightning.block import BlockSpec
from sparse_lightning.budgets import Contender
from sparse_lightning.distributed import decided, has_others
from sparse_lightning.errors import PatternError
from sparse_lightning.flow import Sources
from sparse_lightning.methods import Case
from sparse_lightning.names import Names, nearest
from sparse_lightning.optimizer_state import is_rehearsal, reset_blocks, restart_blocks
from sparse_lightning.patterns import resolve
from sparse_lightning.scoring import Scoring
from sparse_lightning.settings import NEVER, Settings, Update


class Work:
    """Masks on a model: updated, held after each step of its optimizers, saved and loaded.

    Args:
        settings: what to do.
        model: where the patterns look for parameters.
        optimizers: all that change its parameters.
        total_steps: how long the run is, for schedules that are given as parts of it.
    """

    def __init__(
        self, settings: Settings, model: nn.Module, optimizers: Sequence[Optimizer], total_steps: int | None
    ) -> None:
        self.settings = settings
        self.plan = settings.schedule.resolve(total_steps)
        self.step, self.last_update = 0, NEVER
        self._owed = False
        self._optimizers = [innermost(optimizer) for optimizer in optimizers]
        self.attached = [Attached(attachment) for attachment in resolve(settings.patterns, model)]
        self._names = {id(param): name for name, param in reversed(Names(model).parameters.items())}
        settings.budget.check_overrides([a.name for a in self.attached])
        self._members: dict[int, tuple[int, list[Attached]]] = {}
        self._prepared: set[int] = set()
        self._grown: list[tuple[BlockSpec, Tensor]] = []
        self.scoring = Scoring(settings, self.attached, model, self._optimizers)
        self._handles = [optimizer.register_step_post_hook(self._after_step) for optimizer in self._optimizers]

    def close(self) -> None:
        """Take the hooks off the model and its optimizers."""
        for handle in self._handles:
            handle.remove()
        self.scoring.close()

    def _parameters(self) -> list[Tensor]:
        return [param for a in self.attached for param in a.parameters()]

    def masks(self) -> dict[str, Tensor]:
        """The mask of each grid of blocks, by name."""
        return {name: mask for a in self.attached for name, mask in a.masks.items()}

    def final_sparsities(self) -> dict[str, str]:
        """The sparsity that each attachment is to reach, as text; where scores decide, what it shares with others."""
        budget, final, zero = self.settings.budget, self.plan.final, torch.zeros(())
        contenders = [Contender(a.name, a.scope, zero.expand(_gathered_shape(a)), a.final) for a in self.attached]
        texts = {c.name: f"{final:.4g} shared" for c in contenders if budget.own(c) is None}
        apart = [c for c in contenders if budget.own(c) is not None or not budget.compares]
        for c, keep in zip(apart, budget.split(apart, final, final) if apart else [], strict=True):
            texts[c.name] = f"{1 - float(keep.double().mean()) / c.scope.numblk_per_scope():.4g}"
        return texts

    def update(self, optimizer: Optimizer | None) -> None:
        """Update the masks where it is time; None means all optimizers."""
        chosen = self._chosen(optimizer)
        if any(o is self._leader() for o in chosen) and self._is_due():
            self._update()
        self._prepared.update(id(o) for o in chosen)

    def mask_gradients(self, optimizer: Optimizer | None) -> None:
        """Zero the pruned blocks of the gradients that an optimizer, or all of them, will read."""
        for o in self._chosen(optimizer):
            for a in self._attached_to(o):
                a.hold_in(_dense_gradient)

    def _chosen(self, optimizer: Optimizer | None) -> list[Optimizer]:
        return self._optimizers if optimizer is None else [innermost(optimizer)]

    def hold(self) -> None:
        """Zero all pruned blocks in the weights."""
        for a in self.attached:
            a.hold()

    def mask_copy(self, module: nn.Module) -> None:
        """Zero all pruned blocks in a copy of the model."""
        copied = Names(module.module if isinstance(module, AveragedModel) else module).parameters
        for name in [self._names[id(param)] for param in self._parameters()]:
            if name not in copied:
                raise PatternError(
                    f"{type(module).__name__} is no copy of the model: it has no {name}{nearest(name, copied)}"
                )
        for a in self.attached:
            a.hold_in(lambda spec: copied[self._names[id(spec.param)]])

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) not in self._prepared and is_rehearsal(optimizer):
            return
        # What grows in a late update has its first step yet to come.
        grown, self._grown = self._grown, []
        if id(optimizer) not in self._prepared:
            self.update(optimizer)
        self._prepared.discard(id(optimizer))
        self._grown += [(spec, grid) for spec, grid in grown if not restart_blocks(optimizer, spec, grid)]
        # The last parameters that the optimizer wrote are still in the cache.
        for a in reversed(self._attached_to(optimizer)):
            self.settings.method.after_step(a.scope, a.memory)
            a.hold()
        if optimizer is self._leader():
            self.step += 1

    def _leader(self) -> Optimizer | None:
        """The optimizer whose steps count: the last that changes an attached parameter."""
        last = self._optimizers[-1] if self._optimizers else None
        return next((o for o in reversed(self._optimizers) if self._attached_to(o)), last)

    def _attached_to(self, optimizer: Optimizer) -> list[Attached]:
        """What is attached to parameters of an optimizer, found anew when parameters are added to it."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._members.get(id(optimizer))
        if known is None or known[0] != count:
            params = {id(p) for group in optimizer.param_groups for p in group["params"]}
            mine = [a for a in self.attached if any(id(p) in params for p in a.parameters())]
            known = self._members[id(optimizer)] = (count, mine)
        return known[1]

    def _is_due(self) -> bool:
        if self.last_update.step == self.step:
            return False  # the step of this update was skipped, as a GradScaler does: it is not made twice
        return self._owed or self.plan.is_update(self.step, self.settings.update_every)

    def _update(self) -> None:
        target = self.plan(self.step)
        found = self.scoring.scores(self._sources(target), self.masks())
        self._owed = found is None
        if found is None:
            return
        cases = list(self._cases(*found, target))
        masks = self._decide(cases)
        changed = sum(self._apply(a, case, mask) for a, case, mask in zip(self.attached, cases, masks, strict=True))
        self.scoring.begin_anew()
        self.last_update = Update(self.step, target, changed / sum(a.scope.numblk() for a in self.attached))

    def _decide(self, cases: list[Case]) -> list[Tensor]:
        """The new masks, gathered by scope: those of rank 0, on all ranks."""
        chosen = {a.name: self._choose(a, case) for a, case in zip(self.attached, cases, strict=True)}
        return list(decided(chosen).values())

    def _choose(self, a: Attached, case: Case) -> Tensor:
        if a.name not in self.scoring.groups:
            return self.settings.method.choose(case)
        # Pruned for good: a group never keeps more than it has. All groups of a parameter have the same count.
        kept = case.keeps[0].minimum(case.active) if self.settings.method.is_open(case) else case.active
        return self.scoring.groups[a.name].select(int(kept.max()), self._sources(case.target))

    def _sources(self, target: float) -> Sources:
        return self.scoring.sources(self.step, target)

    def _cases(self, scores: dict[str, Tensor], growth: dict[str, Tensor], target: float) -> Iterator[Case]:
        """What the method decides on, for each attachment."""
        masks = [a.gathered_mask() for a in self.attached]
        contenders = self._contenders(scores, masks)
        keeps = [self.settings.budget.split(contenders, t, self.plan.final) for t in self._targets_ahead()]
        begin, end = self.plan.span
        progress = min(1.0, max(0, self.step - begin) / max(1, end - begin))
        for i, a in enumerate(self.attached):
            kept, pull = [keep[i] for keep in keeps], growth.get(a.name)
            every = self.settings.update_every
            yield Case(a.scope, contenders[i].scores, masks[i], kept, pull, a.memory, target, progress, every)

    def _contenders(self, scores: dict[str, Tensor], masks: list[Tensor]) -> list[Contender]:
        """The scores as the budget compares them, pruned blocks behind all others; N:M groups have none."""
        return [self._contender(a, scores.get(a.name), mask) for a, mask in zip(self.attached, masks, strict=True)]

    def _contender(self, a: Attached, scores: Tensor | None, mask: Tensor) -> Contender:
        if scores is None:
            return Contender(a.name, a.scope, torch.zeros((), device=a.device).expand(mask.shape), a.final)
        exponent = self.settings.criterion.size_exponent
        ranked = self.settings.budget.rank(Contender(a.name, a.scope, scores, a.final, exponent))
        # The scores are of no more use as they are; what a budget made may be its own.
        masked = ranked.masked_fill_ if ranked is scores else ranked.masked_fill
        return Contender(a.name, a.scope, masked(mask, -torch.inf), a.final, exponent)

    def _targets_ahead(self) -> Iterable[float]:
        """The target of this update, and of those that follow as far as the method looks ahead."""
        end = max(self.step, self.plan.span[1])
        for i in range(self.settings.method.ahead + 1):
            yield self.plan(min(end, self.step + i * self.settings.update_every))

    def _apply(self, a: Attached, case: Case, mask: Tensor) -> int:
        """Take up a new mask and bring weights and optimizer state in line; gives how many blocks changed."""
        method = self.settings.method
        memory = method.remember(case, mask)
        before = a.set_mask(mask)
        changed = {name: before[name] ^ a.masks[name] for name in before}
        for spec, grid in a.where(changed):
            spec.apply_mask(grid)  # what is pruned becomes zero, and what grows starts there
            reset_blocks(self._optimizers, spec, grid)
        method.change(case, memory)
        a.memory = memory
        self._grown += a.where({name: before[name] & ~a.masks[name] for name in before})
        return sum(int(grid.sum()) for grid in changed.values())

    def seek(self, step: int) -> None:
        """Go to a step of the schedule; where that passes over an update, one is owed."""
        self._owed = self._owed or any(
            self.plan.is_update(i, self.settings.update_every) for i in range(self.step, step)
        )
        self.step = step

    def state_dict(self) -> dict[str, Any]:
        """Masks, state of the flow, and the place in the schedule: tensors and numbers only."""
        return {
            "step": self.step,
            "owed": self._owed,
            "last_update": dict(vars(self.last_update)),
            "masks": packed.pack_all(self.masks()),
            "memory": {a.name: a.memory.cpu() for a in self.attached if a.memory is not None},
            **self.scoring.state_dict(self._names),
        }

    def close_alone(self) -> dict[str, Any]:
        """`close`, and the state as far as this rank knows it by itself: others may not be there to ask."""
        self.close()
        if has_others():
            self.scoring.forget_inputs()
        return self.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave, and hold the masks."""
        grids = {name: block.grid_shape for a in self.attached for name, block in a.blocks.items()}
        masks = packed.unpack_all(state["masks"], grids)
        self.scoring.load_state_dict(state, self._names)
        for a in self.attached:
            a.set_masks({name: masks[name] for name in a.blocks})
            memory = state["memory"].get(a.name)
            a.memory = None if memory is None else memory.to(a.device)
        self.step, self._owed = int(state["step"]), bool(state["owed"])
        self.last_update = Update(**state["last_update"])
        self.hold()


def _gathered_shape(a: Attached) -> tuple[int, ...]:
    return (*a.scope.grid_shape, a.scope.numblk_per_scope())


def innermost(optimizer: Optimizer) -> Optimizer:
    """The torch optimizer inside of what Fabric and others wrap around it."""
    inner = getattr(optimizer, "optimizer", None)
    return innermost(inner) if isinstance(inner, Optimizer) else optimizer


def _dense_gradient(spec: BlockSpec) -> Tensor | None:
    grad = spec.param.grad
    return grad if grad is not None and grad.layout == torch.strided else None
