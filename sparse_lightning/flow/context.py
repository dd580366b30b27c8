"""Context: the traced graph of a flow: symbolic values, and the operations on them in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from sparse_lightning.errors import FlowError


class FORMAT(Enum):
    """What one entry of a value refers to, and how long it is stored."""

    ELEMENT = "element"
    """One entry per weight; exists during a run, and is never stored for all blocks at once."""
    RAGGED = "ragged"
    """One entry per block, the blocks of all attached scopes concatenated; exists during a run."""
    PAGED = "paged"
    """One entry per block, in pages of a preallocated buffer; kept between runs and in checkpoints."""


@dataclass(frozen=True, eq=False)
class Value:
    """A symbolic value: shape, dtype, device, format and id, no data.

    Its shape is `(entries, D0, D1)`. The number of entries is known when the flow runs, the inner shape `(D0, D1)`
    when it is traced. Python's operators on values record operations.
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
        """The name of the format in place of the number of entries, then the inner shape."""
        return (self.format.value, *self.inner)

    def __repr__(self) -> str:
        return f"{self.name} (%{self.id}: {self.format.name} {list(self.shape)} {self.dtype} on {self.device})"

    def _operator(self, name: str, *inputs: Any) -> Value:
        return OPERATORS[name]()(*inputs)

    def __add__(self, other: Any) -> Value:
        return self._operator("+", self, other)

    def __radd__(self, other: Any) -> Value:
        return self._operator("+", other, self)

    def __sub__(self, other: Any) -> Value:
        return self._operator("-", self, other)

    def __rsub__(self, other: Any) -> Value:
        return self._operator("-", other, self)

    def __mul__(self, other: Any) -> Value:
        return self._operator("*", self, other)

    def __rmul__(self, other: Any) -> Value:
        return self._operator("*", other, self)

    def __truediv__(self, other: Any) -> Value:
        return self._operator("/", self, other)

    def __rtruediv__(self, other: Any) -> Value:
        return self._operator("/", other, self)

    def __neg__(self) -> Value:
        return self._operator("neg", self)

    def __abs__(self) -> Value:
        return self._operator("abs", self)

    def __gt__(self, other: Any) -> Value:
        return self._operator(">", self, other)

    def __ge__(self, other: Any) -> Value:
        return self._operator(">=", self, other)

    def __lt__(self, other: Any) -> Value:
        return self._operator("<", self, other)

    def __le__(self, other: Any) -> Value:
        return self._operator("<=", self, other)

    def __bool__(self) -> bool:
        raise FlowError(f"{self} has no truth value while a flow is traced: use Where instead of if, and, or")


class Op(ABC):
    """An operation of a flow. Calling it records it in the trace."""

    def __call__(self, *inputs: Any) -> Value:
        """Check the inputs, record the operation and return the symbolic result."""
        return self.profile(Context.current(str(self)), *inputs)

    @abstractmethod
    def profile(self, context: Context, *inputs: Any) -> Value:
        """Check rank, inner shape, format and device of the inputs, record the operation and return its result."""

    @abstractmethod
    def execute(self, *inputs: Any) -> Any:
        """Compute the operation on tensors."""

    def __str__(self) -> str:
        return type(self).__name__

    def has_element_rule(self) -> bool:
        """Whether every lowering knows this operation on ELEMENT values, which never reach `execute`."""
        return False

    def expect(self, context: Context, what: str, x: Any, *formats: FORMAT) -> Value:
        """Return an input; raise `FlowError` unless it is a value of this trace, of one of these formats."""
        if not isinstance(x, Value):
            raise FlowError(f"{self}: {what} must be a value of the flow, not {x!r}")
        if x.context is not context:
            raise FlowError(f"{self}: {what} is {x}, which belongs to another trace: use inputs of this flow")
        if x.format not in formats:
            wanted = " or ".join(f.name for f in formats)
            raise FlowError(f"{self}: {what} must be {wanted}, but {x} is {x.format.name}{_advice(x, formats)}")
        if len(x.inner) != 2:
            raise FlowError(
                f"{self}: {what} must have rank 3, [entries, D0, D1], but {x} has rank {1 + len(x.inner)}: declare the "
                "state with an inner shape (D0, D1)"
            )
        if x.device != context.device:
            raise FlowError(f"{self}: {what} must be on {context.device}, but {x} is on {x.device}")
        return x

    def numbers(self, x: Value) -> Value:
        """Return an input; raise `FlowError` if it is a condition."""
        if x.dtype == torch.bool:
            raise FlowError(f"{self}: {x} is a condition, not a number: convert it with Where")
        return x

    def count(self, inputs: tuple[Any, ...], n: int) -> None:
        """Raise `FlowError` unless there are n inputs."""
        if len(inputs) != n:
            raise FlowError(f"{self} got {len(inputs)} arguments instead of {n}")


def _advice(x: Value, formats: tuple[FORMAT, ...]) -> str:
    if x.format is FORMAT.PAGED:
        return ": Load it first"
    if x.format is FORMAT.ELEMENT and FORMAT.RAGGED in formats:
        return ": reduce it over its blocks first (Sum, Mean, Max, Min, L2Norm)"
    return ""


@dataclass(frozen=True)
class Node:
    """One recorded operation: its inputs (values and numbers) and its output, None for a side effect."""

    op: Op
    inputs: tuple[Value | float, ...]
    output: Value | None

    def needs(self) -> list[int]:
        """Return the ids of the input values."""
        return [x.id for x in self.inputs if isinstance(x, Value)]

    def arguments(self, tensors: Mapping[int, Tensor]) -> list[Tensor | float]:
        """Return the tensor of each input value, by id, and the numbers: see `number`."""
        return [tensors[x.id] if isinstance(x, Value) else number(x, self.inputs) for x in self.inputs]


def number(x: float, inputs: Sequence[Value | float]) -> float:
    """Return a Python number as an operation computes with it: a float, except that integers stay so among integers."""
    among_integers = any(isinstance(v, Value) and is_integer(v.dtype) for v in inputs)
    return x if among_integers else float(x)


def is_integer(dtype: torch.dtype) -> bool:
    """Whether a dtype is that of whole numbers; `torch.bool` is that of conditions."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


@dataclass
class Context:
    """The record of a trace: the inputs used, the nodes in order, the fields of state, and the result."""

    device: torch.device
    nodes: list[Node] = field(default_factory=list)
    inputs: dict[str, Value] = field(default_factory=dict)
    fields: dict[str, Value] = field(default_factory=dict)
    result: Value | None = None
    _count: int = 0

    @staticmethod
    def current(what: str) -> Context:
        """Return the context that is being traced; raise `FlowError` if there is none."""
        context = _CURRENT.get()
        if context is None:
            raise FlowError(f"{what} is called outside of a trace: use operations only in the `flow` of a criterion")
        return context

    @contextmanager
    def tracing(self) -> Iterator[Context]:
        """Record the operations that are called in this context."""
        token = _CURRENT.set(self)
        try:
            yield self
        finally:
            _CURRENT.reset(token)

    def value(self, name: str, format: FORMAT, inner: tuple[int, ...] = (1, 1), dtype: Any = torch.float32) -> Value:
        """Return a new symbolic value of this context."""
        self._count += 1
        return Value(self, self._count - 1, format, inner, dtype, self.device, name)

    def input(self, name: str, format: FORMAT) -> Value:
        """Return the input of this name, the same value at each call."""
        if name not in self.inputs:
            self.inputs[name] = self.value(name, format)
        return self.inputs[name]

    def record(self, op: Op, inputs: tuple[Value | float, ...], output: Value | None) -> None:
        """Append an operation to the nodes; raise `FlowError` if it is on elements and no lowering knows it."""
        values = [x for x in (*inputs, output) if isinstance(x, Value)]
        if any(x.format is FORMAT.ELEMENT for x in values) and not op.has_element_rule():
            raise FlowError(
                f"{op} has no rule for ELEMENT values, so that no lowering can compute it: build it from operations of "
                "sparse_lightning.flow, name an `operation` (elementwise) or a `kind` with `finish` (reductions) that "
                "lowerings know, or apply it after a block reduction"
            )
        self.nodes.append(Node(op, inputs, output))

    def live_nodes(self) -> list[Node]:
        """Return the nodes that the result or a side effect depends on, in order."""
        return depended_on({self.result.id} if self.result is not None else set(), self.nodes)


def depended_on(values: set[int], nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes that values, by id, or side effects depend on, in order."""
    needed, kept = set(values), []
    for node in reversed(nodes):
        if node.output is None or node.output.id in needed:
            needed.update(node.needs())
            kept.append(node)
    return kept[::-1]


OPERATORS: dict[str, Callable[[], Op]] = {}
"""The operation of each Python operator on values; `sparse_lightning.flow.ops` fills it."""

_CURRENT: ContextVar[Context | None] = ContextVar("flow being traced", default=None)
