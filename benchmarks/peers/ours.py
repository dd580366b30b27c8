"""This package: with all defaults, and with the criterion that every other library has."""

from __future__ import annotations

from typing import ClassVar

from peer import Peer
from torch import nn

import sparse_lightning as sl


class Ours(Peer):
    """All defaults: AverageTaylor, which looks at the gradients of every step; Wanda for 2:4."""

    name = "sparse_lightning, defaults"
    package = "sparse-lightning"
    criterion: ClassVar[sl.Criterion | None] = None

    def start(self) -> None:
        """Attach a Sparsifier."""
        always = self.plan.rhythm == "always"
        if self.plan.rhythm == "cubic":
            schedule, every = (sl.Linear if self.plan.pattern == "2:4" else sl.Cubic)(self.plan.sparsity), None
        else:
            schedule, every = sl.Constant(self.plan.sparsity), 1 if always else 10**6
        self.sparsifier = sl.Sparsifier(self._patterns(), schedule, self.criterion, update_every=every)
        self.sparsifier.attach(self.model, self.optimizer, total_steps=self.plan.steps)

    def _patterns(self) -> list[sl.Pattern]:
        weights = [f"{layer}.weight" for layer in self.layers]
        if self.plan.pattern == "2:4":
            return [sl.NM(weights, 2, 4)]
        if self.plan.pattern == "units":
            readers = [*self.layers[1:], self.reader]
            return [sl.Neurons(up, down) for up, down in zip(self.layers, readers, strict=True)]
        return [sl.Blocks(weights, self.plan.block)]

    def before_step(self, step: int) -> None:
        """Update where it is due, and mask the gradients."""
        self.sparsifier.before_step()

    def finish(self) -> nn.Module:
        """Detach; the model was never wrapped."""
        self.sparsifier.detach()
        return self.model

    def state(self) -> dict[str, object]:
        """With the state of the Sparsifier."""
        return {**super().state(), "sparsifier": self.sparsifier.state_dict()}


class OursMagnitude(Ours):
    """The job that the others do: magnitude pruning."""

    name = "sparse_lightning, Magnitude"
    criterion = sl.Magnitude()
