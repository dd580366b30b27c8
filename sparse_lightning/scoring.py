"""Scoring: what an update goes by. The criterion, what lets blocks grow, and the inputs that both read."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparse_lightning.attached import Attached
from sparse_lightning.distributed import agreed, any_rank
from sparse_lightning.errors import CheckpointError, FlowError, ScoreWarning
from sparse_lightning.flow import Criterion, Proposal, Scorer, Sources
from sparse_lightning.groups import groups_of
from sparse_lightning.input_norms import TrainingInputNorms
from sparse_lightning.settings import Settings


class Scoring:
    """The scores of what is attached, on all ranks or on none; N:M groups score themselves when they are chosen.

    Args:
        settings: with the criterion and the method.
        attached: what is scored.
        model: whose inputs are watched, where scores read them.
        optimizers: whose state scores may read.
    """

    def __init__(
        self, settings: Settings, attached: Sequence[Attached], model: nn.Module, optimizers: Sequence[Optimizer]
    ) -> None:
        self._settings, self._attached, self._optimizers = settings, attached, optimizers
        self._device = attached[0].device
        found = [groups_of(a, settings.criterion, settings.method) for a in attached]
        self.groups = {groups.attached.name: groups for groups in found if groups is not None}
        self._scored = [a for a in attached if a.name not in self.groups]
        growth = settings.method.growth
        self._scorer = self._scorer_of(settings.criterion, settings.seed)
        self._growth = self._scorer_of(growth, settings.seed + 1) if growth else None
        self._names = {name for scorer in self._scorers() for name in scorer.program.names()}
        self._check_gradients()
        self._norms = TrainingInputNorms(model, self._parameters()) if "input_norm" in self._names else None
        try:
            self._scorer.check(self.sources(0, 0.0))
        except FlowError:
            self.close()
            raise

    def _scorer_of(self, criterion: Criterion, seed: int) -> Scorer:
        scorer = Scorer(criterion, self._device, self._settings.lowering, seed)
        for a in self._scored:
            scorer.attach(a.name, a.scope)
        return scorer

    def _scorers(self) -> list[Scorer]:
        return [scorer for scorer in (self._scorer, self._growth) if scorer]

    def _parameters(self) -> list[Tensor]:
        return [param for a in self._attached for param in a.parameters()]

    def _check_gradients(self) -> None:
        frozen = [a.name for a in self._attached for p in a.parameters() if not p.requires_grad]
        if "grad" in self._names and frozen:
            criterion, method = type(self._settings.criterion).__name__, type(self._settings.method).__name__
            raise FlowError(
                f"{criterion} with {method} needs gradients, and {frozen[0]} is frozen: leave it out of the patterns, "
                "or choose a criterion and a method that read weights alone"
            )

    def close(self) -> None:
        """Take the hooks off the model."""
        if self._norms is not None:
            self._norms.close()

    def forget_inputs(self) -> None:
        """Close, and keep nothing of what this rank alone has seen."""
        self.close()
        self._norms = None

    def begin_anew(self) -> None:
        """After an update: norms of inputs are those since the last one."""
        if self._norms is not None:
            self._norms.reset()

    def sources(self, step: int, target: float) -> Sources:
        """What scores read at a step."""
        norms = {} if self._norms is None else self._norms
        return Sources(self._optimizers, norms, step=step, target=target)

    def scores(
        self, sources: Sources, masks: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        """What the criterion says, and what the growth does: scores of attachments by name, gathered by scope.

        None where there are none to go by, on any rank, with a warning. Nothing has changed then.

        Args:
            sources: what they read.
            masks: those that all ranks are to hold, by name of their block.
        """
        without = [a.name for a in self._attached for p in a.parameters() if p.grad is None]
        if "grad" in self._names and any_rank(bool(without), self._device):
            _postpone(without, "have no gradient", sources.step)
            return None
        proposals = [scorer.propose(sources) for scorer in self._scorers()]
        broken = [name for proposal in proposals for name in self._broken(proposal)]
        broken += [name for name, groups in self.groups.items() if not groups.is_finite(sources)]
        if agreed(masks, bool(broken)):
            _postpone(broken, "have scores that are not finite", sources.step)
            return None
        for scorer, proposal in zip(self._scorers(), proposals, strict=True):
            scorer.commit(proposal)
        by_criterion, *by_growth = [{a.name: a.scope.gather(p.scores) for a in self._scored} for p in proposals]
        return by_criterion, by_growth[0] if by_growth else {}

    def _broken(self, proposal: Proposal) -> list[str]:
        """The blocks whose scores are not numbers; the device is waited for once."""
        blocks = {name: block for a in self._scored for name, block in a.blocks.items()}
        finite = [proposal.scores[block].isfinite().all() for block in blocks.values()]
        right = torch.stack(finite).tolist() if finite else []
        return [name for name, is_right in zip(blocks, right, strict=True) if not is_right]

    def state_dict(self, names: Mapping[int, str]) -> dict[str, Any]:
        """State of the flows, and the inputs since the last update.

        Args:
            names: of parameters, by their id.
        """
        norms = {} if self._norms is None else self._norms.total_squares()
        return {
            "scorer": self._scorer.state_dict(),
            "growth": self._growth.state_dict() if self._growth else None,
            "input_norms": {names[id(weight)]: squares.cpu() for weight, squares in norms.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], names: Mapping[int, str]) -> None:
        """Take up what `state_dict` gave."""
        if (state["growth"] is None) != (self._growth is None):
            raise CheckpointError(
                f"the checkpoint was not saved by {type(self._settings.method).__name__}: only one of the two lets "
                "blocks grow. Resume with the method it was saved with"
            )
        self._scorer.load_state_dict(state["scorer"])
        if self._growth:
            self._growth.load_state_dict(state["growth"])
        if self._norms is not None:
            by_name = {names[id(p)]: p for p in self._parameters()}
            self._norms.take_up({by_name[n]: s.to(by_name[n].device) for n, s in state["input_norms"].items()})


def _postpone(names: list[str], why: str, step: int) -> None:
    who = ", ".join(dict.fromkeys(names)) or "parameters on another rank"
    warnings.warn(
        f"{who} {why} at step {step}: the masks stay as they are, and the update is tried again at the next step",
        ScoreWarning,
        stacklevel=2,
    )
