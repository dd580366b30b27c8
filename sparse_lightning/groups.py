"""N:M groups of single weights: scored, chosen and zeroed in one pass, with no score for each weight in memory."""

from __future__ import annotations

from torch import Tensor
from torch.linalg import vector_norm

from sparse_lightning.attached import Attached
from sparse_lightning.block import BlockSpec
from sparse_lightning.distributed import is_sharded, local_like, sharded_along, united
from sparse_lightning.flow import Criterion, Sources
from sparse_lightning.kernels.nm_select import nm_select
from sparse_lightning.layout import Layout
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
        tensors = [tensor for tensor in self._tensors(sources) if tensor.numel()]
        return all(bool(vector_norm(tensor, float("inf")).isfinite()) for tensor in tensors)

    def select(self, n: int, sources: Sources) -> Tensor:
        """Keep n of each group in place; gives the mask, gathered by scope.

        Each process chooses in the groups that it holds: their bits travel, and no score does.
        """
        weight, *other = [t.movedim(self._dim, -1) for t in self._tensors(sources)]
        mask = nm_select(weight, n, self._m, *other).movedim(-1, self._dim)
        return self.attached.scope.gather({self._spec: united(mask, self._spec.param)})

    def _tensors(self, sources: Sources) -> list[Tensor]:
        names = ["weight"] if self._factor == "weight" else ["weight", self._factor]
        param = self._spec.param
        found = [sources.element(name, param, self.attached.name) for name in names]
        if is_sharded(param):
            return [local_like(tensor, param) for tensor in found]  # the view is the parameter: `groups_of` has looked
        return [self._spec.view.like(tensor).data for tensor in found]


def groups_of(attached: Attached, criterion: Criterion, method: Method) -> Groups | None:
    """The groups of an attachment where one pass can do it all: plain N:M, pruned for good, by a product of tensors."""
    scope = attached.scope
    if criterion.factor is None or attached.final is None or not isinstance(method, (Gradual, OneShot)):
        return None
    if not isinstance(scope, ScopeSpec) or not isinstance(scope.block, BlockSpec) or scope.block.numel_per_block() > 1:
        return None
    if sum(n > 1 for n in scope.shape) != 1 or _is_cut(scope):
        return None
    return Groups(attached, criterion.factor)


def _is_cut(scope: ScopeSpec) -> bool:
    """Whether processes may hold parts of a group: then its scores have to meet."""
    assert isinstance(scope.block, BlockSpec), "`groups_of` has looked"
    param, view = scope.block.param, scope.block.view.layout
    along = [d for d, n in enumerate(scope.shape) if n > 1]
    return is_sharded(param) and (view != Layout.of(param) or sharded_along(param, along))
