"""Budgets: how a target sparsity is split over the scopes, as the blocks that each of them keeps."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparse_lightning.errors import PatternError, SparsityError
from sparse_lightning.names import matches, nearest
from sparse_lightning.schedule import is_number
from sparse_lightning.scope import SparseScope

SLACK = 1e-9
"""Blocks that may be missing to a whole one: a sparsity of 0.3 of ten blocks prunes three, whatever it rounds to."""


@dataclass(frozen=True, eq=False)
class Contender:
    """A grid of scopes that takes part when a target is split.

    Args:
        name: its plain name, such as "layers.0.up.weight".
        scope: the scopes.
        scores: gathered by scope, `(*scope.grid_shape, blocks per scope)`; −inf goes first.
        final: the sparsity that its pattern fixes, None where the budget decides.
        size_exponent: scores grow like `(weights in a block) ** size_exponent`: 1 for sums, 0.5 for 2-norms, 0 for
            means, maxima and random numbers.
    """

    name: str
    scope: SparseScope
    scores: Tensor
    final: float | None = None
    size_exponent: float = 1.0

    def sizes(self) -> Tensor:
        """How many weights each block has, in the shape of the scores."""
        return self.scope.gather({block: block.block_sizes() for block in self.scope.blocks()}).to(self.scores.device)

    def kept_at(self, sparsity: float) -> Tensor:
        """The blocks kept in each scope at one sparsity for all: `n − floor(sparsity · n + 1e-9)` of n."""
        nnz = self.scope.sparsity_to_nnz(sparsity)
        return torch.full(self.scope.grid_shape, nnz, dtype=torch.int64, device=self.scores.device)


@dataclass(frozen=True)
class Budget(ABC):
    """Splits a target over contenders. A new budget writes `share`, and `rank` where it compares scores its own way.

    Args:
        overrides: a final sparsity for names that match a glob, or a regular expression after `re:`. The first match
            holds, also for a contender whose pattern fixes its sparsity.
    """

    compares: ClassVar[bool] = False
    """Whether the scores of one contender decide on what another one keeps."""

    overrides: Mapping[str, float] = field(default_factory=dict, kw_only=True, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.overrides, Mapping):
            raise SparsityError(f"overrides={self.overrides!r}: give a mapping from names to sparsities")
        object.__setattr__(self, "overrides", dict(self.overrides))
        for pattern, sparsity in self.overrides.items():
            _check_share(f"override {pattern!r}", sparsity)

    @abstractmethod
    def share(self, contenders: Sequence[Contender], target: float) -> list[Tensor]:
        """For each contender the blocks kept in each of its scopes; together they are to reach the target."""

    def rank(self, contender: Contender) -> Tensor:
        """The scores as this budget compares them: what `split` and `select` are to be given."""
        return contender.scores

    def split(self, contenders: Sequence[Contender], target: float, final: float) -> list[Tensor]:
        """For each contender the blocks kept in each of its scopes, int64 of `scope.grid_shape`.

        A contender with a final sparsity o of its own, or by an override, is pruned to `o · target / final` and has
        no part in the rest, which share the target.

        Args:
            contenders: with scores as `rank` gives them; those of pruned blocks may be −inf.
            target: the sparsity asked for now.
            final: the highest that will be asked for.
        """
        _check_share("target", target)
        _check_share("final", final)
        if target > final:
            raise SparsityError(
                f"a target of {target} above the final sparsity, {final}: `final` of a schedule is its highest target"
            )
        self.check_overrides([contender.name for contender in contenders])
        own = [self.own(contender) for contender in contenders]
        rest = [contender for contender, o in zip(contenders, own, strict=True) if o is None]
        shares: Iterator[Tensor] = iter(self.share(rest, target) if rest else [])
        done = target / final if final else 0.0
        return [next(shares) if o is None else c.kept_at(o * done) for c, o in zip(contenders, own, strict=True)]

    def own(self, contender: Contender) -> float | None:
        """The final sparsity of a contender that does not share the target: by an override, or by its pattern."""
        found = (o for pattern, o in self.overrides.items() if matches(pattern, contender.name))
        return next(found, contender.final)

    def check_overrides(self, names: Sequence[str]) -> None:
        """Raise where an override names nothing."""
        for pattern in self.overrides:
            if not any(matches(pattern, name) for name in names):
                raise PatternError(f"the override {pattern!r} matches nothing that is pruned{nearest(pattern, names)}")


@dataclass(frozen=True)
class Uniform(Budget):
    """The same sparsity everywhere: each scope of n blocks keeps `n − floor(target · n + 1e-9)`.

    Args:
        overrides: a final sparsity for some names; see `Budget`.

    Example:
        >>> from sparse_lightning import BlockSpec, ScopeSpec
        >>> scores = torch.rand(1, 1, 10)
        >>> row = Contender("row", ScopeSpec(BlockSpec(torch.ones(1, 10), (1, 1))), scores)
        >>> [int(Uniform().split([row], target, 1.0)[0]) for target in (0.0, 0.09, 0.1, 0.3, 1.0)]
        [10, 10, 9, 7, 0]
    """

    def share(self, contenders: Sequence[Contender], target: float) -> list[Tensor]:
        """The target for each."""
        return [contender.kept_at(target) for contender in contenders]


@dataclass(frozen=True)
class ERK(Budget):
    """Small parameters stay denser (Erdős–Rényi kernel): density `min(1, ε · (Σ shape / Π shape) ** power)`.

    ε is such that all together keep `1 − target` of their weights; the shape is that of the largest parameter. Scopes
    keep whole blocks.

    Args:
        power: how much the shape matters; 0 is `Uniform`.
        overrides: a final sparsity for some names; see `Budget`.

    Example:
        >>> from sparse_lightning import BlockSpec, ScopeSpec
        >>> def contender(rows, columns):
        ...     scope = ScopeSpec(BlockSpec(torch.ones(rows, columns), (1, 1)))
        ...     return Contender(f"{rows}×{columns}", scope, torch.rand(1, 1, rows * columns))
        >>> small, large = contender(4, 4), contender(16, 16)
        >>> for target in (0.0, 0.75, 0.9, 1.0):
        ...     print([int(kept) for kept in ERK().split([small, large], target, 1.0)])
        [16, 256]
        [14, 55]
        [6, 22]
        [0, 0]
    """

    power: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.power) or not 0 <= self.power < math.inf:
            raise SparsityError(f"power={self.power!r} of ERK: give a number from 0 on, such as 1.0")

    def share(self, contenders: Sequence[Contender], target: float) -> list[Tensor]:
        """The density of the formula for each."""
        raw = [self._raw(contender.scope) for contender in contenders]
        densities = scaled_densities(raw, [contender.scope.numel() for contender in contenders], 1 - target)
        return [contender.kept_at(1 - density) for contender, density in zip(contenders, densities, strict=True)]

    def _raw(self, scope: SparseScope) -> float:
        shape = max(scope.parameters(), key=Tensor.numel).shape
        return float((sum(shape) / max(1, shape.numel())) ** self.power)


def scaled_densities(raw: Sequence[float], numels: Sequence[int], density: float) -> list[float]:
    """Densities in the ratio of `raw`, none above 1, that keep a part `density` of all weights.

    Example:
        >>> scaled_densities([4.0, 1.0], [10, 30], 0.5)
        [1.0, 0.3333333333333333]
    """
    dense: set[int] = set()
    while True:
        loose = [i for i in range(len(raw)) if i not in dense]
        room = density * sum(numels) - sum(numels[i] for i in dense)
        weight = sum(raw[i] * numels[i] for i in loose)
        scale = max(0.0, room / weight) if weight else 0.0
        full = {i for i in loose if scale * raw[i] > 1}
        if not full:
            return [1.0 if i in dense else scale * raw[i] for i in range(len(raw))]
        dense |= full


@dataclass(frozen=True)
class Global(Budget):
    """All blocks compete, by `score / size ** size_exponent`: the lowest are pruned until the target is reached.

    That is the longest run of blocks from the lowest score on whose weights do not exceed `target` of all. Of equal
    scores the lower index is kept, and the earlier contender.

    Args:
        floor: the part of its blocks that each scope keeps whatever their scores; at least one block.
        overrides: a final sparsity for some names; see `Budget`.

    Example:
        >>> from sparse_lightning import BlockSpec, ScopeSpec
        >>> def contender(name, scores):
        ...     scope = ScopeSpec(BlockSpec(torch.ones(1, len(scores)), (1, 1)))
        ...     return Contender(name, scope, torch.tensor([[scores]]))
        >>> weak, strong = contender("weak", [0.1, 0.2, 0.3, 0.9]), contender("strong", [1.0, 2.0, 3.0, 4.0])
        >>> for target in (0.0, 0.25, 0.5, 1.0):
        ...     print([int(kept) for kept in Global().split([weak, strong], target, 1.0)])
        [4, 4]
        [2, 4]
        [1, 3]
        [1, 1]
    """

    compares: ClassVar[bool] = True

    floor: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_share("floor", self.floor)

    def rank(self, contender: Contender) -> Tensor:
        """Scores as if all blocks were of one size."""
        return contender.scores / contender.sizes().to(contender.scores.dtype) ** contender.size_exponent

    def share(self, contenders: Sequence[Contender], target: float) -> list[Tensor]:
        """What is left where the lowest blocks of all are pruned."""
        device = contenders[0].scores.device
        scores = torch.cat([c.scores.flatten().to(device) for c in contenders])
        sizes = torch.cat([c.sizes().flatten().to(device) for c in contenders])
        loose = torch.cat([self._loose(c.scores).flatten().to(device) for c in contenders])
        kept = ~_lowest(scores, torch.where(loose, sizes, 0), _limit(sizes, target)) | ~loose
        parts = torch.split(kept, [c.scores.numel() for c in contenders])
        pairs = zip(contenders, parts, strict=True)
        return [part.view(c.scores.shape).sum(-1).to(c.scores.device) for c, part in pairs]

    def _loose(self, scores: Tensor) -> Tensor:
        """Where blocks are not among those that their scope keeps in any case."""
        n = scores.shape[-1]
        protected = max(1, math.ceil(self.floor * n - SLACK))
        places = torch.arange(n, device=scores.device).expand(scores.shape)
        return torch.empty_like(scores, dtype=torch.bool).scatter_(-1, _falling(scores), places >= protected)


@dataclass(frozen=True)
class LAMP(Global):
    """Global, on scores in relation to what is kept of their layer: `s_u² / Σ s_v² over s_v ≥ s_u` (Lee et al., 2021).

    The scores s are those of blocks as `Global` compares them; those below zero stay as they are.

    Args:
        floor: the part of its blocks that each scope keeps whatever their scores; at least one block.
        overrides: a final sparsity for some names; see `Budget`.

    Example:
        >>> from sparse_lightning import BlockSpec, ScopeSpec
        >>> scope = ScopeSpec(BlockSpec(torch.ones(1, 3), (1, 1)))
        >>> LAMP().rank(Contender("row", scope, torch.tensor([[[3.0, 1.0, 2.0]]]))).flatten().tolist()
        [1.0, 0.07142857142857142, 0.3076923076923077]
    """

    def rank(self, contender: Contender) -> Tensor:
        """The formula, within the contender."""
        scores = super().rank(contender)
        # On the CPU: sums on a GPU come in no fixed order, and masks must be the same after a resume.
        s = scores.flatten().cpu().double().nan_to_num(0.0, torch.finfo(torch.float32).max, 0.0).clamp(min=0)
        rising = s.sort().values
        not_lower = rising.square().flip(0).cumsum(0).flip(0)[torch.searchsorted(rising, s)]
        ranked = (s.square() / not_lower).view_as(scores).to(scores.device)
        return torch.where(scores > 0, ranked, scores)


def _limit(sizes: Tensor, target: float) -> int:
    """How many weights may be pruned. It is rounded in blocks: of N equal ones `floor(target · N + 1e-9)` fit."""
    block, total = int(sizes.max()) if len(sizes) else 1, int(sizes.sum())
    return math.floor(Fraction(target * (total / block) + SLACK) * block)


def _lowest(scores: Tensor, sizes: Tensor, limit: int) -> Tensor:
    """Where the longest run of blocks lies, from the lowest score on, whose sizes add up to no more than a limit."""
    rising = _falling(scores).flip(0)
    return torch.empty_like(sizes, dtype=torch.bool).scatter_(0, rising, sizes[rising].cumsum(0) <= limit)


def _falling(scores: Tensor) -> Tensor:
    """Indices from the highest score to the lowest, NaN last, as `SparseScope.select` ranks them."""
    return torch.sort(-scores, dim=-1, stable=True).indices


def _check_share(name: str, value: Any) -> None:
    if not is_number(value) or not 0 <= value <= 1:
        raise SparsityError(f"{name} of {value!r}: it must lie between 0 and 1")
