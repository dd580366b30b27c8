"""nvidia-modelopt: 2:4 once, by magnitude, then training of what is left."""

from __future__ import annotations

import warnings

from peer import Peer
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import modelopt.torch.sparsity as mts


class ModelOpt(Peer):
    """2:4 of all linear layers at one step: it has no schedule. It is called in the middle of our ramp."""

    name = "nvidia-modelopt"
    package = "nvidia-modelopt"
    patterns = ("2:4",)
    updates_once = True

    def before_step(self, step: int) -> None:
        """Once: in the middle of the ramp, or at the first step."""
        due = self.plan.steps * 2 // 5 if self.plan.rhythm == "cubic" else self.plan.first
        if step == due or self.plan.rhythm == "always":
            self.update(self.plan.sparsity)

    def update(self, target: float) -> None:
        """Prune, in place; the layers that are not pruned are left out by name."""
        pruned = {f"*{name}*": {} for name in self.structure.layers}
        rules = {"nn.Linear": {"*": None, **pruned}}
        self.model = mts.sparsify(self.model, [("sparse_magnitude", rules)], {"verbose": False})

    def finish(self) -> nn.Module:
        """A plain model."""
        return mts.export(self.model)
