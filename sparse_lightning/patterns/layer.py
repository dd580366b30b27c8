"""Layer: a weight as outputs × inputs, however its module stores it; and how globs find and pair layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from torch import Tensor

from sparse_lightning.errors import PatternError
from sparse_lightning.layout import Layout
from sparse_lightning.patterns.names import Names, captures, narrowed, nearest
from sparse_lightning.patterns.pattern import Pattern


@dataclass(frozen=True)
class Layer:
    """A weight with its bias, and which of its dimensions are outputs and inputs.

    Args:
        name: the name of the weight.
        weight: the weight.
        bias_name: the name of the bias; None without one.
        bias: the bias; None without one.
        transposed: inputs come first, as in transposed convolutions and in Hugging Face's Conv1D.
        groups: the groups of a convolution.
    """

    name: str
    weight: Tensor
    bias_name: str | None = None
    bias: Tensor | None = None
    transposed: bool = False
    groups: int = 1

    @classmethod
    def at(cls, names: Names, name: str) -> Layer:
        """Return the layer whose weight has this name."""
        module = names.modules.get(name.rpartition(".")[0])
        bias_name = f"{name.removesuffix('weight')}bias" if name.endswith("weight") else ""
        bias = names.parameters.get(bias_name)
        transposed = type(module).__name__ == "Conv1D" or getattr(module, "transposed", False) is True
        groups = int(getattr(module, "groups", 1))
        return cls(name, names.parameters[name], bias_name if bias is not None else None, bias, transposed, groups)

    @property
    def title(self) -> str:
        """The name of the module if the weight is called `weight`, else the name of the weight."""
        return self.name.removesuffix(".weight")

    def upright(self) -> Layout:
        """Return the layout `(outputs, inputs, …)` of the weight, groups ignored."""
        layout = Layout.of(self.weight)
        return layout.permute((1, 0, *range(2, layout.ndim))) if self.transposed else layout

    def rows(self) -> Layout:
        """Return the weights that compute each output: `(outputs, …)`."""
        layout = Layout.of(self.weight)
        return _second_first(layout, self.groups) if self.transposed else layout

    def columns(self) -> Layout:
        """Return the weights that read each input: `(inputs, …)`."""
        layout = Layout.of(self.weight)
        return layout if self.transposed else _second_first(layout, self.groups)


def _second_first(layout: Layout, groups: int) -> Layout:
    """Move the second dimension, which restarts in each group, to the front as one dimension over all groups."""
    apart = layout.split(0, (groups, -1))
    return apart.permute((0, 2, 1, *range(3, apart.ndim))).merge((0, 1))


def find_layers(pattern: Pattern, names: Names, glob: str) -> list[tuple[Layer, tuple[str, ...]]]:
    """Return the layers that match a glob of modules or weights, each with the text that the wildcards match."""
    modules = {f"{name}.weight".lstrip("."): text for name, text in names.find_modules(glob).items()}
    found = {name: text for name, text in modules.items() if name in names.parameters} or names.find(glob)
    if not found:
        known = [*names.parameters, *(name for name in names.modules if f"{name}.weight" in names.parameters)]
        raise PatternError(f"{pattern}: {glob!r} matches no layer with a weight{nearest(glob, known)}")
    return [(Layer.at(names, name), text) for name, text in found.items()]


def find_by_text(pattern: Pattern, names: Names, glob: str) -> dict[tuple[str, ...], Layer]:
    """Return the layers that match a glob, by the text that its wildcards match."""
    layers: dict[tuple[str, ...], Layer] = {}
    for layer, text in find_layers(pattern, names, glob):
        if text in layers:
            raise PatternError(
                f"{pattern}: {glob!r} matches both {layers[text].name} and {layer.name} with the same wildcard text "
                f"{text}, by which layers are paired. Name one of them, or add a wildcard or a group"
            )
        layers[text] = layer
    return layers


SAME_TEXT = "Use globs whose wildcards match the same text"


def partner(
    pattern: Pattern,
    layer: Layer,
    text: tuple[str, ...],
    role: str,
    found: dict[tuple[str, ...], Layer],
    advice: str = SAME_TEXT,
) -> Layer:
    """Return the layer of another role whose wildcards match the same text; an error ends with the advice."""
    if text not in found:
        raise PatternError(
            f"{pattern}: {layer.title} has no partner in {role}: no layer there has the wildcard text {text}, only "
            f"{', '.join(map(str, list(found)[:3]))}. {advice}"
        )
    return found[text]


def find_together(pattern: Pattern, names: Names, globs: dict[str, str | None]) -> list[dict[str, Layer]]:
    """Return the layers of all roles for each text that the wildcards match, one per role; tied layers once."""
    given = {role: glob for role, glob in globs.items() if glob is not None}
    found = {role: find_by_text(pattern, names, glob) for role, glob in given.items()}
    advice = SAME_TEXT if len({frozenset(texts) for texts in found.values()}) == 1 else _advice(names, given)
    texts = {text: layer for layers in found.values() for text, layer in layers.items()}
    return once(
        [
            {role: partner(pattern, layer, text, role, layers, advice) for role, layers in found.items()}
            for text, layer in texts.items()
        ]
    )


def _advice(names: Names, globs: Mapping[str, str]) -> str:
    """Return the end of an error message: expressions whose wildcards match the same text in all roles, if some do."""
    known = [name for name in names.modules if f"{name}.weight" in names.parameters] + list(names.parameters)
    for star in _NARROWER:
        narrow = {role: narrowed(glob, star) for role, glob in globs.items()}
        texts = [{text for name in known if (text := captures(one, name)) is not None} for one in narrow.values()]
        if texts[0] and all(found == texts[0] for found in texts):
            given = ", ".join(f"{role}={expression!r}" for role, expression in narrow.items())
            return f"A * also matches dots, and so other layers: pass {given}"
    return SAME_TEXT


_NARROWER = (r"([^.]+)", r"(.*\.\d+)", r"(\d+)")
"""What a * may stand for in place of any text: one part of a name, a name that ends in a number, a number."""


def once(groups: Sequence[dict[str, Layer]]) -> list[dict[str, Layer]]:
    """Drop groups of layers that have the same, tied weights as an earlier group."""
    kept: dict[tuple[int, ...], dict[str, Layer]] = {}
    for group in groups:
        kept.setdefault(tuple(id(layer.weight) for layer in group.values()), group)
    return list(kept.values())


def common_owner(*layers: Layer) -> str:
    """Return the name of the innermost module that contains all of these layers."""
    levels = zip(*(layer.title.split(".")[:-1] for layer in layers), strict=False)
    return ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))
