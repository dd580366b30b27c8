"""Neurons: the hidden units of an MLP, pruned in every layer that computes or reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sparse_lightning.errors import PatternError
from sparse_lightning.patterns.coupled import column_piece, couple, reads, row_pieces
from sparse_lightning.patterns.experts import expert_pieces, is_stacked
from sparse_lightning.patterns.layer import Layer, common_owner, find_together
from sparse_lightning.patterns.names import Names
from sparse_lightning.patterns.pattern import Attachment, Pattern


@dataclass(frozen=True)
class Neurons(Pattern):
    """Hidden units: rows of `up` (and of `gate`) with their biases, together with the columns of `down`.

    Layers are linear layers or convolutions, named by their modules or weights, and paired by the text that the
    wildcards match. An `up` with twice as many rows as `down` has columns is a fused gate and up projection. A `down`
    that reads the flattened output of a convolution has several columns for each unit. The experts of a mixture may be
    stacked, `(experts, …)`, as `gate_up_proj` and `down_proj` of Mixtral: the neurons of each expert compete with each
    other.

    Args:
        up: a glob, or a regular expression after `re:`, of the layers that compute the units.
        down: a glob of the layers that read the units.
        gate: a glob of the layers that gate the units.

    Example:
        >>> from torch import nn
        >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> [found] = Neurons(up="0", down="2").resolve(Names(mlp))
        >>> found.name, found.scope.numblk_per_scope(), [spec.name for spec in found.scope.blocks()[0].blocks()]
        ('0 (neurons)', 8, ['0.weight', '0.bias', '2.weight'])
    """

    up: str
    down: str
    gate: str | None = None

    label: ClassVar[str] = "neurons"

    def resolve(self, names: Names) -> list[Attachment]:
        """Return one attachment for each group of layers."""
        groups = find_together(self, names, {"up": self.up, "gate": self.gate, "down": self.down})
        return [self._attach(names, **group) for group in groups]

    def _attach(self, names: Names, up: Layer, down: Layer, gate: Layer | None = None) -> Attachment:
        makers = [up] if gate is None else [up, gate]
        name = f"{common_owner(up, down) or up.title} ({self.label})"
        if all(is_stacked(names, layer) for layer in (*makers, down)):
            return couple(self, name, expert_pieces(self, names, makers, down), dims=2)
        for layer in (*makers, down):
            if layer.weight.ndim < 2:
                raise PatternError(
                    f"{self}: {layer.name} of shape {tuple(layer.weight.shape)} has no rows and columns: name linear "
                    "layers or convolutions"
                )
        with self.error_context(down.name, down.weight):
            units, parts = self._units(makers, down)
            pieces = [piece for layer in makers for piece in row_pieces(layer, units, parts)]
            return couple(self, name, [*pieces, column_piece(down, units)])

    def _units(self, makers: list[Layer], down: Layer) -> tuple[int, int]:
        """Return the number of units, and how often they are repeated along the rows of `up`."""
        made, read = {layer.rows().shape[0] for layer in makers}, down.columns().shape[0]
        if made == {2 * read} and len(makers) == 1:
            return read, 2
        if len(made) == 1 and reads(down, min(made), makers[0]):
            return min(made), 1
        shapes = ", ".join(f"{layer.name} {tuple(layer.weight.shape)}" for layer in (*makers, down))
        raise PatternError(
            f"{self}: the units of {shapes} do not agree: {' and '.join(map(str, sorted(made)))} outputs, but "
            f"{read} inputs. Set up and gate to the layers that compute the units, and down "
            "to the layer that reads them"
        )
