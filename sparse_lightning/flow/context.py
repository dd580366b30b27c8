"""Context: the traced graph of a flow. Symbolic values in, nodes recorded in order, what nothing needs left out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from sparse_lightning.errors import FlowError

if TYPE_CHECKING:
    from sparse_lightning.flow.ops import Op


class FORMAT(Enum):
    """What one entry of a value stands for."""

    ELEMENT = "element"
    """A weight of a block; lives during the run and is never kept as a whole."""
    RAGGED = "ragged"
    """A block, those of all attached parameters end to end; lives during the run."""
    PAGED = "paged"
    """A block, in pages of a preallocated buffer; lives from run to run and in checkpoints."""


@dataclass(frozen=True, eq=False)
class Value:
    """A symbolic value: shape, dtype, device, format and id, no data.

    Its shape is `(entries, D0, D1)`: how many entries there are is known when it runs, the inner shape
    `(D0, D1)` is known now. Python's operators on values record operations.
    """

    context: Context
    id: int
    format: FORMAT
    inner: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    name: str

    @property
    def shape(self) -> tuple[str | int, ...]:
        """The symbol of the entries, then the inner shape."""
        return (self.format.value, *self.inner)

    def __repr__(self) -> str:
        return f"{self.name} (%{self.id}: {self.format.name} {list(self.shape)} {self.dtype} on {self.device})"

    def _operator(self, name: str, *inputs: Any) -> Value:
        made: Value = getattr(import_module("sparse_lightning.flow.ops"), name)()(*inputs)
        return made

    def __add__(self, other: Any) -> Value:
        return self._operator("Add", self, other)

    def __radd__(self, other: Any) -> Value:
        return self._operator("Add", other, self)

    def __sub__(self, other: Any) -> Value:
        return self._operator("Subtract", self, other)

    def __rsub__(self, other: Any) -> Value:
        return self._operator("Subtract", other, self)

    def __mul__(self, other: Any) -> Value:
        return self._operator("Multiply", self, other)

    def __rmul__(self, other: Any) -> Value:
        return self._operator("Multiply", other, self)

    def __truediv__(self, other: Any) -> Value:
        return self._operator("Divide", self, other)

    def __rtruediv__(self, other: Any) -> Value:
        return self._operator("Divide", other, self)

    def __neg__(self) -> Value:
        return self._operator("Negate", self)

    def __abs__(self) -> Value:
        return self._operator("Abs", self)

    def __gt__(self, other: Any) -> Value:
        return self._operator("Greater", self, other)

    def __ge__(self, other: Any) -> Value:
        return self._operator("GreaterEqual", self, other)

    def __lt__(self, other: Any) -> Value:
        return self._operator("Less", self, other)

    def __le__(self, other: Any) -> Value:
        return self._operator("LessEqual", self, other)

    def __bool__(self) -> bool:
        raise FlowError(f"{self} has no data while a flow is traced: use Where instead of if, and, or")


@dataclass(frozen=True)
class Node:
    """One recorded operation: its inputs (values and numbers) and its output; a side effect has none."""

    op: Op
    inputs: tuple[Value | float, ...]
    output: Value | None

    def needs(self) -> list[int]:
        """The ids of the values that go in."""
        return [x.id for x in self.inputs if isinstance(x, Value)]


@dataclass
class Context:
    """What a trace records: the inputs asked for, the nodes in order, the fields of state, and the result."""

    device: torch.device
    nodes: list[Node] = field(default_factory=list)
    inputs: dict[str, Value] = field(default_factory=dict)
    fields: dict[str, Value] = field(default_factory=dict)
    result: Value | None = None
    _count: int = 0

    @staticmethod
    def current(what: str) -> Context:
        """The context that is being traced."""
        context = _CURRENT.get()
        if context is None:
            raise FlowError(f"{what} is called outside of a trace: operations belong into the `flow` of a criterion")
        return context

    @contextmanager
    def tracing(self) -> Iterator[Context]:
        """Record what is called inside."""
        token = _CURRENT.set(self)
        try:
            yield self
        finally:
            _CURRENT.reset(token)

    def value(self, name: str, format: FORMAT, inner: tuple[int, ...] = (1, 1), dtype: Any = torch.float32) -> Value:
        """A new symbolic value of this context."""
        self._count += 1
        return Value(self, self._count - 1, format, inner, dtype, self.device, name)

    def input(self, name: str, format: FORMAT) -> Value:
        """The input of this name, the same one however often it is asked for."""
        if name not in self.inputs:
            self.inputs[name] = self.value(name, format)
        return self.inputs[name]

    def record(self, op: Op, inputs: tuple[Value | float, ...], output: Value | None) -> None:
        """Note an operation."""
        self.nodes.append(Node(op, inputs, output))

    def live_nodes(self) -> list[Node]:
        """The nodes that reach the result or a side effect; a side effect keeps all that it needs."""
        needed = {self.result.id} if self.result is not None else set()
        kept = []
        for node in reversed(self.nodes):
            if node.output is None or node.output.id in needed:
                needed.update(node.needs())
                kept.append(node)
        return kept[::-1]


_CURRENT: ContextVar[Context | None] = ContextVar("flow being traced", default=None)
