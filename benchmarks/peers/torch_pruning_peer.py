"""Torch-Pruning: removes units, so that the model gets smaller while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch_pruning as tp
from peer import Peer
from structure import prunable


class TorchPruning(Peer):
    """Group magnitude. A step makes new parameters: the optimizer is built again, and forgets its moments."""

    name = "Torch-Pruning"
    package = "torch-pruning"
    patterns = ("units",)
    updates_once = True

    def start(self) -> None:
        """Trace the model."""
        named, heads = {*self.structure.units, *self.structure.beside}, {}
        for name, rows in self.structure.units.items():
            if rows > 1:
                beside = [
                    other for other in self.structure.beside if other.rpartition(".")[0] == name.rpartition(".")[0]
                ]
                heads |= {self.model.get_submodule(one): self.sizes[name] // rows for one in (name, *beside)}
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
            ignored_layers=[module for name, module in prunable(self.model).items() if name not in named],
            num_heads=heads,
            prune_num_heads=bool(heads),
            prune_head_dims=not heads,
        )
        if heads:
            self.pruner.per_step_head_pruning_ratio = fractions_of_rest(targets, max(heads.values()))

    def update(self, target: float) -> None:
        """Remove units, and build the optimizer again, with its settings."""
        before = [id(p) for p in self.model.parameters()]
        self.pruner.step()
        if [id(p) for p in self.model.parameters()] != before:
            self.optimizer.state.clear()
            self.regroup()
            self.optimizer.zero_grad()
            self._set_heads()

    def _set_heads(self) -> None:
        """Correct the sizes that attention modules of Hugging Face keep, as the examples of Torch-Pruning do."""
        for name, rows in self.structure.units.items():
            attention = self.model.get_submodule(name.rpartition(".")[0])
            if hasattr(attention, "num_attention_heads"):
                attention.all_head_size = self.model.get_submodule(name).weight.shape[0]
                attention.num_attention_heads = attention.all_head_size // rows


def fractions_of_rest(targets: Sequence[float], heads: int) -> list[float]:
    """The fraction of the heads that are left to remove in each step, as Torch-Pruning counts them: rounded up.

    Args:
        targets: the sparsity after each step, of all heads.
        heads: the number of heads before the first step.
    """
    kept = [heads - round(target * heads) for target in targets]
    removed = [0, *(before - after for before, after in pairwise(kept))]
    left = [heads, *kept[:-1]]
    return [max(0.0, (each - 0.5) / rest) for each, rest in zip(removed, left, strict=True)]
