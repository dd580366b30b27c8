"""BudgetSplit: how many blocks each scope keeps at an update, by the schedule, the budget and the scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from sparse_lightning.budgets import Budget, ScoredScope
from sparse_lightning.engine.configuration import ResolvedConfiguration
from sparse_lightning.engine.masked_scope import MaskedScope
from sparse_lightning.engine.masked_stack import MaskedStack
from sparse_lightning.engine.regrowth import with_random_ties
from sparse_lightning.engine.scoring import Scores
from sparse_lightning.methods import UpdateContext


class BudgetSplit:
    """Splits the targets of a schedule over scopes.

    Args:
        configuration: with the schedule, the budget and the method.
        scopes: in the order in which patterns found them.
        stacks: the same scopes, those that the method decides on together in one stack.
    """

    def __init__(
        self, configuration: ResolvedConfiguration, scopes: Sequence[MaskedScope], stacks: Sequence[MaskedStack]
    ) -> None:
        self._configuration, self._scopes, self._stacks = configuration, scopes, stacks
        self._schedule, self._budget = configuration.schedule, configuration.budget

    def contexts(self, scores: Scores, masks: Sequence[Tensor], step: int) -> list[UpdateContext]:
        """Return for each stack what the method decides on.

        Args:
            scores: of all scopes.
            masks: of each stack before the update, gathered by scope.
            step: the optimizer step.
        """
        exponent, stacks = scores.size_exponent, self._stacks
        growth = with_random_ties(scores.growth, self._scopes, self._configuration.seed, step)
        pairs = zip(stacks, masks, strict=True)
        ranked = [stack.ranked(scores.criterion, exponent, self._budget, mask) for stack, mask in pairs]
        scored = self._scored(ranked, exponent)
        keeps = [self._split(scored, target) for target in self._targets_ahead(step)]
        begin, end = self._schedule.span
        return [
            UpdateContext(
                scope=stack.scope,
                scores=stack.unscored() if own is None else own,
                mask=mask,
                keeps=[stack.stacked([kept[scope.name] for scope in stack.scopes]) for kept in keeps],
                growth=stack.growth(growth),
                memory=stack.memory,
                target=self._schedule(step),
                progress=min(1.0, max(0, step - begin) / max(1, end - begin)),
                every=self._configuration.update_every,
            )
            for stack, mask, own in zip(stacks, masks, ranked, strict=True)
        ]

    def _scored(self, ranked: Sequence[Tensor | None], exponent: float) -> dict[str, ScoredScope]:
        """Return the scopes as the budget compares them, in the order in which patterns found them."""
        own: dict[str, Tensor] = {}
        for stack, scores in zip(self._stacks, ranked, strict=True):
            if scores is not None:
                own |= zip([scope.name for scope in stack.scopes], stack.apart(scores), strict=True)
        return {
            s.name: ScoredScope(s.name, s.scope, own[s.name], s.final, exponent) if s.name in own else s.unscored()
            for s in self._scopes
        }

    def _split(self, scored: Mapping[str, ScoredScope], target: float) -> dict[str, Tensor]:
        """Return how many blocks each scope keeps at a target, by name."""
        kept = self._budget.split(list(scored.values()), target, self._schedule.final)
        return dict(zip(scored, kept, strict=True))

    def _targets_ahead(self, step: int) -> Iterable[float]:
        """Yield the target of this update, and of the following ones as far as the method looks ahead."""
        end = max(step, self._schedule.span[1])
        for i in range(self._configuration.method.ahead + 1):
            yield self._schedule(min(end, step + i * self._configuration.update_every))

    def final_sparsities(self) -> dict[str, str]:
        """Return the final sparsity of each scope as text; "shared" where scores split one target over several."""
        budget, final = self._budget, self._schedule.final
        scored = [scope.unscored() for scope in self._scopes]
        texts = {s.name: f"{final:.4g} shared" for s in scored if budget.own(s) is None}
        apart = [s for s in scored if budget.own(s) is not None or not budget.compares]
        rounded, exact = (_sparsities(b, apart, final) for b in (budget, replace(budget, multiple_of=1)))
        for s, own, wanted in zip(apart, rounded, exact, strict=True):
            texts[s.name] = own if own == wanted else f"{own} ({wanted} rounded)"
        return texts


def _sparsities(budget: Budget, scopes: Sequence[ScoredScope], final: float) -> list[str]:
    keeps = budget.split(scopes, final, final) if scopes else []
    pairs = zip(scopes, keeps, strict=True)
    return [f"{1 - float(keep.double().mean()) / s.scope.numblk_per_scope():.4g}" for s, keep in pairs]
