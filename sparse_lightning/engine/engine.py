"""Engine: a configuration that runs on one model.

Data flow of an optimizer step:

1. `update`, when gradients are computed and not yet clipped. Where the schedule has an update: score the blocks,
   split the budget over the scopes, choose the blocks to prune, agree on the masks of rank 0, apply them to weights
   and optimizer state, record what changed. At other steps, a criterion with state observes the gradients.
2. `mask_gradients`, where something reads the gradients of several weights together, as clipping does.
3. The optimizer makes its step.
4. A hook of the optimizer zeroes the pruned blocks of the weights, before anything else can read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from sparse_lightning.blocks.live_scope import LiveScope
from sparse_lightning.blocks.shards import has_others
from sparse_lightning.blocks.union import count_pruned
from sparse_lightning.engine import masks as packed
from sparse_lightning.engine.attached import note_attached, note_closed
from sparse_lightning.engine.budget_split import BudgetSplit
from sparse_lightning.engine.configuration import NEVER, Configuration
from sparse_lightning.engine.defaults import resolved
from sparse_lightning.engine.first_masks import warn_of_zeros
from sparse_lightning.engine.grown import GrownBlocks
from sparse_lightning.engine.held_weights import HeldWeights
from sparse_lightning.engine.masked_scope import MaskedScope
from sparse_lightning.engine.masked_stack import MaskBuffer, MaskedStack, decides_apart, masked_stacks
from sparse_lightning.engine.nm_groups import masked_scope
from sparse_lightning.engine.optimizer_reset import check_can_restart, is_rehearsal
from sparse_lightning.engine.optimizer_scopes import innermost
from sparse_lightning.engine.other_steps import OtherSteps, check_held
from sparse_lightning.engine.position import Position
from sparse_lightning.engine.ranks import agree
from sparse_lightning.engine.regrowth import check_can_grow
from sparse_lightning.engine.replaced import Replaced
from sparse_lightning.engine.saved_state import check_state, warn_of_inputs
from sparse_lightning.engine.scoring import Scores, Scoring, warn_postponed
from sparse_lightning.engine.shrinkable import check_others, check_processes
from sparse_lightning.engine.shrinking import Shrinking
from sparse_lightning.errors import PatternError, UnseenInputsError
from sparse_lightning.methods import Method, UpdateContext
from sparse_lightning.patterns import Attachment
from sparse_lightning.patterns.adapters import AdapterWatch
from sparse_lightning.patterns.claims import resolve_in
from sparse_lightning.patterns.names import Names


class Engine:
    """The masks of a model: updated, held after each step of its optimizers, saved and loaded.

    Args:
        configuration: what to do.
        model: where the patterns look for parameters.
        optimizers: all that change its parameters.
        total_steps: the length of the run, for schedules in fractions of it.
        wraps_again: whether something wraps the model again, for several processes, when parameters get smaller.
    """

    holds_masks = True
    """Tells other parts what a step hook of an optimizer belongs to: `compact` can't replace its parameters then."""

    def __init__(
        self,
        configuration: Configuration,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        total_steps: int | None,
        wraps_again: bool = False,
    ) -> None:
        schedule = configuration.schedule.resolve(total_steps)
        self._starts_dense = True
        self._acts_after_steps = type(configuration.method).after_step is not Method.after_step
        self._optimizers = [innermost(optimizer) for optimizer in optimizers]
        names = Names(model)
        found = resolve_in(configuration.patterns, names)
        if not found:
            raise PatternError("no patterns were passed, so that nothing would be pruned: pass one, such as Blocks()")
        self.passed_over = [name for name in names.passed_over if names.owner_of(names.parameters[name]) is None]
        self._adapters = AdapterWatch(found, names)
        self.configuration = resolved(configuration, schedule, found, model)
        self.position = Position(schedule, self.configuration.update_every, total_steps)
        self.configuration.method.check_schedule(schedule, self.configuration.update_every)
        self.scopes = [self._masked_scope(each) for each in found]
        self._names = {id(param): name for name, param in reversed(names.parameters.items())}
        self._prepared: set[int] = set()
        check_held(self._optimizers, self.scopes)
        check_can_grow(configuration.method, self.scopes)
        check_can_restart(configuration.method, self._optimizers, self._parameters())
        configuration.budget.check_overrides([scope.name for scope in self.scopes])
        self._shrinking = self._shrinking_of(found, model, wraps_again)
        self._bind(model)
        self.scoring.check()
        mine = {id(param) for param in self._parameters()}
        self._replaced = Replaced(model, {name: p for name, p in names.parameters.items() if id(p) in mine})
        self._handles = [optimizer.register_step_post_hook(self._after_step) for optimizer in self._optimizers]
        self._handles += [optimizer.register_step_pre_hook(self._before_step) for optimizer in self._optimizers]
        note_attached(self)

    def _masked_scope(self, attachment: Attachment, left: LiveScope | None = None) -> MaskedScope:
        # Compensation reads the weights of pruned blocks, which N:M groups zero as they are chosen.
        if self.configuration.compensation is not None or left is not None:
            return MaskedScope(attachment, left)
        return masked_scope(attachment, self.configuration.criterion, self.configuration.method)

    def _shrinking_of(self, found: Sequence[Attachment], model: nn.Module, wraps_again: bool) -> Shrinking | None:
        shrink = self.configuration.shrink
        if shrink is not None:
            check_processes(wraps_again)
        made = None if shrink is None else Shrinking(shrink, found, model, self._optimizers)
        check_others(self._parameters(), [] if made is None else made.parameters())
        return made

    def _bind(self, model: nn.Module) -> None:
        """Build what depends on where the weights of the scopes are."""
        together = decides_apart(self.configuration.method)
        self._buffer = MaskBuffer(masked_stacks(self.scopes, together), self.scopes[0].device)
        self._weights = HeldWeights(self.scopes, self._buffer, self._optimizers)
        self._budget = BudgetSplit(self.configuration, self.scopes, self._buffer.stacks)
        self._grown = GrownBlocks(self.scopes, self.configuration.seed)
        self.scoring = Scoring(self.configuration, self.scopes, model, self._optimizers, self._names)
        self._others = OtherSteps(self.scopes)
        self._considered: Tensor | None = None

    def close(self) -> None:
        """Remove the hooks from the model and its optimizers, and put removed units back."""
        note_closed(self)
        for handle in self._handles:
            handle.remove()
        self.scoring.close()
        self._others.at_end()
        if self._shrinking is not None:
            self._shrinking.put_back()

    def _parameters(self) -> list[Tensor]:
        return [param for scope in self.scopes for param in scope.parameters()]

    def _live_masks(self) -> dict[str, Tensor]:
        return {name: mask for scope in self.scopes for name, mask in scope.live_masks.items()}

    def masks(self) -> dict[str, Tensor]:
        """Return the mask of each grid of blocks, by name."""
        return {name: mask for scope in self.scopes for name, mask in scope.masks.items()}

    @property
    def stacks(self) -> list[MaskedStack]:
        """All scopes, those that a method decides on together in one stack."""
        return self._buffer.stacks

    def sparsity(self, pattern: str | None = None) -> float:
        """Return the fraction of weights in the blocks of a pattern, or of all, that are zero or removed."""
        self._replaced.check()
        scopes = [scope for scope in self.scopes if pattern in (None, scope.pattern)]
        for scope in scopes:
            scope.check_has_values()
        zero, weights = count_pruned(pair for scope in scopes for pair in scope.zero_grids())
        return zero / weights if weights else 0.0

    def final_sparsities(self) -> dict[str, str]:
        """Return the final sparsity of each scope as text; "shared" where scores split one target over several."""
        return self._budget.final_sparsities()

    def update(self, optimizer: Optimizer | None) -> None:
        """Update the masks where the schedule has an update; None means all optimizers."""
        members = self._weights.members
        chosen = members.chosen(optimizer)
        if members.leader() in chosen:
            is_due = self.position.is_due()
            self._look_for_others(is_due)
            self._follow_schedule(is_due)
        self._prepared.update(map(id, chosen))

    def _follow_schedule(self, is_due: bool) -> None:
        """Make the update of this step, if one is due; otherwise observe it, if a criterion does."""
        at = self.position
        if is_due:
            self.update_now()
        elif at.is_observed(self.scoring.observation):
            self._start_observation()
            self.scoring.observe(at.step, at.target, self._live_masks() if self._buffer.is_held else {})

    def mask_gradients(self, optimizer: Optimizer | None) -> None:
        """Zero the pruned blocks of the gradients that an optimizer, or all of them, will read."""
        self._weights.mask_gradients(optimizer)

    def hold(self) -> None:
        """Zero all pruned blocks in the weights."""
        self._weights.hold()
        self.zero_removed()

    def zero_removed(self) -> None:
        """Zero what was loaded into removed units."""
        if self._shrinking is not None:
            self._shrinking.zero_removed()

    def mask_copy(self, module: nn.Module) -> None:
        """Zero all pruned blocks in a copy of the model."""
        if self.is_shrunk:
            raise PatternError(
                f"{type(module).__name__} is a copy of the whole model, from which units are removed while it trains: "
                "use no shrink where averages of the weights are kept"
            )
        self._weights.mask_copy(module, self._names)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._grown.before_step()
        if id(optimizer) in self._prepared or optimizer is not self._weights.members.leader():
            return
        if not (self._starts_dense and is_rehearsal(optimizer)):
            self._look_for_others(self.position.is_due())

    def _look_for_others(self, is_due: bool) -> None:
        # Not when it is attached: the state of a run that is resumed may be loaded after that.
        if self._starts_dense and not self._buffer.is_pruned:
            warn_of_zeros(self.scopes)
        self._starts_dense = False
        self._others.before_step()
        if is_due and self._buffer.is_pruned:
            self._others.before_update()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        is_prepared, leads = id(optimizer) in self._prepared, optimizer is self._weights.members.leader()
        if not is_prepared and is_rehearsal(optimizer):
            return
        self._grown.after_step(optimizer)
        if leads and not is_prepared:
            self._follow_schedule(self.position.is_due())
        self._prepared.discard(id(optimizer))
        for scope in self._weights.members.of(optimizer)[0] if self._acts_after_steps else []:
            self.configuration.method.after_step(scope.scope, scope.memory)
        self._weights.hold_of(optimizer)
        self.zero_removed()
        if leads:
            self._replaced.check()
            at = self.position
            at.step += 1
            self._others.reset()
            self.scoring.at_step(at.step, at.is_owed)
            if at.step == at.end + 1 and not at.is_owed:
                self.scoring.forget_state()  # so that checkpoints do not hold a value for each block from here on
            self._shrink()

    @property
    def is_shrunk(self) -> bool:
        """Whether units are removed from the model now."""
        return self._shrinking is not None and self._shrinking.is_shrunk

    def shrinking_parameters(self) -> list[Tensor]:
        """Return the parameters that may get smaller."""
        return [] if self._shrinking is None else self._shrinking.parameters()

    @property
    def resizes(self) -> int:
        """How often parameters have got another size."""
        return 0 if self._shrinking is None else self._shrinking.count

    def _shrink(self) -> None:
        """Remove the units that new masks prune, if they are enough."""
        shrinking, flat = self._shrinking, self._buffer.flat
        if shrinking is None or self._considered is flat:
            return
        self._considered = flat
        if shrinking.pays(self.masks(), is_last=self.position.is_past_end):
            self._resize(lambda: shrinking.remove(self.masks()))

    def put_back(self) -> None:
        """Put removed units back into the model, with weights of zero."""
        if self._shrinking is not None and self.is_shrunk:
            self._resize(self._shrinking.put_back)

    def _resize(self, change: Callable[[], None]) -> None:
        """Change the sizes of parameters, and build what depends on them again; inputs are observed anew."""
        assert self._shrinking is not None, "no other sizes change"
        masks, memory, flows = self.masks(), {s.name: s.memory for s in self.scopes}, self.scoring.flow_state()
        self.scoring.close()
        change()
        self.scopes = [self._masked_scope(each, left) for each, left in self._shrinking.laid()]
        self._bind(self._shrinking.model)
        self._buffer.replace(self._buffer.from_names(masks))
        for scope in self.scopes:
            scope.memory = memory[scope.name]
        self.scoring.load_flow_state(flows)
        self.scoring.at_step(self.position.step, self.position.is_owed)
        self._considered = self._buffer.flat

    def _start_observation(self) -> None:
        """Forget the state of steps that are too long ago, before this step is observed or has an update."""
        if self.position.start_observation(self.scoring.observation):
            self.scoring.forget_state()

    def update_now(self) -> None:
        """Make one update at this step; it is postponed to the next step where scores cannot be computed."""
        for scope in self.scopes:
            scope.check_has_values()
        self._replaced.check()
        self._adapters.check()
        scores = self._score()
        if scores is not None:
            contexts = self._split_budget(scores)
            chosen = self._choose(contexts, scores)
            masks = agree(chosen)
            changed = self._apply(contexts, masks)
            self._record(changed)

    def finish(self) -> str | None:
        """Make the last update of the schedule if it is due now; return by how much the final target is missed."""
        self._adapters.check()
        if self.position.step >= self.position.end and self.position.is_due():
            self.update_now()
        return self.position.shortfall()

    def _score(self) -> Scores | None:
        """Score all blocks; None where that is not possible now, and an update is owed."""
        self._start_observation()
        at, scores = self.position, None
        try:
            scores = self.scoring.score(at.step, at.target, self._live_masks())
        except UnseenInputsError as error:  # a layer that no step calls has had no update either
            if at.last_update == NEVER:
                raise
            warn_postponed(f"scores cannot be computed ({error})", at.step)
        self.position.is_owed = scores is None
        is_first = self.position.starts_at_final and not self._buffer.is_pruned  # of weights that are not trained yet
        return self.scoring.first_mask(scores) if scores is not None and is_first else scores

    def _split_budget(self, scores: Scores) -> list[UpdateContext]:
        """Return for each stack what the method decides on: its scores, and how many blocks its scopes keep."""
        return self._budget.contexts(scores, self._buffer.gathered(self._buffer.flat), self.position.step)

    def _choose(self, contexts: Sequence[UpdateContext], scores: Scores) -> Tensor:
        """Return the masks that all scopes would have, flat."""
        method, pairs = self.configuration.method, zip(self.stacks, contexts, strict=True)
        return self._buffer.joined([stack.choose(method, context, scores.later) for stack, context in pairs])

    def _apply(self, contexts: Sequence[UpdateContext], masks: Tensor) -> int:
        """Set new masks in all scopes; return how many blocks changed."""
        before, method = self._buffer.flat, self.configuration.method
        pairs = zip(self.stacks, contexts, self._buffer.gathered(masks), strict=True)
        memories = [stack.checked(method.remember(context, mask), method) for stack, context, mask in pairs]
        if self._shrinking is not None and (before & ~masks).any():
            self._shrinking.check_stay_pruned(self._buffer.views(masks))
        if self.scoring.compensates and (masks & ~before).any():
            self.scoring.compensate(self._buffer.live_views(self._buffer.live_of(masks)))
        self._buffer.replace(masks)
        changed = before ^ masks
        self._weights.start_at_zero(changed)  # those that are pruned, and those that grow
        for stack, context, memory in zip(self.stacks, contexts, memories, strict=True):
            method.change(context, memory)
            stack.memory = memory
        if method.growth is not None:
            grown, kept = before & ~masks, ~(before | masks)
            self._grown.restart(self._buffer.views(grown), self._buffer.views(kept), self.position.step)
        return int(changed.count_nonzero())

    def _record(self, changed: int, target: float | None = None) -> None:
        """Note the update, and start new input norms."""
        self.scoring.reset_inputs(stay=self.position.is_followed())
        self.position.record(changed / max(1, sum(s.scope.numblk() for s in self.scopes)), target)

    def take_up(self, masks: Mapping[str, Tensor], sparsity: float) -> None:
        """Prune the blocks of masks that were chosen outside of this engine, as an update at this step.

        An update that is due now is made by it, or at the next step if the schedule has a higher target.

        Args:
            masks: for some of the blocks, by name; other masks stay.
            sparsity: the level that they were chosen at.
        """
        self.position.is_owed = self.position.is_due() and sparsity < self.position.target - 1e-9
        self._starts_dense = False
        changed = self._buffer.flat ^ (new := self._buffer.from_names({**self.masks(), **masks}))
        self._buffer.replace(new)
        self._weights.start_at_zero(changed)
        self._others.reset()
        self._record(int(changed.count_nonzero()), sparsity)

    def seek(self, step: int) -> None:
        """Move to a step of the schedule; updates that are skipped become one."""
        self.position.seek(step)
        self._others.reset()
        self.scoring.at_step(step, self.position.is_owed)

    def start_with(self, masks: Mapping[str, Tensor]) -> None:
        """Prune the blocks of masks, by name, before the first update."""
        self._starts_dense = False
        self._buffer.replace(self._buffer.from_names(masks))
        self.hold()

    def state_dict(self) -> dict[str, Any]:
        """Return masks, state of the flows, and the position in the schedule: tensors and numbers only."""
        return {
            "criterion": type(self.configuration.criterion).__name__,
            "method": type(self.configuration.method).__name__,
            **self.position.state_dict(),
            "grown": packed.pack_all(self._grown.grids()),
            "masks": packed.pack_all(self.masks()),
            "removed": packed.pack_all({} if self._shrinking is None else self._shrinking.state_dict()),
            "memory": {scope.name: scope.memory.cpu() for scope in self.scopes if scope.memory is not None},
            **self.scoring.state_dict(self._names),
        }

    def close_alone(self) -> dict[str, Any]:
        """Close, and return the state without communication: other ranks may not be able to answer."""
        self.close()
        if has_others():
            self.scoring.forget_inputs()
        return self.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, and apply the masks."""
        check_state(state, self.configuration.method)
        grids = {name: block.grid_shape for scope in self.scopes for name, block in scope.blocks.items()}
        masks = packed.unpack_all(state["masks"], grids)
        is_same = self._load_removed(state, masks)
        self.scoring.load_flow_state(state)
        if is_same:
            self.scoring.load_inputs(state, self._names)
        if not is_same or self._is_smaller_next(masks):
            warn_of_inputs(state)
        self._starts_dense = False
        self._buffer.replace(self._buffer.from_names(masks))
        for scope in self.scopes:
            memory = state["memory"].get(scope.name)
            scope.memory = None if memory is None else memory.to(scope.device)
        self.position.load_state_dict(state)
        self._grown.load(state.get("grown", {}))  # a checkpoint of 0.1.0 has none
        self.scoring.at_step(self.position.step, self.position.is_owed)
        self.hold()
        self._others = OtherSteps(self.scopes)  # what was loaded is no step

    def _is_smaller_next(self, masks: Mapping[str, Tensor]) -> bool:
        """Whether units are removed after the next step, because a run without `shrink` has left them."""
        return self._shrinking is not None and self._shrinking.pays(masks, self.position.is_past_end)

    def _load_removed(self, state: Mapping[str, Any], masks: Mapping[str, Tensor]) -> bool:
        """Remove the units that a state says; return whether the inputs of layers are those of its model."""
        saved, shrinking = state.get("removed", {}), self._shrinking
        if shrinking is None:
            return not saved
        removed = packed.unpack_all(saved, {name: masks[name].shape for name in saved if name in masks})
        if removed or self.is_shrunk:
            self._resize(lambda: shrinking.load(removed, masks))
        return True
