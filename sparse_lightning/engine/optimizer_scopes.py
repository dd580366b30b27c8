"""OptimizerScopes: which optimizer changes which scopes, and whose steps count."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from sparse_lightning.engine.hold import Hold
from sparse_lightning.engine.masked_scope import MaskedScope
from sparse_lightning.errors import SparseLightningError
from sparse_lightning.kernels.watch import are_same
from sparse_lightning.layout import Layout


class OptimizerScopes:
    """The optimizers of a model, and the scopes on the parameters of each.

    Args:
        optimizers: all that change its parameters.
        scopes: all scopes.
        everything: holds all of them.
        layout: where the grid of a block is in the flat masks.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        scopes: Sequence[MaskedScope],
        everything: Hold,
        layout: Callable[[str], Layout],
    ) -> None:
        self._optimizers, self._scopes, self._everything, self._layout = optimizers, scopes, everything, layout
        self._known: dict[int, tuple[list[list[Tensor]], list[MaskedScope], Hold]] = {}

    def chosen(self, optimizer: Optimizer | None) -> list[Optimizer]:
        """Return the torch optimizer inside of this one; all optimizers for None.

        Raises:
            SparseLightningError: if it changes attached parameters and is not attached, so that nothing would hold
                their masks.
        """
        if optimizer is None:
            return list(self._optimizers)
        found = innermost(optimizer)
        if not any(found is known for known in self._optimizers) and self.of(found)[0]:
            raise SparseLightningError(
                f"this {type(found).__name__} changes {self.of(found)[0][0].name} and is not attached: pruned blocks "
                "would not stay zero after its steps, and the schedule would not advance. Where it replaces another "
                "optimizer, call detach() and attach() with the new one; in a Trainer, replace it before fit"
            )
        return [found]

    def leader(self) -> Optimizer | None:
        """Return the optimizer whose steps count: the last that changes an attached parameter."""
        last = self._optimizers[-1] if self._optimizers else None
        if len(self._optimizers) < 2:
            return last
        return next((o for o in reversed(self._optimizers) if self.of(o)[0]), last)

    def of(self, optimizer: Optimizer) -> tuple[list[MaskedScope], Hold]:
        """Return the scopes on parameters of an optimizer; looked up again when it gets other parameters."""
        groups = [group["params"] for group in optimizer.param_groups]
        known = self._known.get(id(optimizer))
        if known is None or len(known[0]) != len(groups) or not all(map(are_same, known[0], groups)):
            params = {id(param) for group in groups for param in group}
            mine = [scope for scope in self._scopes if any(id(p) in params for p in scope.parameters())]
            hold = self._everything if len(mine) == len(self._scopes) else Hold(mine, self._layout)
            known = self._known[id(optimizer)] = ([list(group) for group in groups], mine, hold)
        return known[1:]


def innermost(optimizer: Optimizer) -> Optimizer:
    """Return the torch optimizer inside of the wrappers of Fabric and others."""
    inner = getattr(optimizer, "optimizer", None)
    return innermost(inner) if isinstance(inner, Optimizer) else optimizer
