"""Torch-Pruning: removes units, so that the model gets smaller while it trains."""

from __future__ import annotations

import torch_pruning as tp
from peer import Peer
from torch import nn


class TorchPruning(Peer):
    """Group magnitude. A step makes new parameters: the optimizer is built again, and forgets its moments."""

    name = "Torch-Pruning"
    package = "torch-pruning"
    patterns = ("units",)
    updates_once = True

    def start(self) -> None:
        """Trace the model."""
        kept = [m for m in self.model.modules() if isinstance(m, nn.Linear) and m not in self.modules()]
        self.updates = sum(self.plan.target(step) is not None for step in range(self.plan.steps))
        if self.plan.rhythm != "cubic":
            self.updates = 1
        ramp = [self.plan.target(step) for step in range(self.plan.steps)]
        targets = [0.0, *(target for target in ramp if target is not None)]
        self.pruner = tp.pruner.BasePruner(
            self.model,
            self.example,
            importance=tp.importance.GroupMagnitudeImportance(p=2),
            pruning_ratio=self.plan.sparsity,
            iterative_steps=self.updates,
            iterative_pruning_ratio_scheduler=lambda ratio, steps: targets if len(targets) > steps else [0.0, ratio],
            ignored_layers=kept,
        )

    def update(self, target: float) -> None:
        """Remove units, and build the optimizer again, with its settings."""
        before = [id(p) for p in self.model.parameters()]
        self.pruner.step()
        if [id(p) for p in self.model.parameters()] != before:
            (group,) = self.optimizer.param_groups
            settings = {name: value for name, value in group.items() if name != "params"}
            self.optimizer.param_groups.clear()
            self.optimizer.state.clear()
            self.optimizer.add_param_group({"params": list(self.model.parameters()), **settings})
            self.optimizer.zero_grad()
