"""Accelerate: a call between the unscaling of gradients and their clipping. Importing it needs the extra `hf`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from accelerate import Accelerator
from torch.optim import Optimizer


class BeforeClipping:
    """Calls an action when the gradients of an optimizer are complete and unscaled, before they are clipped.

    `Accelerator.clip_grad_norm_` and `clip_grad_value_` call `unscale_gradients` first, with every precision and
    strategy. There is no event for it, so the method is wrapped while an action is registered.

    Args:
        optimizer: a torch optimizer, without the wrapper of Accelerate.
        action: what to call.
    """

    _registered: list[BeforeClipping] = []  # noqa: RUF012 - of all instances
    _plain: Callable[..., None] | None = None

    def __init__(self, optimizer: Optimizer, action: Callable[[], None]) -> None:
        self.optimizer, self.action = optimizer, action
        if not self._registered:
            BeforeClipping._plain = Accelerator.unscale_gradients
            Accelerator.unscale_gradients = _observed(Accelerator.unscale_gradients)
        self._registered.append(self)

    def remove(self) -> None:
        """Stop calling the action; the method of Accelerate is its own again after the last one."""
        if self in self._registered:
            self._registered.remove(self)
            if not self._registered:
                Accelerator.unscale_gradients = BeforeClipping._plain

    @classmethod
    def call_for(cls, accelerator: Any) -> None:
        """Call the actions for the optimizers of an accelerator, unless it is accumulating gradients."""
        inner = [getattr(optimizer, "optimizer", optimizer) for optimizer in accelerator._optimizers]
        for each in list(cls._registered) if accelerator.sync_gradients else []:
            if any(optimizer is each.optimizer for optimizer in inner):
                each.action()


def _observed(unscale: Callable[..., None]) -> Callable[..., None]:
    @wraps(unscale)
    def unscale_gradients(accelerator: Any, *args: Any, **kwargs: Any) -> None:
        unscale(accelerator, *args, **kwargs)
        BeforeClipping.call_for(accelerator)

    return unscale_gradients
