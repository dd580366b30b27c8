"""Coupled: every unit that can be removed, found in the traced model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from sparse_lightning.compat.plain_names import is_of_adapter, plain_name
from sparse_lightning.errors import CouplingError, PatternError
from sparse_lightning.graph.couplings import Couplings, couplings
from sparse_lightning.graph.families import Family
from sparse_lightning.graph.inputs import Inputs
from sparse_lightning.layout import Layout
from sparse_lightning.patterns.coupled import Piece, couple
from sparse_lightning.patterns.names import Names, matches, nearest
from sparse_lightning.patterns.pattern import Attachment, Globs, Pattern, as_globs


@dataclass(frozen=True)
class Coupled(Pattern):
    """Heads, neurons, channels and experts with all their slices, found by `couplings`: no names to spell.

    The model is traced once, in eval mode. Each family is one scope, and a unit of it one block. Families may cross in
    a parameter: a weight is zero where a unit of any of its families is pruned. With LoRA, the families are those of
    the model without it: adapters are pruned with the units of their layers, and their ranks are not units.

    Args:
        match: globs of families or of parameters; a family is taken if its name or one of its parameters matches.
        inputs: a tuple of positional or a dict of keyword arguments to trace the model with; None takes the
            `example_input_array` of the model, then its `dummy_inputs`.
        exclude: globs of families or parameters that are left out.
        prefer: which of nested units to take, such as heads ("outer") or dimensions of all heads ("inner").

    Example:
        >>> import torch
        >>> from torch import nn
        >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> [found] = Coupled(inputs=(torch.randn(2, 4),)).resolve(Names(mlp))
        >>> found.name, found.scope.numblk_per_scope(), [spec.name for spec in found.scope.blocks()[0].blocks()]
        ('0 (units)', 8, ['0.weight', '0.bias', '2.weight'])
    """

    match: Globs = "*"
    inputs: Inputs = field(default=None, repr=False, compare=False)
    exclude: Globs | None = None
    prefer: Literal["outer", "inner"] = "outer"

    label: ClassVar[str] = "coupled"

    def __str__(self) -> str:
        given = [("match", self.match, "*"), ("exclude", self.exclude, None), ("prefer", self.prefer, "outer")]
        return f"Coupled({', '.join(f'{name}={value!r}' for name, value, default in given if value != default)})"

    def resolve(self, names: Names) -> list[Attachment]:
        """Return one attachment for each family that matches."""
        try:
            found = couplings(names.model, self.inputs, prefer=self.prefer)
        except CouplingError as error:
            raise PatternError(f"{self}: {error}") from error
        taken = [family for family in found if self._takes(names, family)]
        if not taken:
            raise PatternError(self._nothing(found))
        return [replace(self._attach(names, family), traced=found) for family in taken]

    def _takes(self, names: Names, family: Family) -> bool:
        own = [name for name in family.parameters() if not is_of_adapter(name)]
        texts = [family.name, *map(names.name_in_model, own), *map(plain_name, own), *own]
        excluded = () if self.exclude is None else as_globs(self.exclude)
        return _any_matches(as_globs(self.match), texts) and not _any_matches(excluded, texts)

    def _nothing(self, found: Couplings) -> str:
        if found.families:
            names = [family.name for family in found]
            return f"{self} matches no family{nearest(as_globs(self.match)[0], names)}"
        return f"{self} finds no units that can be removed: {'; '.join(found.reasons()[:3])}. Use Blocks or NM instead"

    def _attach(self, names: Names, family: Family) -> Attachment:
        pieces = []
        for part in family.slices:
            name = names.name_in_model(part.name)
            parameter = names.parameters[name]
            pieces.append(Piece(name, parameter, part.layout(Layout.of(parameter)), part.reads))
        return couple(self, family.name, pieces)


def _any_matches(globs: Sequence[str], texts: Sequence[str]) -> bool:
    return any(matches(glob, text) for glob in globs for text in texts)
