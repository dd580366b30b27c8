"""Experts whose weights are stacked in one tensor, `(experts, …)`, as in today's mixture-of-experts models."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparse_lightning.errors import PatternError
from sparse_lightning.layout import Layout
from sparse_lightning.patterns.coupled import Piece
from sparse_lightning.patterns.layer import Layer
from sparse_lightning.patterns.names import Names
from sparse_lightning.patterns.pattern import Pattern


def is_stacked(names: Names, layer: Layer) -> bool:
    """Whether a weight has a matrix for each expert: three dimensions, and no convolution that owns it."""
    owner = names.modules.get(layer.name.rpartition(".")[0])
    return layer.weight.ndim == 3 and not hasattr(owner, "kernel_size")


def expert_pieces(pattern: Pattern, names: Names, makers: Sequence[Layer], down: Layer) -> list[Piece]:
    """Return the slices of each neuron of each expert, as layouts `(experts, neurons, …)`.

    Matrices are `(outputs, inputs)` or transposed: an attribute `is_transposed` of the module decides, as modules of
    `transformers` have it, otherwise the sizes. In a fused projection the gates come first, unless the module has an
    attribute `is_concatenated` that is False: gates and values then alternate.

    Args:
        pattern: for errors.
        names: the model.
        makers: the layers that compute the neurons; a single one may be a fused gate and up projection.
        down: the layer that reads them.
    """
    owner = names.modules.get(down.name.rpartition(".")[0])
    transposed = _is_transposed(pattern, getattr(owner, "is_transposed", None), makers, down)
    neurons = _upright(down.weight, transposed).shape[2]
    alternate = getattr(owner, "is_concatenated", True) is False
    pieces = []
    for layer in makers:
        pieces.append(Piece(layer.name, layer.weight, _rows(_upright(layer.weight, transposed), neurons, alternate)))
        bias = names.parameters.get(f"{layer.name}_bias")
        if bias is not None:
            pieces.append(Piece(f"{layer.name}_bias", bias, _rows(Layout.of(bias), neurons, alternate)))
    columns = _upright(down.weight, transposed).permute((0, 2, 1))
    return [*pieces, Piece(down.name, down.weight, columns, reads=True)]


def _upright(weight: Tensor, transposed: bool) -> Layout:
    """Return the layout `(experts, outputs, inputs)`."""
    layout = Layout.of(weight)
    return layout.permute((0, 2, 1)) if transposed else layout


def _rows(layout: Layout, neurons: int, alternate: bool) -> Layout:
    """Split the outputs into `(neurons, parts)`, and return `(experts, neurons, parts, …)`."""
    parts = layout.shape[1] // neurons
    if alternate:
        return layout.split(1, (neurons, parts))
    apart = layout.split(1, (parts, neurons))
    return apart.permute((0, 2, 1, *range(3, apart.ndim)))


def _is_transposed(pattern: Pattern, known: bool | None, makers: Sequence[Layer], down: Layer) -> bool:
    fitting = [way for way in ((False, True) if known is None else (known,)) if _fits(makers, down, way)]
    if len(fitting) == 1:
        return fitting[0]
    shapes = ", ".join(f"{layer.name} {tuple(layer.weight.shape)}" for layer in (*makers, down))
    why = "fit both as they are and transposed" if fitting else "do not fit"
    raise PatternError(
        f"{pattern}: the experts of {shapes} {why}: up and gate must have the shape (experts, neurons, size), or twice "
        "as many neurons if they are fused, and down (experts, size, neurons). Change the names, or use Custom"
    )


def _fits(makers: Sequence[Layer], down: Layer, transposed: bool) -> bool:
    experts, size, neurons = _upright(down.weight, transposed).shape
    fused = (neurons, 2 * neurons) if len(makers) == 1 else (neurons,)
    shapes = [_upright(layer.weight, transposed).shape for layer in makers]
    return all(made[0] == experts and made[1] in fused and made[2] == size for made in shapes)
