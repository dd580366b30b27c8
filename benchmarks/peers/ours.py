"""This package: with all defaults, and with the criterion that every other library has."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from peer import Peer
from torch import nn

import sparse_lightning as sl


class Ours(Peer):
    """All defaults: AverageTaylor, which looks at the gradients of the steps up to an update; Wanda for 2:4."""

    name = "sparse_lightning, defaults"
    observes = True
    package = "sparse-lightning"
    criterion: ClassVar[sl.Criterion | None] = None
    parts: ClassVar[dict[str, Any]] = {}
    """The method and the budget, where they are not the defaults."""
    constant: ClassVar[bool] = False
    """Whether it is sparse from the first step on."""

    def start(self) -> None:
        """Attach a Sparsifier."""
        always = self.plan.rhythm == "always"
        if self.constant:
            schedule, every = sl.Constant(self.plan.sparsity), None
        elif self.plan.rhythm == "cubic":
            schedule, every = (sl.Linear if self.plan.pattern == "2:4" else sl.Cubic)(self.plan.sparsity), None
        elif self.plan.rhythm == "once":
            schedule, every = sl.OneShot(self.plan.sparsity, self.plan.first), 1
        else:
            schedule, every = sl.Constant(self.plan.sparsity), 1 if always else 10**6
        rhythm = {"update_every": every, "observe_every": 1 if self.plan.rhythm == "between" else None}
        parts = {**rhythm, **self.parts}
        self.sparsifier = sl.Sparsifier(self._patterns(), schedule, self.criterion, seed=self.seed(), **parts)
        self.sparsifier.attach(self.model, self.optimizer, total_steps=self.plan.steps)

    def _patterns(self) -> list[sl.Pattern]:
        weights = [f"{layer}.weight" for layer in self.structure.layers]
        if self.plan.pattern == "2:4":
            return [sl.NM(weights, 2, 4)]
        if self.plan.pattern == "units":
            return self.structure.patterns
        return [sl.Blocks(weights, self.plan.block)]

    def seed(self) -> int:
        """Of random masks: drawn from the seed of the run, without changing what is drawn after it."""
        return torch.initial_seed() % 2**31

    def before_step(self, step: int) -> None:
        """Update where it is due; gradients are not clipped here, so they need no mask."""
        self.sparsifier.update()

    def finish(self) -> nn.Module:
        """Detach; the model was never wrapped."""
        self.sparsifier.detach()
        return self.model

    def shrunk(self) -> Peer | None:
        """Without pruned units: `compact` cuts the model and its optimizer."""
        if self.plan.pattern != "units" or self.costs_only:
            return None
        self.finish()
        small = sl.compact(self.model, (self.example,), self.optimizer)
        return Peer(small, self.structure, self.optimizer, self.plan, self.example)

    def state(self) -> dict[str, object]:
        """With the state of the Sparsifier."""
        return {**super().state(), "sparsifier": self.sparsifier.state_dict()}


class OursMagnitude(Ours):
    """The job that the others do: magnitude pruning."""

    name = "sparse_lightning, Magnitude"
    observes = False
    criterion = sl.Magnitude()


class OursShrink(Ours):
    """Removes pruned units while it trains."""

    name = "sparse_lightning, defaults, shrink"
    patterns = ("units",)
    updates_once = True
    costs_only = True

    def start(self) -> None:
        """Attach a Sparsifier that shrinks."""
        self.parts = {"shrink": sl.Shrink((self.example,))}
        super().start()


class OursMagnitudeShrink(OursShrink):
    """The job that Torch-Pruning does: magnitude pruning of units that are removed."""

    name = "sparse_lightning, Magnitude, shrink"
    observes = False
    criterion = sl.Magnitude()
