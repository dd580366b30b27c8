"""Removal: a smaller program, in which units are not zero but absent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from sparse_lightning.graph.analysis import Analysis
from sparse_lightning.graph.atoms import Ids
from sparse_lightning.graph.call import RESIZES, Resizing, operation_name
from sparse_lightning.graph.families import Family
from sparse_lightning.graph.solve import Solution
from sparse_lightning.layout.cutting import Indices

_CHECKS = ("_assert", "sym_constrain")


class Removal:
    """What is left of a traced model without some units.

    Args:
        analysis: of the model.
        solution: the classes of its atoms.
        removed: families with the numbers of the units to remove.
    """

    def __init__(self, analysis: Analysis, solution: Solution, removed: Sequence[tuple[Family, Sequence[int]]]) -> None:
        self._analysis = analysis
        gone = np.zeros(len(solution.reason), np.bool_)
        for family, units in removed:
            gone[family.labels[np.asarray(units, dtype=np.int64)]] = True
        self._kept: NDArray[np.bool_] = ~gone[solution.labels]
        self._left: dict[str, tuple[Indices, ...]] = {}

    def names(self) -> list[str]:
        """Return the names of all parameters, buffers and constants; a tied one once."""
        return list(self._analysis.tensors)

    def kept(self, name: str) -> tuple[Indices, ...]:
        """Return for each dimension of a parameter, buffer or constant the indices that are left."""
        first = self._analysis.aliases.get(name, name)
        if first not in self._left:
            dims = self._analysis.tensors[first].dims
            self._left[first] = tuple(np.flatnonzero(self.keeps(ids)) for ids in dims if ids is not None)
        return self._left[first]

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """Return what is left of a parameter, buffer or constant, or of a tensor of its shape."""
        for dim, indices in enumerate(self.kept(name)):
            if len(indices) < tensor.shape[dim]:
                tensor = tensor.index_select(dim, torch.from_numpy(indices).to(tensor.device))
        return tensor

    def keeps(self, ids: Ids | None) -> NDArray[np.bool_]:
        """Return for each coordinate whether it is kept."""
        return np.ones(0, np.bool_) if ids is None else self._kept[ids]

    def module(self, state: Mapping[str, Tensor] | None = None) -> fx.GraphModule:
        """Return the smaller program as a module with the arguments of the model.

        Args:
            state: parameters, buffers and constants of the whole model by name; None for those of the traced model.
        """
        smaller: fx.GraphModule = self._analysis.traced.program.module(check_guards=False)
        for node in list(smaller.graph.nodes):
            if node.op == "get_attr":
                self._cut_attribute(smaller, str(node.target), state)
            elif node.op == "call_function":
                self._resize(node)
        smaller.graph.lint()
        smaller.recompile()
        return smaller

    def _cut_attribute(self, smaller: fx.GraphModule, name: str, state: Mapping[str, Tensor] | None) -> None:
        path, _, last = name.rpartition(".")
        owner = smaller.get_submodule(path)
        old = getattr(owner, last)
        first = self._analysis.aliases.get(name, name)
        if not isinstance(old, Tensor) or first not in self._analysis.tensors:
            return
        whole = old if state is None else state[first]
        small = self.cut(first, whole.detach())
        is_parameter = isinstance(old, nn.Parameter)
        setattr(owner, last, nn.Parameter(small, old.requires_grad) if is_parameter else small)

    def _resize(self, node: fx.Node) -> None:
        name = operation_name(node)
        if any(check in name for check in _CHECKS) and not node.users:
            node.graph.erase_node(node)
        elif name in RESIZES:
            RESIZES[name](Resizing(node, self._values(node), self.keeps))

    def _values(self, node: fx.Node) -> dict[str, Any]:
        """Return values by the names of nodes of the module; parameters have other names there than in the program."""
        values = self._analysis.values
        named = {n.name: self._of_attribute(n) for n in node.all_input_nodes if n.op == "get_attr"}
        return {**values, **{name: value for name, value in named.items() if value is not None}}

    def _of_attribute(self, node: fx.Node) -> Any:
        name = str(node.target)
        return self._analysis.tensors.get(self._analysis.aliases.get(name, name))
