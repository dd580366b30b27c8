"""Filters: whole filters of convolutions, with the norm behind them and the layer that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from sparse_lightning.errors import PatternError
from sparse_lightning.names import Names
from sparse_lightning.patterns.coupled import Piece, column_piece, couple, reads, row_pieces
from sparse_lightning.patterns.layer import Layer, find_by_text, find_layers, partner
from sparse_lightning.patterns.pattern import Attachment, Pattern, as_globs


@dataclass(frozen=True)
class Filters(Pattern):
    """Whole filters of convolutions, with their biases.

    What matches and is no convolution is passed over, and so are convolutions that an earlier pattern took.
    Without `norm` and `into` a pruned filter still gives a constant channel, that of the norm's bias; with both
    it can be removed.

    Args:
        match: a glob of modules or weights, a regular expression after `re:`, or a list of such.
        norm: a glob of the norm behind each convolution, paired by what the wildcards stand for: its weight and
            bias go along.
        into: a glob of the layer that reads the channels, paired likewise: its inputs go along.

    Example:
        >>> from torch import nn
        >>> cnn = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
        >>> [found] = Filters("0", norm="1", into="3").resolve(Names(cnn))
        >>> found.scope.numblk_per_scope(), found.scope.blocks()[0].numel_per_block()
        (8, 66)
    """

    match: str | Sequence[str]
    norm: str | None = None
    into: str | None = None

    label: ClassVar[str] = "filters"

    def __post_init__(self) -> None:
        object.__setattr__(self, "match", as_globs(self.match))

    def resolve(self, names: Names) -> list[Attachment]:
        """A scope for each convolution."""
        found = self._convolutions(names)
        norms = find_by_text(self, names, self.norm) if self.norm else None
        readers = find_by_text(self, names, self.into) if self.into else None
        made = []
        for name in self.left_over(names, list(found)):
            layer, text = found[name]
            pieces = self._filters(layer)
            units = layer.rows().shape[0]
            if norms is not None:
                pieces += self._norm(partner(self, layer, text, "norm", norms), layer, units)
            if readers is not None:
                pieces.append(self._reader(partner(self, layer, text, "into", readers), layer, units))
            made.append(couple(self, name if len(pieces) == 1 else f"{layer.title} ({self.label})", pieces))
        return made

    def _convolutions(self, names: Names) -> dict[str, tuple[Layer, tuple[str, ...]]]:
        """The convolutions by the names of their weights, with the text of the wildcards; a tied one once."""
        found = [pair for glob in self.match for pair in find_layers(self, names, glob)]
        once: dict[int, tuple[Layer, tuple[str, ...]]] = {}
        for layer, text in found:
            if layer.weight.ndim > 2:
                once.setdefault(id(layer.weight), (layer, text))
        if not once:
            layer = found[0][0]
            raise PatternError(
                f"{self} matches no convolution: {layer.name} has the shape {tuple(layer.weight.shape)}, and the "
                "weight of a convolution has 3 or more dimensions. For linear layers there is Neurons"
            )
        return {layer.name: (layer, text) for layer, text in once.values()}

    def _filters(self, layer: Layer) -> list[Piece]:
        with self.refusing(layer.name, layer.weight):
            return row_pieces(layer, layer.rows().shape[0])

    def _norm(self, norm: Layer, layer: Layer, units: int) -> list[Piece]:
        if tuple(norm.weight.shape) != (units,):
            raise self._disagreement(norm, layer, units, "norm")
        return row_pieces(norm, units)

    def _reader(self, reader: Layer, layer: Layer, units: int) -> Piece:
        with self.refusing(reader.name, reader.weight):
            if reader.weight.ndim < 2 or not reads(reader, units, layer):
                raise self._disagreement(reader, layer, units, "into")
            return column_piece(reader, units)

    def _disagreement(self, other: Layer, layer: Layer, units: int, role: str) -> PatternError:
        return PatternError(
            f"{self}: {other.name} of shape {tuple(other.weight.shape)} does not fit the {units} filters of "
            f"{layer.name} of shape {tuple(layer.weight.shape)}. Name with {role} the layer that follows it"
        )
