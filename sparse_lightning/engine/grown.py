"""GrownBlocks: blocks that have grown and wait for their first step with a gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from sparse_lightning.blocks.spec import BlockSpec
from sparse_lightning.engine.masked_scope import MaskedScope
from sparse_lightning.engine.masks import unpack_all
from sparse_lightning.engine.optimizer_reset import restart_blocks, weights_of
from sparse_lightning.engine.regrowth import restart_at_random


@dataclass
class _Waiting:
    """Grown blocks of one parameter: a grid of the spec, and their weights before the step that is being made."""

    spec: BlockSpec
    grid: Tensor
    start: list[Tensor] | None = field(default=None)


class GrownBlocks:
    """The blocks that have grown in the last update and have not had a gradient since.

    The first step with a gradient is that of a fresh optimizer. The gradient of a coupled unit is zero until the layer
    that reads it has made a step; a unit without gradients waits until the next update at the latest.

    Args:
        scopes: what is attached.
        seed: of the weights at which coupled units restart.
    """

    def __init__(self, scopes: Sequence[MaskedScope], seed: int) -> None:
        self._blocks = {name: block for scope in scopes for name, block in scope.blocks.items()}
        self._seed = seed
        self._waiting: dict[str, _Waiting] = {}

    def restart(self, grown: Mapping[str, Tensor], kept: Mapping[str, Tensor], step: int) -> None:
        """Restart coupled units where gradients can flow, and let all grown blocks wait for their first step.

        Args:
            grown: the blocks that have grown in this update, by name.
            kept: those that were kept before and are kept now.
            step: the optimizer step.
        """
        self._waiting = {}
        for name, block in self._blocks.items():
            readers = block.readers()
            for i, spec in enumerate(block.blocks() if grown[name].any() else []):
                grid = block.grid_of(spec, grown[name])
                if readers and spec not in readers:
                    restart_at_random(spec, grid, block.grid_of(spec, kept[name]), self._seed, step)
                self._waiting[f"{name}:{i}"] = _Waiting(spec, grid)

    def before_step(self) -> None:
        """Note the weights that the next step starts at."""
        for each in self._waiting.values():
            each.start = weights_of(each.spec, each.grid)

    def after_step(self, optimizer: Optimizer) -> None:
        """Replace the step of waiting blocks by that of a fresh optimizer; those with a gradient wait no longer."""
        for place, each in list(self._waiting.items()):
            left = None if each.start is None else restart_blocks(optimizer, each.spec, each.grid, each.start)
            if left is not None and left.any():
                each.grid, each.start = left, None
            elif left is not None:
                del self._waiting[place]

    def grids(self) -> dict[str, Tensor]:
        """Return the blocks that wait, by the name of their block and the place of their parameter in it."""
        return {place: each.grid for place, each in self._waiting.items()}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Load what `grids` returned, packed."""
        specs = {f"{name}:{i}": spec for name, block in self._blocks.items() for i, spec in enumerate(block.blocks())}
        grids = unpack_all(saved, {place: specs[place].grid_shape for place in saved if place in specs})
        self._waiting = {
            place: _Waiting(specs[place], grid.to(specs[place].param.device)) for place, grid in grids.items()
        }
