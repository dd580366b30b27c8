"""HeldWeights: the weights of attached scopes, their gradients and the state of their optimizers, kept masked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from sparse_lightning.blocks.shards import is_sharded
from sparse_lightning.engine.hold import Hold
from sparse_lightning.engine.masked_scope import MaskedScope
from sparse_lightning.engine.masked_stack import MaskBuffer
from sparse_lightning.engine.optimizer_reset import reset_blocks
from sparse_lightning.engine.optimizer_scopes import OptimizerScopes
from sparse_lightning.errors import PatternError
from sparse_lightning.patterns.names import Names, nearest


class HeldWeights:
    """The weights that are left in the model, on which the masks of a buffer are held.

    Args:
        scopes: all scopes.
        buffer: their masks.
        optimizers: all that change their parameters.

    Attributes:
        members: which optimizer changes which scopes.
    """

    def __init__(self, scopes: Sequence[MaskedScope], buffer: MaskBuffer, optimizers: Sequence[Optimizer]) -> None:
        self._buffer, self._optimizers = buffer, optimizers
        self._everything = Hold(scopes, buffer.live_layout)
        self.members = OptimizerScopes(optimizers, scopes, self._everything, buffer.live_layout)

    def mask_gradients(self, optimizer: Optimizer | None) -> None:
        """Zero the pruned blocks of the gradients that an optimizer, or all of them, will read."""
        for o in self.members.chosen(optimizer) if self._buffer.is_held else []:
            hold = self.members.of(o)[1]
            hold.fill_in(_dense_gradients(hold.parameters()), self._buffer.live)

    def hold(self) -> None:
        """Zero all pruned blocks in the weights."""
        if self._buffer.is_held:
            self._everything.fill(self._buffer.live)

    def hold_of(self, optimizer: Optimizer) -> None:
        """Zero the pruned blocks of the weights that an optimizer changes."""
        if self._buffer.is_held:
            self.members.of(optimizer)[1].fill(self._buffer.live)

    def start_at_zero(self, changed: Tensor) -> None:
        """Zero the weights and the optimizer state of the blocks where `changed`, a flat mask, is True."""
        live = self._buffer.live_of(changed)
        self._everything.fill(live)
        reset_blocks(self._optimizers, self._everything, live)

    def mask_copy(self, module: nn.Module, names: Mapping[int, str]) -> None:
        """Zero all pruned blocks in a copy of the model.

        Args:
            module: the copy.
            names: of the parameters of the model, by their id.
        """
        copied = Names(module.module if isinstance(module, AveragedModel) else module).parameters
        for name in [names[id(param)] for param in self._everything.parameters()]:
            if name not in copied:
                raise PatternError(
                    f"{type(module).__name__} is not a copy of the model: it has no {name}{nearest(name, copied)}"
                )
        weights = {id(param): copied[names[id(param)]] for param in self._everything.parameters()}
        self._everything.fill_in(weights, self._buffer.live)


def _dense_gradients(params: Iterable[Tensor]) -> dict[int, Tensor]:
    """Return the gradients of parameters, by the id of the parameter, those that are sparse tensors left out.

    One that was expanded, whose elements share memory, is replaced by a copy that can be written to.
    """
    found: dict[int, Tensor] = {}
    for param in params:
        if param.grad is not None and param.grad.layout == torch.strided:
            if 0 in param.grad.stride() and not is_sharded(param):
                param.grad = param.grad.contiguous()
            found[id(param)] = param.grad
    return found
