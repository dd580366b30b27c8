"""Lightning's ModelPruning, which applies torch.nn.utils.prune; called at our updates instead of at ends of epochs."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.callbacks import ModelPruning
from peer import Peer
from torch import nn


class Host(L.LightningModule):
    """A LightningModule around a model: the callback looks for one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class LightningModelPruning(Peer):
    """Unstructured only: its structured functions prune rows of one layer, and no reader of them."""

    name = "Lightning ModelPruning"
    package = "lightning"
    patterns = ("1×1",)
    updates_once = True

    def start(self) -> None:
        """Set the callback up."""
        self.host, self.sparsity = Host(self.model), 0.0
        pairs = [(module, "weight") for module in self.modules()]
        self.callback = ModelPruning("l1_unstructured", pairs, use_global_unstructured=False)
        self.callback.setup(None, self.host, "fit")
        # torch.nn.utils.prune makes new parameters of the same tensors: the optimizer gets them by name.
        self.callback.apply_pruning(0.0)
        self.regroup()

    def update(self, target: float) -> None:
        """Prune a fraction of what is left, as torch's functions count."""
        if target > self.sparsity:
            self.callback.apply_pruning(1 - (1 - target) / (1 - self.sparsity))
            self.sparsity = target

    def finish(self) -> nn.Module:
        """Make the masks permanent."""
        self.callback.make_pruning_permanent(self.host)
        return self.model
