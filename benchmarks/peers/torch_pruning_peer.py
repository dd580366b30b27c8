"""Torch-Pruning: removes units, so that the model gets smaller while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch_pruning as tp
from peer import Peer
from structure import prunable
from torch import nn


class TorchPruning(Peer):
    """Group magnitude. A step makes new parameters: its user cuts the moments as it cuts weights and gradients."""

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
        """Remove units, group by group, from the model and from the state of the optimizer."""
        for group in self.pruner.step(interactive=True):
            members = [(dependency.target.module, list(units)) for dependency, units in group]
            before = [dict(module.named_parameters(recurse=False)) for module, _ in members]
            group.prune()
            for (module, units), held in zip(members, before, strict=True):
                for name, parameter in held.items():
                    self._cut(parameter, module.get_parameter(name), units)
        self.regroup()
        self._set_heads()

    def _cut(self, old: nn.Parameter, new: nn.Parameter, units: list[int]) -> None:
        """Give a smaller parameter what is left of the state of the one before."""
        if new is old:
            return
        [dim] = [d for d in range(old.ndim) if old.shape[d] != new.shape[d]]
        kept = torch.ones(old.shape[dim], dtype=torch.bool)
        kept[units] = False
        index, state = kept.nonzero().flatten(), self.optimizer.state.pop(old, {})
        self.optimizer.state[new] = {
            name: value.index_select(dim, index) if value.shape == old.shape else value for name, value in state.items()
        }

    def _set_heads(self) -> None:
        """Correct the sizes that attention modules of Hugging Face keep, as the examples of Torch-Pruning do."""
        for name, rows in self.structure.units.items():
            attention = self.model.get_submodule(name.rpartition(".")[0])
            if hasattr(attention, "num_attention_heads"):
                attention.all_head_size = self.model.get_submodule(name).weight.shape[0]
                attention.num_attention_heads = attention.all_head_size // rows


class TorchPruningForgetting(TorchPruning):
    """The same with a new optimizer after each step: what is cheapest, and another training."""

    name = "Torch-Pruning, moments dropped"
    costs_only = True

    def update(self, target: float) -> None:
        """Remove units, and build the optimizer again, with its settings."""
        self.pruner.step()
        self.optimizer.state.clear()
        self.regroup()


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
