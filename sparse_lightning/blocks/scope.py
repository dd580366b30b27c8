"""Scopes: the sets of blocks that compete with each other; a budget holds in each."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_lightning.blocks.scope_index import ScopeIndex
from sparse_lightning.blocks.sparse_block import SparseBlock, Values, joined
from sparse_lightning.blocks.spec import BlockSpec, check_orders
from sparse_lightning.blocks.thresholds import NEWTON_STEPS, Thresholds
from sparse_lightning.blocks.view import View, from_blocks
from sparse_lightning.errors import CouplingError, LayoutError, ScoreWarning, SparsityError
from sparse_lightning.kernels.rank_select import descending_order, rank_select
from sparse_lightning.layout import check_division, grid_shape, resolve_block_shape
from sparse_lightning.layout.permutation import inverse, permuted

Scores = Tensor | Mapping[SparseBlock, Tensor]
"""Scores of blocks: a tensor `(*grid_shape, blocks per scope)`; for one block its grid; for several a mapping from
each block to its grid."""


class SparseScope(ScopeIndex):
    """A grid of scopes: the base class of `ScopeSpec` and `ScopeCoupling`.

    Values of blocks have two forms: the grid of their block, or gathered by scope, a tensor
    `(*grid_shape, blocks per scope)` with the blocks of a scope in the order of their index.
    """

    name: str | None
    grid_shape: tuple[int, ...]

    @abstractmethod
    def members(self) -> list[ScopeSpec]:
        """Return the ScopeSpecs of this scope."""

    @abstractmethod
    def order_of(self, member: ScopeSpec) -> tuple[int, ...]:
        """Return the permutation from the scope grid of a member to this one."""

    @property
    def grid_ndim(self) -> int:
        """The number of dimensions of the grid of scopes."""
        return len(self.grid_shape)

    def blocks(self) -> list[SparseBlock]:
        """Return the blocks that compete, one for each member."""
        return [member.block for member in self.members()]

    def named_blocks(self, name: str) -> dict[str, SparseBlock]:
        """Return the blocks by name: `name` for a single block, `name/0`, `name/1`, … for several.

        Example:
            >>> first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)
            >>> scope = ScopeCoupling([ScopeSpec(BlockSpec(layer.weight, (2, 2))) for layer in (first, second)])
            >>> list(scope.named_blocks("mlp")), list(scope.members()[0].named_blocks("mlp"))
            (['mlp/0', 'mlp/1'], ['mlp'])
        """
        blocks = self.blocks()
        return {name: blocks[0]} if len(blocks) == 1 else {f"{name}/{i}": block for i, block in enumerate(blocks)}

    def parameters(self) -> list[View]:
        """Return the view of each BlockSpec."""
        return [view for block in self.blocks() for view in block.parameters()]

    def unique_params(self) -> list[Tensor]:
        """Return the parameters of the views, each once."""
        return list({id(view.param): view.param for view in self.parameters()}.values())

    def numscp(self) -> int:
        """Return the number of scopes."""
        return math.prod(self.grid_shape)

    def numblk_per_scope(self) -> int:
        """Return the number of blocks in each scope."""
        return sum(math.prod(member.shape) for member in self.members())

    def numblk(self) -> int:
        """Return the number of blocks in all scopes."""
        return sum(block.numblk() for block in self.blocks())

    def numel(self) -> int:
        """Return the number of weights in all scopes."""
        return sum(block.numel() for block in self.blocks())

    def nnz(self, eps: float = 1e-8) -> int:
        """Return the number of weights in all scopes with a magnitude above `eps`, or that are NaN."""
        return sum(block.nnz(eps) for block in self.blocks())

    def numel_per_scope(self) -> int:
        """Return the number of weights in the first scope; others have fewer only at a partial edge."""
        total = 0
        for member in self.members():
            corner = tuple(slice(n) for n in member.shape)
            total += sum(spec.numel_in(corner, member.block.order_of(spec)) for spec in member.block.blocks())
        return total

    def sparsity_to_nnz(self, s: float) -> int:
        """Return the number of blocks kept in each scope of n blocks at sparsity s: `n − floor(s·n + 1e-9)`."""
        if not 0 <= s <= 1:
            raise SparsityError(f"a sparsity of {s} for {self}: it must be between 0 (dense) and 1 (all pruned)")
        n = self.numblk_per_scope()
        return n - math.floor(s * n + 1e-9)

    def block_norms(self, values: Values = None) -> Tensor:
        """Return the 2-norm of each block, gathered by scope: `(*grid_shape, blocks per scope)`."""
        return self.gather({block: block.norms(self._values_of(block, values)) for block in self.blocks()})

    def gather(self, grids: Mapping[SparseBlock, Tensor]) -> Tensor:
        """Return grids of blocks gathered by scope, `(*grid_shape, blocks per scope)`."""
        parts = []
        for member in self.members():
            if member.block not in grids:
                raise CouplingError(f"no scores for {member.block}: pass a grid for every block")
            parts.append(member.gather_grid(grids[member.block]).permute(*self.order_of(member), self.grid_ndim))
        return joined(parts)

    def scatter(self, values: Tensor) -> dict[SparseBlock, Tensor]:
        """Return values gathered by scope as grids of blocks."""
        grids = {}
        parts = torch.split(values, [math.prod(member.shape) for member in self.members()], -1)
        for member, part in zip(self.members(), parts, strict=True):
            own = part.permute(*inverse(self.order_of(member)), self.grid_ndim)
            grids[member.block] = member.scatter_grid(own)
        return grids

    def select(self, scores: Scores, nnz: int | Tensor) -> Scores:
        """Return the mask (True = pruned) that keeps exactly the `nnz` blocks with the highest scores in each scope.

        Among equal scores the lower index is kept. NaN ranks lowest.

        Args:
            scores: in any form of `Scores`; the mask has the same form.
            nnz: blocks kept in each scope; one for all, or a tensor of `grid_shape`.

        Example:
            >>> pairs = ScopeSpec(BlockSpec(torch.ones(1, 4), (1, 1)), (1, 4))
            >>> pairs.select(torch.tensor([[0.1, 0.4, 0.4, 0.3]]), 2)
            tensor([[ True, False, False,  True]])
        """
        mask = self._select(self._gathered(scores), nnz)
        if not isinstance(scores, Tensor):
            return self.scatter(mask)
        return mask if scores.shape == mask.shape else self.scatter(mask)[self.blocks()[0]]

    def _select(self, gathered: Tensor, nnz: int | Tensor) -> Tensor:
        self._report_nan(gathered)
        keep = self._counts(nnz, gathered.device)
        return rank_select(gathered, keep)

    def kth_largest(self, scores_or_values: Scores | Values, nnz: int | Tensor) -> Tensor:
        """Return the lowest score among the `nnz` blocks kept in each scope: a tensor of `grid_shape`.

        It is inf if no block is kept; a NaN that is kept counts as −inf.

        Args:
            scores_or_values: scores in any form of `Scores`, or values whose 2-norms are the scores. A tensor
                in the shape of a grid is interpreted as scores.
            nnz: blocks kept in each scope; one for all, or a tensor of `grid_shape`.
        """
        scores = self._gathered_or_norms(scores_or_values)
        keep = self._counts(nnz, scores.device)
        ranked = scores.gather(-1, descending_order(scores)).nan_to_num(-math.inf, math.inf, -math.inf)
        if not ranked.shape[-1]:
            return torch.full(self.grid_shape, math.inf, dtype=scores.dtype, device=scores.device)
        last = ranked.gather(-1, (keep - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return torch.where(keep > 0, last, math.inf)

    def get_masks(
        self, nnz: int | Tensor, values: Values = None, block_scores: Scores | None = None
    ) -> dict[BlockSpec, Tensor]:
        """Return for each BlockSpec the mask of weights, in the shape of its view, that keeps `nnz` blocks per scope.

        Blocks are scored by `block_scores`; without them by the 2-norms of the values, or of the weights.
        """
        scores = self.block_norms(values) if block_scores is None else self._gathered(block_scores)
        masks: dict[BlockSpec, Tensor] = {}
        for block, mask in self.scatter(self._select(scores, nnz)).items():
            masks |= block.get_masks(mask)
        return masks

    def hard_threshold(
        self, thresholds: Thresholds | None = None, nnz: int | Tensor | None = None, values: Values = None
    ) -> dict[SparseBlock, Tensor]:
        """Prune in place, by thresholds on the 2-norm or to a number of blocks; return the mask of each block.

        Norms are taken of what is written: the values if passed, otherwise the weights.

        Args:
            thresholds: blocks with a lower norm are pruned; one value, or a tensor of `grid_shape`.
            nnz: blocks kept in each scope; pass either this or thresholds.
            values: what to score and prune instead of the weights.
        """
        norms = self.block_norms(values)
        if nnz is not None and thresholds is None:
            masks = self.scatter(self._select(norms, nnz))
        elif thresholds is not None and nnz is None:
            masks = self.scatter(~(norms >= self._per_scope(thresholds, norms).unsqueeze(-1)))
        else:
            raise SparsityError(f"hard_threshold of {self} takes either thresholds or nnz: pass one of the two")
        for block, mask in masks.items():
            block.apply_mask(mask, values=self._values_of(block, values))
        return masks

    def soft_threshold(
        self,
        thresholds: Thresholds,
        *,
        values: Values = None,
        conditioners: Values = None,
        max_iter: int = NEWTON_STEPS,
        atol: float = 0.0,
        eps: float = 0.0,
        scale: float = 1.0,
    ) -> dict[SparseBlock, Tensor]:
        """Apply the proximal step with one threshold per scope, in place; see `SparseBlock.soft_threshold`."""
        grids: dict[SparseBlock, Thresholds] = dict.fromkeys(self.blocks(), thresholds)
        if isinstance(thresholds, Tensor):
            wide = self._per_scope(thresholds, thresholds).unsqueeze(-1)
            grids |= self.scatter(wide.expand(*self.grid_shape, self.numblk_per_scope()))
        return {
            block: block.soft_threshold(
                t,
                values=self._values_of(block, values),
                conditioners=self._values_of(block, conditioners),
                max_iter=max_iter,
                atol=atol,
                eps=eps,
                scale=scale,
            )
            for block, t in grids.items()
        }

    def _values_of(self, block: SparseBlock, values: Values) -> Values:
        if isinstance(values, Tensor) and len(self.members()) > 1:
            raise CouplingError(
                f"one tensor of values is not enough for {self}: pass a mapping from each BlockSpec to a tensor"
            )
        return values

    def _gathered(self, scores: Scores) -> Tensor:
        if isinstance(scores, Mapping):
            return self.gather(scores)
        if tuple(scores.shape) == (*self.grid_shape, self.numblk_per_scope()):
            return scores
        if len(self.members()) == 1 and tuple(scores.shape) == self.blocks()[0].grid_shape:
            return self.gather({self.blocks()[0]: scores})
        raise LayoutError(
            f"scores of shape {tuple(scores.shape)} do not fit {self}: pass them gathered by scope, "
            f"{(*self.grid_shape, self.numblk_per_scope())}, or as grids of {[b.grid_shape for b in self.blocks()]}"
        )

    def _gathered_or_norms(self, scores_or_values: Scores | Values) -> Tensor:
        if isinstance(scores_or_values, Tensor):
            forms = [(*self.grid_shape, self.numblk_per_scope()), *(b.grid_shape for b in self.blocks())]
            if tuple(scores_or_values.shape) in forms:
                return self._gathered(scores_or_values)
        elif scores_or_values is not None:
            given: dict[Any, Tensor] = dict(scores_or_values.items())
            if all(block in given and tuple(given[block].shape) == block.grid_shape for block in self.blocks()):
                return self.gather(given)
            return self.block_norms(given)
        return self.block_norms(scores_or_values)

    def _counts(self, nnz: int | Tensor, device: torch.device) -> Tensor:
        keep, n = torch.as_tensor(nnz, device=device), self.numblk_per_scope()
        if keep.is_floating_point() or keep.dtype == torch.bool:
            raise SparsityError(
                f"nnz of dtype {keep.dtype} for {self}: it is a number of blocks, so it must be an integer"
            )
        least, most = keep.aminmax() if keep.numel() else (torch.tensor(0), torch.tensor(n))
        if least < 0 or most > n:
            raise SparsityError(f"nnz={nnz} is out of range for {self}: each scope can keep from 0 to {n} blocks")
        return keep.expand(self.grid_shape)

    def _per_scope(self, thresholds: Thresholds, like: Tensor) -> Tensor:
        return torch.as_tensor(thresholds, dtype=like.dtype, device=like.device).expand(self.grid_shape)

    def _report_nan(self, gathered: Tensor) -> None:
        if gathered.numel() and gathered.amax().isnan():  # the highest is NaN if any is: one pass
            wrong = gathered.isnan()
            names = [str(block.name or block) for block, where in self.scatter(wrong).items() if where.any()]
            warnings.warn(
                f"{int(wrong.sum())} scores of {', '.join(names)} are NaN: those blocks rank lowest", ScoreWarning, 4
            )


class ScopeSpec(SparseScope):
    """Divides the grid of a block into scopes.

    Args:
        block: a BlockSpec or a BlockCoupling.
        shape: the scope, in blocks; −1 or a missing entry spans its dimension.
        name: the name in errors and tables.

    Example:
        >>> weights = BlockSpec(torch.nn.Parameter(torch.randn(8, 16)), (1, 1))
        >>> two_of_four = ScopeSpec(weights, (1, 4))
        >>> two_of_four.grid_shape, two_of_four.numblk_per_scope(), two_of_four.sparsity_to_nnz(0.5)
        ((8, 4), 4, 2)
    """

    def __init__(self, block: SparseBlock, shape: Sequence[int] = (), name: str | None = None) -> None:
        self.block = block
        self.name = name
        wanted = (*shape, *(-1,) * (block.grid_ndim - len(shape)))
        try:
            self.shape = resolve_block_shape(block.grid_shape, wanted)
            check_division(block.grid_shape, self.shape)
        except LayoutError as error:
            raise LayoutError(
                f"scope {tuple(shape)} does not fit the grid {block.grid_shape} of {block}: {error}. Change the scope, "
                "which counts blocks, or the block shape"
            ) from None
        self.grid_shape = grid_shape(block.grid_shape, self.shape)

    def members(self) -> list[ScopeSpec]:
        """Return this spec."""
        return [self]

    def order_of(self, member: ScopeSpec) -> tuple[int, ...]:
        """Return the identity."""
        return tuple(range(self.grid_ndim))

    def gather_grid(self, grid: Tensor) -> Tensor:
        """Return a grid of blocks gathered by scope, `(*grid_shape, blocks per scope)`."""
        if tuple(grid.shape) != self.block.grid_shape:
            raise LayoutError(
                f"scores of shape {tuple(grid.shape)} do not fit the grid {self.block.grid_shape} of {self.block}"
            )
        return View.block_view_of(grid, self.shape, merge=True)

    def scatter_grid(self, gathered: Tensor) -> Tensor:
        """Return values gathered by scope as a grid of blocks."""
        return from_blocks(gathered, self.shape)

    def __repr__(self) -> str:
        name = f"{self.name!r}, " if self.name else ""
        return f"ScopeSpec({name}{self.block}, scope={self.shape}, grid={self.grid_shape})"


class ScopeCoupling(SparseScope):
    """Makes the blocks of several scopes compete under one budget.

    Args:
        scopes: ScopeSpecs on different blocks.
        orders: for each scope the permutation of its grid that makes all grids agree; None for no permutation. None
            or an empty list permutes no grid.
        name: the name in errors and tables.

    Example:
        >>> first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)
        >>> parts = [ScopeSpec(BlockSpec(layer.weight, (2, 2))) for layer in (first, second)]
        >>> ScopeCoupling(parts).numblk_per_scope()
        24
    """

    def __init__(
        self,
        scopes: Sequence[ScopeSpec],
        orders: Sequence[Sequence[int] | None] | None = None,
        name: str | None = None,
    ) -> None:
        self.scopes = list(scopes)
        self.name = name
        label = f"coupling {name!r} of scopes" if name else "a coupling of scopes"
        if not self.scopes:
            raise CouplingError(f"{label} has no members: pass at least one")
        self.orders = check_orders(label, [scope.grid_shape for scope in self.scopes], orders)
        blocks = [scope.block for scope in self.scopes]
        if len(set(blocks)) != len(blocks):
            twice = next(block for block in blocks if blocks.count(block) > 1)
            raise CouplingError(f"{twice} occurs in {label} twice: pass each block once")
        self.grid_shape = permuted(self.scopes[0].grid_shape, self.orders[0])

    def members(self) -> list[ScopeSpec]:
        """Return the coupled scopes."""
        return list(self.scopes)

    def order_of(self, member: ScopeSpec) -> tuple[int, ...]:
        """Return the permutation from the grid of a member to this grid."""
        return self.orders[self.scopes.index(member)]

    def __repr__(self) -> str:
        name = f"{self.name!r}, " if self.name else ""
        return f"ScopeCoupling({name}{self.scopes}, grid={self.grid_shape})"
