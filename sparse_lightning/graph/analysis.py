"""Analysis: walks the traced model, and applies the rule of each operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, fx

from sparse_lightning.compat.plain_names import plain_name
from sparse_lightning.graph import rules
from sparse_lightning.graph.atoms import Atoms, Ids
from sparse_lightning.graph.call import RULES, Call, Result, Rule, operation_name, plain_sizes
from sparse_lightning.graph.rules.shapes import KEEPS_INNER, WITH_DYNAMIC
from sparse_lightning.graph.trace import TracedModel
from sparse_lightning.graph.traced_value import TracedValue

__all__ = ["Analysis", "analyse", "rules"]

UNKNOWN = "an operation without a rule: it may mix any of its inputs"
OTHER_ARGUMENTS = "its rule does not take these arguments: it may mix any of its inputs"
OTHER_SHAPE = "its rule does not give a result of its shape: it may mix any of its inputs"
_IGNORED = ("_assert", "sym_constrain", "sym_size", "sym_numel", "sym_stride", "guard")


@dataclass
class Analysis:
    """What the rules say about a traced model.

    Args:
        traced: the model.
        atoms: all atoms with their relations.
        values: of each node, by name.
        tensors: atoms of each dimension of each parameter, buffer and constant, by name; tied ones have one name.
        parameters: the names of parameters, each tied one once.
        aliases: the name in `tensors` of each name.
    """

    traced: TracedModel
    atoms: Atoms = field(default_factory=Atoms)
    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, TracedValue] = field(default_factory=dict)
    parameters: list[str] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)


def analyse(traced: TracedModel) -> Analysis:
    """Apply the rule of each operation of a traced model, in order."""
    found = Analysis(traced)
    walk = _Walk(found)
    for node in traced.program.graph.nodes:
        if node.op == "placeholder":
            found.values[node.name] = walk.placeholder(node)
        elif node.op == "call_function":
            found.values[node.name] = walk.call(node)
        elif node.op == "output":
            walk.output(node)
    return found


class _Walk:
    def __init__(self, found: Analysis) -> None:
        self._found, self._atoms = found, found.atoms
        names = found.traced.program.graph_signature
        self._parameters = dict(names.inputs_to_parameters)
        self._buffers = {**names.inputs_to_buffers, **names.inputs_to_lifted_tensor_constants}
        self._first_names = _first_names(found.traced.model)
        found.aliases.update(self._first_names)
        self._used: set[str] = set()

    def placeholder(self, node: fx.Node) -> Any:
        """Return the value of a parameter or buffer; an input of the model is pinned."""
        held: str | None = self._parameters.get(node.name) or self._buffers.get(node.name)
        made = node.meta.get("val")
        if not isinstance(made, Tensor):
            return made
        call = Call(self._atoms, node, "input", "")
        if held is None:
            return self._input(call, made)
        name: str = self._first_names.get(held, held)
        if name not in self._found.tensors:
            is_parameter = node.name in self._parameters
            dims = tuple(call.free(size) for size in plain_sizes(made))
            value = TracedValue(dims, (is_parameter,) * made.ndim, constant=True, fixed=not is_parameter)
            self._found.tensors[name] = value
            self._found.parameters += [name] if is_parameter else []
        if node.users:
            self._used.add(name)
        return self._found.tensors[name]

    def _input(self, call: Call, made: Tensor) -> TracedValue:
        dims = tuple(self._atoms.fresh(size) if isinstance(size, int) else None for size in plain_sizes(made))
        for ids in dims:
            call.pin(ids, "it is an input of the model")
        return TracedValue(dims, (False,) * len(dims))

    def call(self, node: fx.Node) -> Any:
        """Return the value of an operation, by its rule; without one, all that it touches is pinned."""
        name = operation_name(node)
        if name == "getitem":
            source, index = node.args
            assert isinstance(source, fx.Node)
            return self._found.values[source.name][index]
        call = Call(self._atoms, node, name, _module_of(node))
        inputs = [value for value in _leaves(self._values(node.all_input_nodes)) if isinstance(value, TracedValue)]
        made = node.meta.get("val")
        if any(word in name for word in _IGNORED) or not (inputs or _tensors(made)):
            return made
        result = self._applied(call, node, made)
        if isinstance(result, str):
            result = self._unknown(call, inputs, made, result)
        constant, fixed = all(v.constant for v in inputs), all(v.fixed for v in inputs)
        moves = RULES.get(name) in KEEPS_INNER
        for value in inputs:
            for ids in () if moves else value.inner:
                call.pin(ids, WITH_DYNAMIC)
        return _mapped(
            result,
            lambda value: replace(value, constant=constant, fixed=fixed, inner=value.inner if moves else ()),
        )

    def _applied(self, call: Call, node: fx.Node, made: Any) -> Result | str:
        """Return what the rule returns, or why it says nothing about this call."""
        rule = RULES.get(call.operation)
        if rule is None:
            return UNKNOWN
        args = fx.map_arg(node.args, lambda n: self._found.values[n.name])
        kwargs = fx.map_arg(node.kwargs, lambda n: self._found.values[n.name])
        if not _takes(rule, (call, *args), kwargs):
            return OTHER_ARGUMENTS
        result = rule(call, *args, **kwargs)
        return result if _fits(result, made) else OTHER_SHAPE

    def _unknown(self, call: Call, inputs: list[TracedValue], made: Any, why: str) -> Any:
        for value in inputs:
            call.pin_all(value, why)
        if isinstance(made, Tensor):
            return call.pinned(plain_sizes(made))
        if isinstance(made, tuple | list):
            return tuple(call.pinned(plain_sizes(t)) if isinstance(t, Tensor) else t for t in made)
        return None

    def _values(self, nodes: list[fx.Node]) -> list[Any]:
        return [self._found.values.get(node.name) for node in nodes]

    def output(self, node: fx.Node) -> None:
        """Pin the outputs of the model, and parameters that are not used."""
        call = Call(self._atoms, node, "output", "")
        for name in self._found.tensors.keys() - self._used:
            call.pin_all(self._found.tensors[name], "the traced forward pass does not use it", listed=False)
        for value in _leaves(self._values(node.all_input_nodes)):
            if isinstance(value, TracedValue):
                call.pin_all(value, "it is an output of the model")


def _takes(rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        signature(rule).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _first_names(model: torch.nn.Module) -> dict[str, str]:
    """Return the first name of each parameter and buffer, by each of its names."""
    first: dict[int, str] = {}
    names = {}
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            names[name] = first.setdefault(id(tensor), name)
    return names


def _module_of(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return plain_name(str(paths[-1])) if paths else ""


def _tensors(made: Any) -> bool:
    return isinstance(made, Tensor) or (isinstance(made, tuple | list) and any(_tensors(item) for item in made))


def _fits(result: Any, made: Any) -> bool:
    if isinstance(result, tuple) and isinstance(made, tuple | list):
        return len(result) == len(made) and all(_fits(a, b) for a, b in zip(result, made, strict=True))
    return isinstance(result, TracedValue) and isinstance(made, Tensor) and _same_shape(result.dims, made)


def _same_shape(dims: tuple[Ids | None, ...], made: Tensor) -> bool:
    sizes = plain_sizes(made)
    return len(dims) == len(sizes) and all(
        not isinstance(size, int) if ids is None else isinstance(size, int) and len(ids) == size
        for ids, size in zip(dims, sizes, strict=True)
    )


def _leaves(items: Any) -> list[Any]:
    if isinstance(items, tuple | list):
        return [leaf for item in items for leaf in _leaves(item)]
    return [items]


def _mapped(result: Any, change: Callable[[TracedValue], TracedValue]) -> Any:
    if isinstance(result, TracedValue):
        return change(result)
    return tuple(_mapped(item, change) for item in result) if isinstance(result, tuple) else result
