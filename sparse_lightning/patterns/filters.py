"""Filters: whole filters of convolutions, with the norm that follows and the layer that reads their channels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import nn

from sparse_lightning.errors import PatternError
from sparse_lightning.patterns.coupled import Piece, column_piece, couple, reads, row_pieces
from sparse_lightning.patterns.layer import Layer, find_by_text, find_layers, partner
from sparse_lightning.patterns.names import Names
from sparse_lightning.patterns.pattern import Attachment, Globs, Pattern, as_globs

CHANNELS_APART = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
"""Norms that treat each channel by itself: others compute statistics over several channels, pruned ones included."""


@dataclass(frozen=True)
class Filters(Pattern):
    """Filter (channel) pruning: whole filters of convolutions, with their biases.

    Matches that are not convolutions are skipped; so are convolutions that an earlier pattern claimed. Without `norm`
    and `into`, a pruned filter still outputs a constant channel, the norm's bias; with both, it can be removed.

    Args:
        match: a glob of modules or weights, a regular expression after `re:`, or a list of them.
        norm: a glob of the norms after the convolutions, paired by the text that the wildcards match: weight and bias
            are pruned with the filter. Batch and instance norms only: others, such as group and layer norms, compute
            statistics over several channels, so that a pruned filter would change the others.
        into: a glob of the layers that read the channels, paired in the same way: the inputs are pruned with the
            filter.

    Example:
        >>> from torch import nn
        >>> cnn = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
        >>> [found] = Filters("0", norm="1", into="3").resolve(Names(cnn))
        >>> found.scope.numblk_per_scope(), found.scope.blocks()[0].numel_per_block()
        (8, 66)
    """

    match: Globs
    norm: str | None = None
    into: str | None = None

    label: ClassVar[str] = "filters"

    def __post_init__(self) -> None:
        object.__setattr__(self, "match", as_globs(self.match))

    def resolve(self, names: Names) -> list[Attachment]:
        """Return one attachment for each convolution."""
        found = self._convolutions(names)
        norms = find_by_text(self, names, self.norm) if self.norm else None
        readers = find_by_text(self, names, self.into) if self.into else None
        made = []
        rows = {name: layer.rows() for name, (layer, _) in found.items()}
        for name in self.drop_claimed(names, list(found), rows):
            layer, text = found[name]
            pieces = self._filters(layer)
            units = layer.rows().shape[0]
            if norms is not None:
                norm = partner(self, layer, text, "norm", norms)
                self._check_apart(names, norm)
                pieces += [replace(piece, reads=readers is None) for piece in self._norm(norm, layer, units)]
            if readers is not None:
                pieces.append(self._reader(partner(self, layer, text, "into", readers), layer, units))
            made.append(couple(self, name if len(pieces) == 1 else f"{layer.title} ({self.label})", pieces))
        return made

    def _convolutions(self, names: Names) -> dict[str, tuple[Layer, tuple[str, ...]]]:
        """Return convolutions by the names of their weights, with the text that wildcards match; a tied one once."""
        found = [pair for glob in self.match for pair in find_layers(self, names, glob)]
        once: dict[int, tuple[Layer, tuple[str, ...]]] = {}
        for layer, text in found:
            if layer.weight.ndim > 2:
                once.setdefault(id(layer.weight), (layer, text))
        if not once:
            layer = found[0][0]
            raise PatternError(
                f"{self} matches no convolution: {layer.name} has the shape {tuple(layer.weight.shape)}, and the "
                "weight of a convolution has 3 or more dimensions. For linear layers, use Neurons"
            )
        return {layer.name: (layer, text) for layer, text in once.values()}

    def _filters(self, layer: Layer) -> list[Piece]:
        with self.error_context(layer.name, layer.weight):
            return row_pieces(layer, layer.rows().shape[0])

    def _check_apart(self, names: Names, norm: Layer) -> None:
        """Raise a PatternError unless a norm is known to treat each channel by itself."""
        module = names.modules.get(norm.name.rpartition(".")[0])
        if not isinstance(module, CHANNELS_APART):
            raise PatternError(
                f"{self}: {norm.title} is a {type(module).__name__}, which may compute statistics over several "
                "channels: a pruned filter would change the output of the others. Use BatchNorm or InstanceNorm after "
                "the convolution; or omit norm and into, so that filters are zeroed and not removed"
            )

    def _norm(self, norm: Layer, layer: Layer, units: int) -> list[Piece]:
        if tuple(norm.weight.shape) != (units,):
            raise self._disagreement(norm, layer, units, "norm")
        return row_pieces(norm, units)

    def _reader(self, reader: Layer, layer: Layer, units: int) -> Piece:
        with self.error_context(reader.name, reader.weight):
            if reader.weight.ndim < 2 or not reads(reader, units, layer):
                raise self._disagreement(reader, layer, units, "into")
            return column_piece(reader, units)

    def _disagreement(self, other: Layer, layer: Layer, units: int, role: str) -> PatternError:
        return PatternError(
            f"{self}: {other.name} of shape {tuple(other.weight.shape)} does not fit the {units} filters of "
            f"{layer.name} of shape {tuple(layer.weight.shape)}. Set {role} to the layer that follows"
        )
