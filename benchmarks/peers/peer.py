"""Peer: what every library does in a training loop."""

from __future__ import annotations

from typing import ClassVar

import torch
from plan import Plan
from torch import Tensor, nn


class Peer:
    """A library that prunes a model while it trains; the base class prunes nothing: dense.

    Args:
        model: to train.
        layers: names of the linear layers to prune, in order; units of each are read by the next one, or by `reader`.
        reader: the name of the layer that reads the last of them.
        optimizer: of the model.
        plan: what to prune and when.
        example: an input of the model.
    """

    name: ClassVar[str] = "dense"
    package: ClassVar[str] = "torch"
    patterns: ClassVar[tuple[str, ...]] = ("1×1", "4×4", "8×8", "32×32", "2:4", "units")
    """The patterns that it can do."""
    updates_once: ClassVar[bool] = False
    """Whether a model can be pruned once only, or shrinks, so that only its first update is timed."""

    def __init__(
        self,
        model: nn.Module,
        layers: list[str],
        reader: str,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        example: Tensor,
    ) -> None:
        self.model, self.layers, self.reader, self.plan, self.example = model, layers, reader, plan, example
        self.optimizer = optimizer
        self.units = [module.weight.shape[0] for module in self.modules()]
        self.start()

    @classmethod
    def can(cls, pattern: str) -> bool:
        """Whether it can do a pattern."""
        return pattern in cls.patterns

    def modules(self) -> list[nn.Module]:
        """The layers to prune."""
        return [self.model.get_submodule(name) for name in self.layers]

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

    def state(self) -> dict[str, object]:
        """What a checkpoint needs, to resume."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
