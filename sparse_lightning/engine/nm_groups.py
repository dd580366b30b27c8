"""N:M sparsity: groups of single weights, scored, chosen and zeroed in one pass without a score per weight."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import Self

from sparse_lightning.blocks.scope import ScopeSpec
from sparse_lightning.blocks.shards import is_sharded, local_like, sharded_along
from sparse_lightning.blocks.spec import BlockSpec
from sparse_lightning.engine.masked_scope import MaskedScope
from sparse_lightning.engine.ranks import united
from sparse_lightning.flow import Criterion, Sources
from sparse_lightning.kernels.nm_select import nm_select_many
from sparse_lightning.layout import Layout
from sparse_lightning.methods import Gradual, Method, UpdateContext
from sparse_lightning.patterns import Attachment


class NMGroups(MaskedScope):
    """The groups of m contiguous weights of one parameter, scored by `|w|` times another tensor.

    Parameters that lie alike are decided by one call.

    Args:
        attachment: what an N:M pattern returned.
        factor: the input that weights are multiplied with; "weight" for their magnitude alone.
    """

    is_scored = False  # its pattern fixes its sparsity, so that no budget compares its scores

    def __init__(self, attachment: Attachment, factor: str) -> None:
        super().__init__(attachment)
        scope = attachment.scope
        assert isinstance(scope, ScopeSpec), "`masked_scope` has checked"
        assert isinstance(scope.block, BlockSpec), "`masked_scope` has checked"
        self._spec, self._factor = scope.block, factor
        [self._dim] = [d for d, n in enumerate(scope.shape) if n > 1] or [0]
        self._m = scope.shape[self._dim]
        self._is_whole = is_sharded(self._spec.param) or self._spec.view.layout == Layout.of(self._spec.param)

    def scored_later(self, sources: Sources) -> list[Tensor]:
        """Return the weights that this process holds, and what they are multiplied with."""
        names = ["weight"] if self._factor == "weight" else ["weight", self._factor]
        return [self._local(sources.element(name, self._spec.param, self.name)) for name in names]

    def _local(self, tensor: Tensor) -> Tensor:
        """Return the part of a tensor of the parameter's shape that is scored."""
        if self._is_whole and tensor.shape == self._spec.view.shape:
            return local_like(tensor, self._spec.param)
        return self._spec.view.like(tensor).data

    def _pruned(self) -> Tensor:
        """Return the mask of the weights that this process holds."""
        [mask] = self.masks.values()
        return local_like(mask, self._spec.param) if self._is_whole else mask

    @classmethod
    def choose(
        cls, scopes: Sequence[Self], method: Method, context: UpdateContext, tensors: Sequence[Sequence[Tensor]]
    ) -> Tensor:
        """Keep as many of each group as the method says, in place; all groups of a parameter have the same count.

        Each process chooses in the groups that it holds: one bit per weight is communicated, and no scores.
        """
        assert isinstance(method, Gradual), "`masked_scope` has checked"
        kept = method.kept(context).reshape(len(scopes), -1).amax(-1).tolist()
        first, dim = scopes[0], scopes[0]._dim
        weights, *others = zip(*([t.movedim(dim, -1) for t in own] for own in tensors), strict=True)
        # Scores of pruned weights, which may have changed since the last hold, are not those of zeros.
        pruned = [scope._pruned().movedim(dim, -1) for scope in scopes]
        factors = others[0] if others else None
        chosen = nm_select_many(weights, kept, first._m, factors, pruned).movedim(-1, dim + 1)
        masks = united(chosen, first._spec.param)
        return context.scope.gather({scope._spec: mask for scope, mask in zip(scopes, masks, strict=True)})


def masked_scope(attachment: Attachment, criterion: Criterion, method: Method) -> MaskedScope:
    """Return `NMGroups` where one pass computes what criterion and method decide; otherwise a `MaskedScope`.

    That needs plain N:M groups, a criterion that multiplies weights with one tensor, and a method that keeps the
    highest scores. A subclass that overrides a decision of either is always called for it.
    """
    factor = criterion.factor if declares(criterion, "factor", "flow") else None
    by_count = isinstance(method, Gradual) and declares(method, "decides_by_count", "choose", "remember", "change")
    if factor is None or not by_count or attachment.final is None or not _is_plain(attachment.scope):
        return MaskedScope(attachment)
    return NMGroups(attachment, factor)


def declares(owner: object, flag: str, *methods: str) -> bool:
    """Whether a flag is set by a class that knows the methods: none is overridden below the class that sets it.

    Example:
        >>> class Loud(Gradual):
        ...     def choose(self, context):
        ...         return super().choose(context)
        >>> declares(Gradual(), "decides_by_count", "choose"), declares(Loud(), "decides_by_count", "choose")
        (True, False)
    """
    depth = {name: i for i, cls in reversed(list(enumerate(type(owner).__mro__))) for name in vars(cls)}
    return bool(getattr(owner, flag)) and all(depth[flag] <= depth[name] for name in methods if name in depth)


def _is_plain(scope: object) -> bool:
    """Whether scopes are groups of single weights along one dimension, each held by one process."""
    if not isinstance(scope, ScopeSpec) or not isinstance(scope.block, BlockSpec) or scope.block.numel_per_block() > 1:
        return False
    return sum(n > 1 for n in scope.shape) == 1 and not _is_cut(scope, scope.block)


def _is_cut(scope: ScopeSpec, spec: BlockSpec) -> bool:
    """Whether processes may hold parts of a group: then its scores have to be combined."""
    along = [d for d, n in enumerate(scope.shape) if n > 1]
    return is_sharded(spec.param) and (spec.view.layout != Layout.of(spec.param) or sharded_along(spec.param, along))
