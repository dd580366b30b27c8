"""Accelerate: a call between the unscaling of gradients and their clipping; the forward without mixed precision.

Accelerate comes with the extra `hf`, and is imported where it is there for certain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import nn
from torch.optim import Optimizer


def plain_forward(module: nn.Module) -> Any:
    """Return the `forward` that Accelerate has wrapped for mixed precision; that of another module as it is.

    `Accelerator.unwrap_model` removes the wrapper, too, but from the model that is trained.

    Private: the attribute `_original_forward`, and the package of the wrapper, since others use this name as well.
    """
    forward = getattr(module, "forward", None)
    is_wrapper = str(getattr(forward, "__module__", "")).startswith("accelerate.")
    return getattr(module, "_original_forward", forward) if is_wrapper else forward


@contextmanager
def in_own_precision(model: nn.Module) -> Iterator[None]:
    """Let a model compute in the precision of its weights for a while, whatever Accelerate has wrapped it for."""
    held, plain = vars(model).get("forward"), plain_forward(model)
    if held is None or plain is held:
        yield
        return
    model.forward = plain
    try:
        yield
    finally:
        model.forward = held


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
        from accelerate import Accelerator

        self.optimizer, self.action = optimizer, action
        if not self._registered:
            BeforeClipping._plain = Accelerator.unscale_gradients
            Accelerator.unscale_gradients = _observed(Accelerator.unscale_gradients)
        self._registered.append(self)

    def remove(self) -> None:
        """Stop calling the action; the method of Accelerate is its own again after the last one."""
        from accelerate import Accelerator

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
