"""Who reads gradients: where none but the optimizer does, weight by weight, those of pruned blocks can stay."""

from __future__ import annotations

from collections.abc import Iterable

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import optim

from sparse_lightning.work import innermost

ELEMENTWISE = {
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.Adagrad,
    optim.Adadelta,
    optim.RMSprop,
    optim.Rprop,
    optim.ASGD,
}
"""Optimizers that are known to treat each weight for itself."""


def gradients_meet(
    trainer: L.Trainer, module: L.LightningModule, optimizer: optim.Optimizer, others: Iterable[L.Callback]
) -> bool:
    """Whether the gradient of a pruned weight can be seen by others before or in the optimizer step.

    It can where gradients are clipped, where hooks of the model or of other callbacks read them, in manual
    optimization, where anything goes, and where the optimizer is not known to treat each weight for itself.
    """
    hook = "on_before_optimizer_step"
    return (
        trainer.gradient_clip_val is not None
        or not module.automatic_optimization
        or type(innermost(optimizer)) not in ELEMENTWISE
        or is_overridden("configure_gradient_clipping", module)
        or is_overridden(hook, module)
        or any(is_overridden(hook, callback, parent=L.Callback) for callback in others)
    )
