"""OtherSteps: optimizers that do not hold the attached parameters, and steps of those that are not attached."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch.optim import Optimizer

from sparse_lightning.compat.torch import version
from sparse_lightning.engine.masked_scope import MaskedScope
from sparse_lightning.errors import SparseLightningError

_CHANGES = 4
"""How many changes of a weight without a step of an attached optimizer are steps of another one: loading weights and
swapping in an average are fewer."""

_SOME = 4
"""How many pruned blocks of a parameter are read: such a step changes all that have a gradient."""


def check_held(optimizers: Sequence[Optimizer], scopes: Sequence[MaskedScope]) -> None:
    """Raise an error if optimizers hold none of the attached parameters; frozen ones need no optimizer."""
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    params = [param for scope in scopes for param in scope.parameters()]
    if not optimizers or any(id(p) in held or not p.requires_grad for p in params):
        return
    names = [scope.name for scope in scopes]
    some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    kinds = " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
    raise SparseLightningError(
        f"{kinds} holds none of the parameters of {some}: its steps would not change what is pruned. Create the "
        "optimizer from the parameters of this model, after it is copied, moved or wrapped, and attach that one"
    )


class OtherSteps:
    """Warns once if weights are changed by steps of an optimizer that is not attached.

    At an update, a pruned block that is not zero was changed after the last step of an attached optimizer: some of one
    parameter are read at each update, of the next one at the next; nothing is communicated. Without such steps, the
    version of one weight tells.

    Args:
        scopes: what is attached.
    """

    def __init__(self, scopes: Sequence[MaskedScope]) -> None:
        self._scopes, self._turn = list(scopes), 0
        # Blocks of single weights would need a number for each weight.
        in_blocks = [scope for scope in scopes if scope.live.numblk() < scope.live.numel()]
        pairs = [(scope, name, block) for scope in in_blocks for name, block in scope.live_blocks.items()]
        self._read = [(scope, name, block, spec) for scope, name, block in pairs for spec in block.blocks()]
        self._first = scopes[0].parameters()[0]
        self._has_warned, self._is_stepped = False, False
        self._version, self._changes = version(self._first), 0

    def reset(self) -> None:
        """Start again after a step of an attached optimizer, or of a loop that advances the schedule itself."""
        self._version, self._changes, self._is_stepped = version(self._first), 0, True

    def before_update(self) -> None:
        """Look at the pruned blocks of one parameter, before an update changes them."""
        if self._read and not self._has_warned:
            scope, name, block, spec = self._read[self._turn % len(self._read)]
            self._turn += 1
            if spec.part().some_hold_weights(block.grid_of(spec, scope.live_masks[name]), _SOME):
                self._warn(f"pruned blocks of {scope.name} are not zero")

    def before_step(self) -> None:
        """Count a change of the weights since the last call; `reset` is called at steps of an attached optimizer."""
        now = version(self._first)
        self._changes += now != self._version
        self._version = now
        if self._changes >= _CHANGES:
            self._warn(f"the weights of {self._scopes[0].name} change, and no attached optimizer makes a step")

    def at_end(self) -> None:
        """Look for changes if attached optimizers have made no step: all steps may have been those of another."""
        if not self._is_stepped and version(self._first) - self._version + self._changes >= _CHANGES:
            self._warn(f"the weights of {self._scopes[0].name} have changed without steps of an attached optimizer")

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{what}: something else changes them, such as an optimizer that is not attached, after whose steps "
                "pruned blocks are not zero and the schedule does not advance. Pass all optimizers that make steps to "
                "attach; call hold() where you change weights yourself",
                stacklevel=2,
            )
