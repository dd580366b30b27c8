"""When gradients must be masked: not if only an elementwise optimizer reads them."""

from __future__ import annotations

from collections.abc import Iterable

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import optim

from sparse_lightning.engine.optimizer_scopes import innermost
from sparse_lightning.flow.optimizer_state import is_elementwise


def needs_masked_gradients(
    trainer: L.Trainer, module: L.LightningModule, optimizer: optim.Optimizer, others: Iterable[L.Callback]
) -> bool:
    """Whether the gradients of pruned blocks must be zeroed before an optimizer step: other weights depend on them.

    They do if gradients are clipped, if hooks of the model or of other callbacks may read them, in manual optimization,
    and if the optimizer is not known to be elementwise.

    Args:
        trainer: of the run.
        module: that is trained.
        optimizer: that is about to make a step.
        others: the other callbacks of the trainer.
    """
    hook = "on_before_optimizer_step"
    return (
        trainer.gradient_clip_val is not None
        or not module.automatic_optimization
        or not is_elementwise(innermost(optimizer))
        or is_overridden("configure_gradient_clipping", module)
        or is_overridden(hook, module)
        or any(is_overridden(hook, callback, parent=L.Callback) for callback in others)
    )
