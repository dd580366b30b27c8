"""Proof: with random weights, zeroing the slices of units and removing the units give the same outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from sparse_lightning.compat.torch import leaves, map_leaves
from sparse_lightning.errors import CouplingError
from sparse_lightning.graph.analysis import Analysis
from sparse_lightning.graph.families import Family
from sparse_lightning.graph.removal import Removal
from sparse_lightning.graph.solve import Solution
from sparse_lightning.layout import Layout

TOLERANCE = 1e-12
"""The largest difference, relative to the largest output."""


class Proof:
    """Random float64 weights for a traced model, on which removals are tried.

    Args:
        analysis: of the model, whose parameters are not changed.
        solution: the classes of its atoms.
        seed: of the weights.
    """

    def __init__(self, analysis: Analysis, solution: Solution, seed: int = 0) -> None:
        self._analysis, self._solution = analysis, solution
        traced = analysis.traced
        self._inputs = traced.inputs.on(torch.device("cpu")).of_dtype(torch.float64)
        generator = torch.Generator().manual_seed(seed)
        held = {**traced.program.state_dict, **traced.program.constants}
        self._state = {
            name: _random(held.get(name), name in analysis.parameters, _shape(analysis, name), generator)
            for name in analysis.tensors
        }

    def error(self, removed: Sequence[tuple[Family, Sequence[int]]]) -> float:
        """Return the largest difference of the outputs without these units, relative to the largest output."""
        zeroed = dict(self._state)
        for family, units in removed:
            for piece in family.slices:
                zeroed[piece.name] = _without(zeroed[piece.name], piece.layout, units)
        masked = self._run(Removal(self._analysis, self._solution, []), zeroed)
        small = self._run(Removal(self._analysis, self._solution, removed), self._state)
        return max((_difference(a, b) for a, b in zip(masked, small, strict=True)), default=0.0)

    def _run(self, removal: Removal, state: dict[str, Tensor]) -> list[Tensor]:
        module = in_float64(removal.module(state))
        with torch.no_grad():
            made = module(*self._inputs.args, **self._inputs.kwargs)
        return [leaf for leaf in leaves(made) if isinstance(leaf, Tensor)]

    def check(self, family: Family) -> None:
        """Try one unit, then every other one.

        Raises:
            CouplingError: if the outputs differ.
        """
        for units in ([family.units - 1], list(range(0, family.units, 2))):
            error = self.error([(family, units)]) if len(units) < family.units else 0.0
            if not error <= TOLERANCE:
                raise CouplingError(
                    f"{family.name}: without the units {units[:4]} the outputs differ by {error:.1e} from those with "
                    "zero weights. This is a fault of a rule in sparse_lightning.graph: exclude this family, and "
                    "report it"
                )


def in_float64(module: fx.GraphModule) -> fx.GraphModule:
    """Replace floating-point types by float64 in a graph, and in the graphs inside of it, in place."""
    for node in module.graph.nodes:
        node.args, node.kwargs = map_leaves(_wide, (node.args, node.kwargs))
    module.recompile()
    for child in module.children():
        if isinstance(child, fx.GraphModule):
            in_float64(child)
    return module


def _wide(item: Any) -> Any:
    if isinstance(item, torch.dtype) and item.is_floating_point:
        return torch.float64
    return torch.device("cpu") if isinstance(item, torch.device) else item


def _shape(analysis: Analysis, name: str) -> list[int]:
    return [len(ids) for ids in analysis.tensors[name].dims if ids is not None]


def _random(held: Any, is_parameter: bool, shape: list[int], generator: torch.Generator) -> Tensor:
    """Return a random parameter; a buffer or constant as it is, or positive numbers if it is on the meta device."""
    if isinstance(held, Tensor) and not is_parameter:
        if not held.is_meta:
            return held.double().cpu() if held.is_floating_point() else held.cpu()
        if not held.is_floating_point():
            return torch.zeros(shape, dtype=held.dtype)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    size = max(1, values.numel() // max(1, shape[0] if shape else 1))
    return values / math.sqrt(size) + (0.1 if is_parameter else 2.0)


def _without(tensor: Tensor, layout: Any, units: Sequence[int]) -> Tensor:
    """Return a copy of a contiguous tensor with the slices of some units zeroed."""
    copied = tensor.clone(memory_format=torch.contiguous_format)
    slices = layout(Layout.of(copied)).on(copied)
    slices[torch.as_tensor(list(units))] = 0
    return copied


def _difference(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    if not one.is_floating_point():
        return 0.0 if torch.equal(one, other) else float("inf")
    scale = float(one.abs().max()) if one.numel() else 0.0
    gap = float((one - other).abs().max()) if one.numel() else 0.0
    return gap if scale == 0 else gap / scale
