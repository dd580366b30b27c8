"""Budgets: how a target sparsity is split over the scopes, as the number of blocks that each of them keeps."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparse_lightning.blocks.scope import SparseScope
from sparse_lightning.errors import PatternError, SparsityError
from sparse_lightning.kernels.rank_select import descending_order
from sparse_lightning.patterns.names import matches, nearest
from sparse_lightning.renamed import adopt_renamed_method, renamed_arguments, renamed_attribute, renamed_names
from sparse_lightning.schedules.schedule import is_number

SLACK = 1e-9
"""Absorbs rounding when blocks are counted: a sparsity of 0.3 prunes three of ten blocks."""


@dataclass(frozen=True, eq=False)
class ScoredScope:
    """A grid of scopes with the scores of its blocks: what a budget splits a target over.

    Args:
        name: its plain name, such as "layers.0.up.weight".
        scope: the scopes.
        scores: gathered by scope, `(*scope.grid_shape, blocks per scope)`; −inf is pruned first.
        final: the final sparsity that its pattern fixes, None where the budget decides.
        size_exponent: scores grow like `(weights in a block) ** size_exponent`: 1 for sums, 0.5 for 2-norms, 0 for
            means, maxima and random numbers.
    """

    name: str
    scope: SparseScope
    scores: Tensor
    final: float | None = None
    size_exponent: float = 1.0

    def sizes(self) -> Tensor:
        """Return how many weights each block has, in the shape of the scores."""
        return self.scope.gather({block: block.block_sizes() for block in self.scope.blocks()}).to(self.scores.device)

    def kept_at(self, sparsity: float) -> Tensor:
        """Return the blocks kept in each scope at one sparsity for all: `n − floor(sparsity · n + 1e-9)` of n."""
        nnz = self.scope.sparsity_to_nnz(sparsity)
        return torch.full(self.scope.grid_shape, nnz, dtype=torch.int64, device=self.scores.device)


@dataclass(frozen=True)
class Budget(ABC):
    """Splits a target over scopes. A subclass implements `allocate`, and `rank` to compare scores differently.

    Args:
        overrides: a final sparsity for names that match a glob, or a regular expression after `re:`. The first match
            holds, also for a scope whose pattern fixes its sparsity.
        multiple_of: each scope that is pruned keeps a multiple of so many blocks, rounded up: convolutions and tensor
            cores are fast at widths that are multiples of 8 or more. Scopes whose pattern fixes their sparsity, as N:M
            does, are not rounded.
    """

    compares: ClassVar[bool] = False
    """Whether scopes compete with one another, so that the scores of one decide what another keeps."""

    overrides: Mapping[str, float] = field(default_factory=dict, kw_only=True, hash=False)
    multiple_of: int = field(default=1, kw_only=True)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        adopt_renamed_method(cls, "share", "allocate")

    def __post_init__(self) -> None:
        if not isinstance(self.overrides, Mapping):
            raise SparsityError(f"overrides={self.overrides!r} is not a mapping: map names to final sparsities")
        if type(self.multiple_of) is not int or self.multiple_of < 1:
            raise SparsityError(f"multiple_of={self.multiple_of!r} is out of range: pass a whole number of at least 1")
        object.__setattr__(self, "overrides", dict(self.overrides))
        for pattern, sparsity in self.overrides.items():
            if not isinstance(pattern, str):
                raise SparsityError(f"the override {pattern!r}={sparsity!r} has no name: pass a glob of scopes")
            _check_fraction(f"the override {pattern!r}", sparsity)

    @abstractmethod
    def allocate(self, scopes: Sequence[ScoredScope], target: float) -> list[Tensor]:
        """Return the blocks kept in each scope, so that all scopes together reach the target."""

    def rank(self, scored: ScoredScope) -> Tensor:
        """Return the scores as this budget compares them: what `split` and `select` work on."""
        return scored.scores

    def split(self, scopes: Sequence[ScoredScope], target: float, final: float) -> list[Tensor]:
        """Return the blocks kept in each scope, int64 of `scope.grid_shape`.

        A scope with a final sparsity o of its own, by its pattern or by an override, is pruned to
        `o · target / final`. The others reach the target together.

        Args:
            scopes: with scores as `rank` returns them; those of pruned blocks may be −inf.
            target: the target sparsity now.
            final: the highest target of the schedule.
        """
        _check_fraction("target", target)
        _check_fraction("final", final)
        if target > final:
            raise SparsityError(
                f"target={target} is above final={final}: `final` of a schedule must be its highest target"
            )
        self.check_overrides([scored.name for scored in scopes])
        own = [self.own(scored) for scored in scopes]
        rest = [scored for scored, o in zip(scopes, own, strict=True) if o is None]
        allocated: Iterator[Tensor] = iter(self.allocate(rest, target) if rest else [])
        done = target / final if final else 0.0
        pairs = zip(scopes, own, strict=True)
        return [self._rounded(s, next(allocated) if o is None else s.kept_at(o * done)) for s, o in pairs]

    def _rounded(self, scored: ScoredScope, kept: Tensor) -> Tensor:
        """Return the next multiple of blocks; all blocks of a scope that has no more."""
        if self.multiple_of == 1 or scored.final is not None:
            return kept
        return (-(-kept // self.multiple_of) * self.multiple_of).clamp(max=scored.scope.numblk_per_scope())

    def own(self, scored: ScoredScope) -> float | None:
        """Return the final sparsity that an override or the pattern fixes for a scope; None where there is none."""
        found = (o for pattern, o in self.overrides.items() if matches(pattern, scored.name))
        return next(found, scored.final)

    def check_overrides(self, names: Sequence[str]) -> None:
        """Raise `PatternError` where an override matches none of the names."""
        for pattern in self.overrides:
            if not any(matches(pattern, name) for name in names):
                raise PatternError(f"the override {pattern!r} matches no pruned scope{nearest(pattern, names)}")


@dataclass(frozen=True)
class Uniform(Budget):
    """The same sparsity everywhere: each scope of n blocks keeps `n − floor(target · n + 1e-9)`.

    Args:
        overrides: a final sparsity for some names; see `Budget`.
        multiple_of: each scope keeps a multiple of so many blocks; see `Budget`.

    Example:
        >>> from sparse_lightning import BlockSpec, ScopeSpec
        >>> scores = torch.rand(1, 1, 10)
        >>> row = ScoredScope("row", ScopeSpec(BlockSpec(torch.ones(1, 10), (1, 1))), scores)
        >>> [int(Uniform().split([row], target, 1.0)[0]) for target in (0.0, 0.09, 0.1, 0.3, 1.0)]
        [10, 10, 9, 7, 0]
    """

    def allocate(self, scopes: Sequence[ScoredScope], target: float) -> list[Tensor]:
        """Return what each scope keeps at the target."""
        alike: dict[tuple[tuple[int, ...], int, torch.device], Tensor] = {}
        kept = []
        for scored in scopes:
            key = scored.scope.grid_shape, scored.scope.numblk_per_scope(), scored.scores.device
            if key not in alike:
                alike[key] = scored.kept_at(target)
            kept.append(alike[key].clone())  # a budget or a method may change that of one scope
        return kept


@dataclass(frozen=True)
class ERK(Budget):
    """Small parameters stay denser (Erdős–Rényi kernel): density `min(1, ε · (Σ shape / Π shape) ** power)`.

    ε is chosen so that all together keep `1 − target` of their weights; the shape is that of the largest parameter.
    Scopes keep whole blocks.

    Args:
        power: the exponent of the shape term; 0 is `Uniform`.
        overrides: a final sparsity for some names; see `Budget`.
        multiple_of: each scope keeps a multiple of so many blocks; see `Budget`.

    Example:
        >>> from sparse_lightning import BlockSpec, ScopeSpec
        >>> def scored(rows, columns):
        ...     scope = ScopeSpec(BlockSpec(torch.ones(rows, columns), (1, 1)))
        ...     return ScoredScope(f"{rows}×{columns}", scope, torch.rand(1, 1, rows * columns))
        >>> small, large = scored(4, 4), scored(16, 16)
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
            raise SparsityError(f"power={self.power!r} of ERK is out of range: pass a finite number of at least 0")

    def allocate(self, scopes: Sequence[ScoredScope], target: float) -> list[Tensor]:
        """Return what each scope keeps at the density of the formula."""
        raw = [self._raw(scored.scope) for scored in scopes]
        densities = scaled_densities(raw, [scored.scope.numel() for scored in scopes], 1 - target)
        return [scored.kept_at(1 - density) for scored, density in zip(scopes, densities, strict=True)]

    def _raw(self, scope: SparseScope) -> float:
        shape = max(scope.unique_params(), key=Tensor.numel).shape
        return float((sum(shape) / max(1, shape.numel())) ** self.power)


def scaled_densities(raw: Sequence[float], numels: Sequence[int], density: float) -> list[float]:
    """Return densities in the ratio of `raw`, none above 1, that keep a fraction `density` of all weights.

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


@renamed_arguments(floor="min_density")
@dataclass(frozen=True)
class Global(Budget):
    """All blocks compete, by `score / size ** size_exponent`: the lowest are pruned until the target is reached.

    Blocks are pruned from the lowest score upwards, as many as hold no more than a fraction `target` of all weights.
    Of equal scores the lower index is kept, and the earlier scope.

    Args:
        min_density: the fraction of its blocks that each scope keeps whatever their scores; at least one block.
        overrides: a final sparsity for some names; see `Budget`.
        multiple_of: each scope keeps a multiple of so many blocks; see `Budget`.

    Example:
        >>> from sparse_lightning import BlockSpec, ScopeSpec
        >>> def scored(name, scores):
        ...     scope = ScopeSpec(BlockSpec(torch.ones(1, len(scores)), (1, 1)))
        ...     return ScoredScope(name, scope, torch.tensor([[scores]]))
        >>> weak, strong = scored("weak", [0.1, 0.2, 0.3, 0.9]), scored("strong", [1.0, 2.0, 3.0, 4.0])
        >>> for target in (0.0, 0.25, 0.5, 1.0):
        ...     print([int(kept) for kept in Global().split([weak, strong], target, 1.0)])
        [4, 4]
        [2, 4]
        [1, 3]
        [1, 1]
    """

    compares: ClassVar[bool] = True

    min_density: float = 0.0
    floor: ClassVar[Any] = renamed_attribute("floor", "min_density")

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_fraction("min_density", self.min_density)

    def rank(self, scored: ScoredScope) -> Tensor:
        """Return the scores as if all blocks were of one size."""
        return scored.scores / scored.sizes().to(scored.scores.dtype) ** scored.size_exponent

    def allocate(self, scopes: Sequence[ScoredScope], target: float) -> list[Tensor]:
        """Return what each scope keeps when the lowest blocks of all scopes are pruned."""
        device = scopes[0].scores.device
        scores = torch.cat([s.scores.flatten().to(device) for s in scopes])
        sizes = torch.cat([s.sizes().flatten().to(device) for s in scopes])
        prunable = torch.cat([self._prunable(s.scores).flatten().to(device) for s in scopes])
        kept = ~_lowest(scores, torch.where(prunable, sizes, 0), _limit(sizes, target)) | ~prunable
        parts = torch.split(kept, [s.scores.numel() for s in scopes])
        pairs = zip(scopes, parts, strict=True)
        return [part.view(s.scores.shape).sum(-1).to(s.scores.device) for s, part in pairs]

    def _prunable(self, scores: Tensor) -> Tensor:
        """Return where blocks are not among those that their scope keeps in any case."""
        n = scores.shape[-1]
        protected = max(1, math.ceil(self.min_density * n - SLACK))
        places = torch.arange(n, device=scores.device).expand(scores.shape)
        return torch.empty_like(scores, dtype=torch.bool).scatter_(-1, descending_order(scores), places >= protected)


@renamed_arguments(floor="min_density")
@dataclass(frozen=True)
class LAMP(Global):
    """Global, on scores relative to their layer: `s_u² / Σ s_v² over s_v ≥ s_u` (Lee et al., 2021).

    The scores s are those of blocks as `Global` compares them; those below zero stay as they are.

    Args:
        min_density: the fraction of its blocks that each scope keeps whatever their scores; at least one block.
        overrides: a final sparsity for some names; see `Budget`.
        multiple_of: each scope keeps a multiple of so many blocks; see `Budget`.

    Example:
        >>> from sparse_lightning import BlockSpec, ScopeSpec
        >>> scope = ScopeSpec(BlockSpec(torch.ones(1, 3), (1, 1)))
        >>> LAMP().rank(ScoredScope("row", scope, torch.tensor([[[3.0, 1.0, 2.0]]]))).flatten().tolist()
        [1.0, 0.07142857142857142, 0.3076923076923077]
    """

    def rank(self, scored: ScoredScope) -> Tensor:
        """Return the value of the formula, with sums over the scope."""
        scores = super().rank(scored)
        # On the CPU: sums on a GPU have no fixed order, and masks must be the same after a resume.
        s = scores.flatten().cpu().double().nan_to_num(0.0, torch.finfo(torch.float32).max, 0.0).clamp(min=0)
        rising = s.sort().values
        not_lower = rising.square().flip(0).cumsum(0).flip(0)[torch.searchsorted(rising, s)]
        ranked = (s.square() / not_lower).view_as(scores).to(scores.device)
        return torch.where(scores > 0, ranked, scores)


def _limit(sizes: Tensor, target: float) -> int:
    """Return how many weights may be pruned, rounded in blocks: of N equal blocks `floor(target · N + 1e-9)` fit."""
    block, total = int(sizes.max()) if len(sizes) else 1, int(sizes.sum())
    return math.floor(Fraction(target * (total / block) + SLACK) * block)


def _lowest(scores: Tensor, sizes: Tensor, limit: int) -> Tensor:
    """Return where blocks lie, from the lowest score upwards, whose sizes add up to no more than the limit."""
    ascending = descending_order(scores).flip(0)
    return torch.empty_like(sizes, dtype=torch.bool).scatter_(0, ascending, sizes[ascending].cumsum(0) <= limit)


def _check_fraction(name: str, value: Any) -> None:
    if not is_number(value) or not 0 <= value <= 1:
        raise SparsityError(f"{name}={value!r} is out of range: pass a number from 0 to 1")


__getattr__ = renamed_names(__name__, Contender="ScoredScope")
