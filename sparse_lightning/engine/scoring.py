"""Scoring: the scores of one update, from the criterion and from the growth criterion of the method."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from sparse_lightning.blocks.shards import any_rank
from sparse_lightning.engine.compensating import Compensating
from sparse_lightning.engine.configuration import ResolvedConfiguration
from sparse_lightning.engine.masked_scope import MaskedScope
from sparse_lightning.engine.near_updates import NearUpdates
from sparse_lightning.engine.observation import Observation
from sparse_lightning.engine.ranks import check_masks
from sparse_lightning.errors import CheckpointError, FlowError, ScoreWarning
from sparse_lightning.flow import Criterion, Proposal, Scorer, Sources
from sparse_lightning.flow.finite import all_finite
from sparse_lightning.flow.input_norms import TrainingInputNorms
from sparse_lightning.flow.inputs import OPTIMIZER

OBSERVED = 16
"""The optimizer steps before an update whose inputs are observed: older ones are those of other weights."""


@dataclass(frozen=True)
class Scores:
    """The scores of one update.

    Attributes:
        criterion: for each scored scope, by name, gathered by scope.
        growth: the same by the growth criterion of the method; empty without one.
        size_exponent: of the criterion.
        sources: the inputs that scores were computed from.
        later: for each scope, by name, the tensors that it is scored by when it is chosen; none if it is scored here.
    """

    criterion: dict[str, Tensor]
    growth: dict[str, Tensor]
    size_exponent: float
    sources: Sources
    later: dict[str, list[Tensor]]


class Scoring:
    """Scores the attached scopes, on all ranks or on none. It owns the inputs that scores are computed from.

    Args:
        configuration: with the criterion and the method.
        scopes: what is scored.
        model: whose layer inputs are observed, where scores need their norms.
        optimizers: whose state scores may read.
        names: of parameters, by their id.
    """

    def __init__(
        self,
        configuration: ResolvedConfiguration,
        scopes: Sequence[MaskedScope],
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        names: Mapping[int, str],
    ) -> None:
        self._configuration, self._scopes, self._optimizers = configuration, scopes, optimizers
        self._device = scopes[0].device
        growth, seed = configuration.method.growth, configuration.seed
        self._scorer = self._scorer_of(configuration.criterion, seed)
        self._growth = self._scorer_of(growth, seed + 1) if growth else None
        first = configuration.method.first
        self._first = self._scorer_of(first, seed + 2) if first else None
        used = [*self._scorers(), *([self._first] if self._first else [])]
        self._names = {name for scorer in used for name in scorer.program.names}
        self._in_turn = 0
        self._check_gradients()
        self.observation = self._observation()
        needs_grams = configuration.compensation is not None or "removal_error" in self._names
        self._compensating = Compensating(configuration.compensation, scopes, model, names) if needs_grams else None
        self._norms = TrainingInputNorms(model, self._parameters()) if "input_norm" in self._names else None
        self._near = NearUpdates(configuration, OBSERVED)
        self.at_step(0, is_owed=False)

    def check(self) -> None:
        """Raise a FlowError, and remove the hooks, if an input of the criterion would be missing."""
        try:
            self._scorer.check(self._sources(0, 0.0, {}))
        except FlowError:
            self.close()
            raise

    def _scorer_of(self, criterion: Criterion, seed: int) -> Scorer:
        scorer = Scorer(criterion, self._device, self._configuration.lowering, seed)
        for scope in self._scopes:
            if scope.is_scored:
                scorer.attach(scope.name, scope.scope, scope.left)
        return scorer

    def _scorers(self) -> list[Scorer]:
        return [scorer for scorer in (self._scorer, self._growth) if scorer]

    def _parameters(self) -> list[Tensor]:
        return [param for scope in self._scopes for param in scope.parameters()]

    def _check_gradients(self) -> None:
        frozen = [scope.name for scope in self._scopes for p in scope.parameters() if not p.requires_grad]
        if "grad" in self._names and frozen:
            criterion, method = type(self._configuration.criterion).__name__, type(self._configuration.method).__name__
            raise FlowError(
                f"{criterion} with {method} needs gradients, but {frozen[0]} is frozen: exclude it from the patterns, "
                "or choose a criterion and a method that read only the weights"
            )

    def _observation(self) -> Observation | None:
        """Return the steps that are observed; None for updates only."""
        keeping = [scorer.criterion for scorer in self._scorers() if scorer.criterion.states]
        is_passed = self._configuration.observe_every is not None
        return Observation(self._configuration, keeping) if keeping and (is_passed or "grad" in self._names) else None

    def observe(self, step: int, target: float, masks: Mapping[str, Tensor]) -> None:
        """Run the flows that keep state, without a decision; a step without gradients is passed over.

        Args:
            step: the optimizer step.
            target: the target sparsity.
            masks: by name of their block; empty if nothing is pruned.
        """
        missing = any(p.grad is None for scope in self._scopes for p in scope.parameters())
        if not ("grad" in self._names and missing) and not self._waits_for_state():
            for scorer in self._scorers():
                scorer.observe(self._sources(step, target, masks))

    def _waits_for_state(self) -> bool:
        """Whether scores read the state of optimizers, and one with attached parameters has not made a step yet."""
        if not any(name.startswith(OPTIMIZER) for name in self._names):
            return False
        return any(not o.state and _holds_any(o, self._parameters()) for o in self._optimizers)

    def _check_not_in_turn(self) -> None:
        """Raise a FlowError where one optimizer has gradients and another none, at two updates in a row."""
        params = self._parameters()
        mine = [[p for p in params if _holds_any(o, [p])] for o in self._optimizers]
        has = {all(p.grad is not None for p in own) for own in mine if own}
        empty = {all(p.grad is None for p in own) for own in mine if own}
        self._in_turn = self._in_turn + 1 if True in has and True in empty else 0
        if self._in_turn > 1:
            raise FlowError(
                f"{type(self._configuration.criterion).__name__} needs the gradients of all attached parameters at "
                f"once, and {len(self._optimizers)} optimizers, with zero_grad in turn as in a GAN, never do. "
                "Use one SparsityCallback or Sparsifier for the parameters of each optimizer, or a criterion and a "
                "method that read only the weights"
            )

    def close(self) -> None:
        """Remove the hooks from the model."""
        for observer in self._observers():
            observer.close()

    def forget_inputs(self) -> None:
        """Close, and drop the input norms that only this rank has observed."""
        self.close()
        self._norms = self._compensating = None

    def reset_inputs(self, stay: bool) -> None:
        """Start new input norms: those of an update cover the steps since the previous one.

        Args:
            stay: until the next input is observed, for an update that is made before it, as at the end of a run.
        """
        for observer in self._observers():
            if stay:
                observer.end()
            else:
                observer.reset()

    def _observers(self) -> list[TrainingInputNorms | Compensating]:
        return [each for each in (self._norms, self._compensating) if each is not None]

    def at_step(self, step: int, is_owed: bool) -> None:
        """Observe the inputs of layers before this step, if an update is near.

        Norms are observed now and then at other steps, for updates that no schedule announces.

        Args:
            step: the optimizer step.
            is_owed: whether an update is made at it, whatever the schedule says.
        """
        if self._compensating is None and self._norms is None:
            return
        is_near = is_owed or self._near.includes(step)
        if self._compensating is not None:
            self._compensating.observe(is_near)
        if self._norms is not None:
            self._norms.is_observing = is_near or step % OBSERVED == 0

    @property
    def compensates(self) -> bool:
        """Whether kept weights may be changed before others are pruned."""
        return self._compensating is not None

    def compensate(self, masks: Mapping[str, Tensor]) -> None:
        """Change the weights that new masks keep, before the blocks that they prune are zeroed.

        Args:
            masks: by name of their block, the same on all ranks.
        """
        if self._compensating is not None:
            self._compensating.before_pruning(masks)

    def _sources(self, step: int, target: float, masks: Mapping[str, Tensor]) -> Sources:
        norms = {} if self._norms is None else self._norms
        errors = None if self._compensating is None else self._compensating.removal_error
        return Sources(self._optimizers, norms, step=step, target=target, removal_error=errors, pruned=masks)

    def score(self, step: int, target: float, masks: Mapping[str, Tensor]) -> Scores | None:
        """Compute the scores of an update and save the state of the flows.

        Args:
            step: the optimizer step.
            target: the target sparsity.
            masks: by name of their block; all ranks must hold the same.

        Returns:
            None, with a warning, where gradients are missing or scores are not finite on any rank, and without one
            where scores read the state of an optimizer that has not made its first step. Nothing is saved then.

        Raises:
            FlowError: where gradients of several optimizers are never there at the same time.
        """
        without = [scope.name for scope in self._scopes for p in scope.parameters() if p.grad is None]
        if "grad" in self._names and any_rank(bool(without), self._device):
            self._check_not_in_turn()
            _warn_postponed(without, "have no gradient", step)
            return None
        self._in_turn = 0
        if self._waits_for_state():
            return None
        if self._forgets(self._compensating):
            _warn_postponed([scope.name for scope in self._scopes], "have layers with inputs that are not finite", step)
            return None
        sources = self._sources(step, target, masks)
        proposals = [scorer.propose(sources) for scorer in self._scorers()]
        broken = [name for proposal in proposals for name in self._not_finite(proposal)]
        # Read once: input norms are summed over ranks.
        later = {scope.name: scope.scored_later(sources) for scope in self._scopes}
        broken += _not_finite_in(later)
        if check_masks(masks, bool(broken)):
            self._forgets(self._norms)
            _warn_postponed(broken, "have scores that are not finite", step)
            return None
        for scorer, proposal in zip(self._scorers(), proposals, strict=True):
            scorer.commit(proposal)
        by_criterion, *by_growth = [proposal.scores for proposal in proposals]
        exponent = self._scorer.criterion.size_exponent
        return Scores(by_criterion, by_growth[0] if by_growth else {}, exponent, sources, later)

    def _forgets(self, observer: Compensating | TrainingInputNorms | None) -> bool:
        """Start anew where the inputs that any rank has observed are not finite, and would stay so; return whether.

        All ranks must call it.
        """
        if observer is None or not any_rank(not observer.is_finite(), self._device):
            return False
        observer.reset()
        return True

    def first_mask(self, scores: Scores) -> Scores:
        """Return scores by the criterion of the first mask, where the method has one."""
        if self._first is None:
            return scores
        found = self._first.propose(scores.sources).scores
        return replace(scores, criterion=found, size_exponent=self._first.criterion.size_exponent)

    def _not_finite(self, proposal: Proposal) -> list[str]:
        """Return the names of blocks with scores that are not finite, with one device synchronisation if all are."""
        if not proposal.scores or all_finite([proposal.values]):
            return []
        scored = [scope for scope in self._scopes if scope.name in proposal.scores]
        named = [scope.named(~proposal.scores[scope.name].isfinite()) for scope in scored]
        return [name for grids in named for name, grid in grids.items() if grid.any()]

    def forget_state(self) -> None:
        """Set the state of the flows to its fill value."""
        for scorer in self._scorers():
            scorer.forget()

    def flow_state(self) -> dict[str, Any]:
        """Return the state of the flows."""
        return {
            "scorer": self._scorer.state_dict(),
            "growth": self._growth.state_dict() if self._growth else None,
        }

    def state_dict(self, names: Mapping[int, str]) -> dict[str, Any]:
        """Return the state of the flows, and the input norms since the last update.

        Args:
            names: of parameters, by their id.
        """
        norms = {} if self._norms is None else self._norms.total_squares()
        return {
            **self.flow_state(),
            "inputs_ended": any(observer.is_ended for observer in self._observers()),
            "input_norms": {names[id(weight)]: squares.cpu() for weight, squares in norms.items()},
            **({} if self._compensating is None else {"gram_matrices": self._compensating.state_dict()}),
        }

    def load_flow_state(self, state: Mapping[str, Any]) -> None:
        """Load what `flow_state` returned."""
        if (state["growth"] is None) != (self._growth is None):
            method = type(self._configuration.method).__name__
            grows = "grows" if state["growth"] is not None else "does not grow"
            raise CheckpointError(
                f"the checkpoint was saved with a method that {grows} blocks, unlike {method}: resume with the method "
                "that it was saved with"
            )
        criterion = self._scorer.criterion
        if set(criterion.states) - set(state["scorer"]["fields"]):
            raise CheckpointError(
                f"the checkpoint has no state of {type(criterion).__name__}: it was saved with another criterion, such "
                "as Magnitude(), the default of 0.1.0. Resume with the criterion that it was saved with"
            )
        self._scorer.load_state_dict(state["scorer"])
        if self._growth:
            self._growth.load_state_dict(state["growth"])

    def load_inputs(self, state: Mapping[str, Any], names: Mapping[int, str]) -> None:
        """Load what `state_dict` returned of the inputs of layers.

        Args:
            state: what was returned.
            names: of parameters, by their id.
        """
        if self._compensating is not None:
            self._compensating.load_state_dict(state.get("gram_matrices", {}))
        if self._norms is not None:
            by_name = {names[id(p)]: p for p in self._parameters()}
            unknown = sorted(set(state["input_norms"]) - set(by_name))
            if unknown:
                raise CheckpointError(
                    f"the checkpoint has input norms of {unknown[0]}, which no pattern attaches: resume with the same "
                    "model and patterns"
                )
            self._norms.load_squares({by_name[n]: s.to(by_name[n].device) for n, s in state["input_norms"].items()})
        if state.get("inputs_ended", False):
            self.reset_inputs(stay=True)


def _not_finite_in(named: Mapping[str, Sequence[Tensor]]) -> list[str]:
    """Return the names of tensors that are not finite, with one device synchronisation if all are."""
    if all_finite([tensor for tensors in named.values() for tensor in tensors]):
        return []
    return [name for name, tensors in named.items() if not all_finite(tensors)]


def _holds_any(optimizer: Optimizer, params: Sequence[Tensor]) -> bool:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return any(id(p) in held for p in params)


def _warn_postponed(names: list[str], reason: str, step: int) -> None:
    who = ", ".join(dict.fromkeys(names)) or "parameters on another rank"
    warn_postponed(f"{who} {reason}", step)


def warn_postponed(reason: str, step: int) -> None:
    """Warn that there is no update at a step."""
    warnings.warn(
        f"{reason} at step {step}: the masks stay as they are, and the update is repeated at the next step",
        ScoreWarning,
        stacklevel=2,
    )
