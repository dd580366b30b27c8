"""couplings: the families of a model, and the refusals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import nn

from sparse_lightning.compat.plain_names import plain_name
from sparse_lightning.errors import CouplingError, did_you_mean
from sparse_lightning.graph.analysis import Analysis, analyse
from sparse_lightning.graph.families import Family, Refusal, find_families
from sparse_lightning.graph.inputs import Inputs
from sparse_lightning.graph.proof import Proof
from sparse_lightning.graph.removal import Removal
from sparse_lightning.graph.solve import Solution, solve
from sparse_lightning.graph.trace import trace
from sparse_lightning.progress import stage, stages

STAGES = 2
"""Of the progress bar."""

Preference = Literal["outer", "inner"]


def couplings(
    model: nn.Module, inputs: Inputs = None, *, prefer: Preference = "outer", verify: bool = False
) -> Couplings:
    """Find the units of a model that can be removed: heads, neurons, channels, with every slice that belongs to them.

    The model is traced by `torch.export` in eval mode; it is not changed, and may be on the meta device.

    Args:
        model: any module.
        inputs: a tuple of positional or a dict of keyword arguments; None takes `example_input_array`, then
            `dummy_inputs` of the model.
        prefer: which of nested units to take, such as heads ("outer") or dimensions of all heads ("inner").
        verify: try each family on random weights: zeroing units and removing them must give the same outputs.

    Raises:
        CouplingError: if there are no inputs, if torch.export cannot trace the model, or if a family is wrong.

    Example:
        >>> import torch
        >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> found = couplings(mlp, (torch.randn(2, 4),))
        >>> [(family.name, family.units, family.parameters()) for family in found]
        [('0 (units)', 8, ['0.weight', '0.bias', '2.weight'])]
    """
    if prefer not in ("outer", "inner"):
        raise CouplingError(f"prefer={prefer!r} is not a preference: use 'outer' or 'inner'")
    with stages("couplings", STAGES, model):
        stage(f"tracing {type(model).__name__}")
        traced = trace(model, inputs)
        stage("finding the units that can be removed")
        found = Couplings.of(analyse(traced), prefer)
    if verify:
        found.verify()
    return found


@dataclass(frozen=True, repr=False)
class Couplings:
    """The families of a model, in the order of its parameters; iterating gives each `Family`.

    Args:
        families: units that can be removed.
        refusals: units that cannot, with the reasons.
        analysis: of the traced model.
        solution: the classes of its atoms.
    """

    families: tuple[Family, ...]
    refusals: tuple[Refusal, ...]
    analysis: Analysis
    solution: Solution

    @classmethod
    def of(cls, analysis: Analysis, prefer: Preference) -> Couplings:
        """Return the families of an analysed model."""
        solution = solve(analysis.atoms, prefer)
        families, refusals = find_families(analysis, solution)
        return cls(tuple(families), tuple(refusals), analysis, solution)

    def __iter__(self) -> Iterator[Family]:
        return iter(self.families)

    def __len__(self) -> int:
        return len(self.families)

    def __getitem__(self, name: str) -> Family:
        found = self._by_name.get(name)
        if found is None:
            raise CouplingError(f"there is no family {name!r}{did_you_mean(name, self._by_name)}")
        return found

    @cached_property
    def _by_name(self) -> dict[str, Family]:
        return {family.name: family for family in self.families}

    def reasons(self) -> list[str]:
        """Return why units cannot be removed, each reason once; without refusals, for each parameter its own."""
        if self.refusals:
            return list(dict.fromkeys(str(refusal.reason) for refusal in self.refusals))
        found = []
        for name in self.analysis.parameters:
            dims = [ids for ids in self.analysis.tensors[name].dims if ids is not None and len(ids)]
            found += [f"{plain_name(name)}: {self.solution.why(self.solution.labels[ids[0]]).why}" for ids in dims[:1]]
        return found or ["the model has no parameters with units"]

    def preferring(self, prefer: Preference) -> Couplings:
        """Return the families of the same trace with another choice between nested units."""
        return Couplings.of(self.analysis, prefer)

    def removal(self, units: Mapping[str, Sequence[int]]) -> Removal:
        """Return what is left of the model without some units of each family.

        Args:
            units: the numbers of the units to remove, by the name of their family.
        """
        return Removal(self.analysis, self.solution, [(self[name], numbers) for name, numbers in units.items()])

    def verify(self, seed: int = 0) -> None:
        """Check on random weights that zeroing units and removing them give the same outputs.

        Raises:
            CouplingError: if they do not.
        """
        proof = Proof(self.analysis, self.solution, seed)
        with stages("verify", len(self.families)):
            for family in self.families:
                stage(family.name)
                proof.check(family)

    def __str__(self) -> str:
        from sparse_lightning.graph.couplings_table import couplings_table

        return couplings_table(self.families, self.refusals)

    __repr__ = __str__
