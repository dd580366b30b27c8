"""torchao's pat: an optimizer that wraps another, with constraints on the sparsity of each tensor."""

from __future__ import annotations

from peer import Peer
from plan import BEGIN, END
from torchao.prototype.pat import PruneOptimizer


class Pat(Peer):
    """Hard constraints on the smallest magnitudes, with its own cubic ramp. It has no groups that are tiles."""

    name = "torchao pat"
    package = "torchao"
    patterns = ("1×1", "2:4")

    def start(self) -> None:
        """Wrap the optimizer."""
        pruned = [module.weight for module in self.modules()]
        chosen = {id(weight) for weight in pruned}
        settings = {name: value for name, value in self.optimizer.param_groups[0].items() if name != "params"}
        for group in self.optimizer.param_groups:
            group["params"] = [weight for weight in group["params"] if id(weight) not in chosen]
        self.optimizer.add_param_group({"params": pruned, **settings, **self._constraint()})
        self.optimizer = PruneOptimizer(self.optimizer, *self._span())

    def _constraint(self) -> dict[str, object]:
        if self.plan.pattern == "2:4":
            return {"prox_type": "NMSparseConstraint", "group_type": "KElementGrouper", "k": 4, "n_nonzero": 2}
        ramp = self.plan.rhythm == "cubic"
        return {
            "prox_type": "MinSparsityConstraint",
            "group_type": "KElementGrouper",
            "k": 1,
            "min_sparsity": self.plan.sparsity,
            "min_sparsity_schedule": ramp,
            "prox_freq": self.plan.every if ramp else 1,
        }

    def _span(self) -> tuple[int, int]:
        """The steps before the first constraint, and the one from which on masks stay."""
        if self.plan.rhythm == "cubic":
            return round(BEGIN * self.plan.steps), round(END * self.plan.steps)
        return (0, 1) if self.plan.rhythm == "once" else (0, 10**9)
