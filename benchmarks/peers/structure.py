"""Structure: what can be pruned in a model, said once for all libraries."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

import sparse_lightning as sl


@dataclass(frozen=True)
class Structure:
    """Names of layers.

    Args:
        layers: whose weights are pruned in blocks.
        units: layers whose rows are units, with the number of rows of one: 1 for neurons and filters, the size of a
            head for queries.
        patterns: of this package, which name the same units with all that reads them.
        beside: layers whose rows are removed with those of others: keys and values.
    """

    layers: list[str]
    units: dict[str, int]
    patterns: list[sl.Pattern]
    beside: list[str] = field(default_factory=list)

    def others(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the layers with weights that are not pruned in blocks, by name."""
        return {name: module for name, module in prunable(model).items() if name not in self.layers}


def prunable(model: nn.Module) -> dict[str, nn.Module]:
    """Return all linear layers and convolutions, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))}
