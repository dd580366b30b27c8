"""Peer: what every library does in a training loop."""

from __future__ import annotations

from typing import ClassVar

import torch
from plan import Plan
from structure import Structure
from torch import Tensor, nn


class Peer:
    """A library that prunes a model while it trains; the base class prunes nothing: dense.

    Args:
        model: to train.
        structure: its layers and units.
        optimizer: of the model.
        plan: what to prune and when.
        example: an input of the model.
    """

    name: ClassVar[str] = "dense"
    package: ClassVar[str] = "torch"
    patterns: ClassVar[tuple[str, ...]] = ("1×1", "4×4", "8×8", "32×32", "2:4", "units")
    """The patterns that it can do."""
    convolutions: ClassVar[tuple[str, ...]] = ("1×1", "4×4", "8×8", "units")
    """Those that it can do in convolutions."""
    observes: ClassVar[bool] = False
    """Whether its scores look at steps between two updates, which then cost more than steps after the last one."""
    costs_only: ClassVar[bool] = False
    """Whether it trains the model of another one, up to rounding, so that only its costs are measured."""
    updates_once: ClassVar[bool] = False
    """Whether a model can be pruned once only, or shrinks, so that only its first update is timed."""

    def __init__(
        self, model: nn.Module, structure: Structure, optimizer: torch.optim.Optimizer, plan: Plan, example: Tensor
    ) -> None:
        self.model, self.structure, self.optimizer, self.plan, self.example = model, structure, optimizer, plan, example
        self.sizes = {name: model.get_submodule(name).weight.shape[0] for name in structure.units}
        self._groups = {
            name: i
            for i, group in enumerate(optimizer.param_groups)
            for name, parameter in model.named_parameters()
            if any(parameter is other for other in group["params"])
        }
        self.start()

    @classmethod
    def can(cls, pattern: str) -> bool:
        """Whether it can do a pattern."""
        return pattern in cls.patterns

    def modules(self) -> list[nn.Module]:
        """The layers to prune."""
        return [self.model.get_submodule(name) for name in self.structure.layers]

    def regroup(self) -> None:
        """Give the optimizer the parameters that the model has now, in the groups of those with their names."""
        for group in self.optimizer.param_groups:
            group["params"] = []
        for name, parameter in self.model.named_parameters():
            group = self.optimizer.param_groups[self._groups[name.removesuffix("_orig")]]
            group["params"].append(parameter)

    def start(self) -> None:
        """Before the first step."""

    def before_step(self, step: int) -> None:
        """After backward, before the step of the optimizer."""
        target = self.plan.target(step)
        if target is not None:
            self.update(target)

    def after_step(self, step: int) -> None:
        """After the step of the optimizer."""

    def update(self, target: float) -> None:
        """Prune to a sparsity."""

    def finish(self) -> nn.Module:
        """The plain model, after the last step."""
        return self.model

    def shrunk(self) -> Peer | None:
        """After `finish`: goes on to train the model without what is pruned, where a library can remove it later."""
        return None

    def state(self) -> dict[str, object]:
        """What a checkpoint needs, to resume."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
