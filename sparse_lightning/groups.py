"""N:M groups of single weights: scored, chosen and zeroed in one pass, with no score for each weight in memory."""

from __future__ import annotations

from torch import Tensor
from torch.linalg import vector_norm

from sparse_lightning.attached import Attached
from sparse_lightning.block import BlockSpec
from sparse_lightning.distributed import is_sharded
from sparse_lightning.flow import Criterion, Sources
from sparse_lightning.kernels.nm_select import nm_select
from sparse_lightning.methods import Gradual, Method, OneShot
from sparse_lightning.scope import ScopeSpec


class Groups:
    """The groups of m neighbours of one parameter, judged by `|w|` times another tensor.

    Args:
        attached: what an N:M pattern has named.
        factor: the input that weights are multiplied with; "weight" for their magnitude alone.
    """

    def __init__(self, attached: Attached, factor: str) -> None:
        self.attached, self._factor = attached, factor
        scope = attached.scope
        assert isinstance(scope, ScopeSpec), "`groups_of` has looked"
        assert isinstance(scope.block, BlockSpec), "`groups_of` has looked"
        self._spec = scope.block
        [self._dim] = [d for d, n in enumerate(scope.shape) if n > 1] or [0]
        self._m = scope.shape[self._dim]

    def is_finite(self, sources: Sources) -> bool:
        """Whether all scores would be numbers."""
        return all(bool(vector_norm(t, float("inf")).isfinite()) for t in self._tensors(sources))

    def select(self, n: int, sources: Sources) -> Tensor:
        """Keep n of each group in place; gives the mask, gathered by scope."""
        weight, *other = [t.movedim(self._dim, -1) for t in self._tensors(sources)]
        mask = nm_select(weight, n, self._m, *other).movedim(-1, self._dim)
        return self.attached.scope.gather({self._spec: mask})

    def _tensors(self, sources: Sources) -> list[Tensor]:
        names = ["weight"] if self._factor == "weight" else ["weight", self._factor]
        return [self._spec.view.like(sources.element(n, self._spec.param, self.attached.name)).data for n in names]


def groups_of(attached: Attached, criterion: Criterion, method: Method) -> Groups | None:
    """The groups of an attachment where one pass can do it all: plain N:M, pruned for good, by a product of tensors."""
    scope = attached.scope
    if criterion.factor is None or attached.final is None or not isinstance(method, (Gradual, OneShot)):
        return None
    if not isinstance(scope, ScopeSpec) or not isinstance(scope.block, BlockSpec) or scope.block.numel_per_block() > 1:
        return None
    if sum(n > 1 for n in scope.shape) != 1 or is_sharded(scope.block.param):
        return None
    return Groups(attached, criterion.factor)
