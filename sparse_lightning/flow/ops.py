"""The operations of flows. Each checks its inputs when it is traced (`profile`) and computes (`execute`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from sparse_lightning.errors import FlowError
from sparse_lightning.flow.context import FORMAT, Context, Value
from sparse_lightning.flow.end_to_end import EndToEnd
from sparse_lightning.flow.segments import Segments
from sparse_lightning.kernels.block_score.stage import OPERATIONS, FoldKind

Per = Literal["parameter", "scope"]


class Op(ABC):
    """An operation of a flow; calling it records it."""

    def __call__(self, *inputs: Any) -> Value:
        """Check the inputs, record the operation, give the symbolic result."""
        return self.profile(Context.current(str(self)), *inputs)

    @abstractmethod
    def profile(self, context: Context, *inputs: Any) -> Value:
        """Check rank, inner shape, format and device of the inputs, and record."""

    @abstractmethod
    def execute(self, *inputs: Any) -> Any:
        """Compute on tensors."""

    def __str__(self) -> str:
        return type(self).__name__

    def expect(self, context: Context, what: str, x: Any, *formats: FORMAT) -> Value:
        """An input that must be a value of this trace, of one of these formats."""
        if not isinstance(x, Value):
            raise FlowError(f"{self}: {what} must be a value of the flow, not {x!r}")
        if x.context is not context:
            raise FlowError(f"{self}: {what} is {x}, which belongs to another trace")
        if x.format not in formats:
            wanted = " or ".join(f.name for f in formats)
            raise FlowError(f"{self}: {what} must be {wanted}, but {x} is {x.format.name}{_advice(x, formats)}")
        if len(x.inner) != 2:
            raise FlowError(f"{self}: {what} must have rank 3, [entries, D0, D1], but {x} has rank {1 + len(x.inner)}")
        if x.device != context.device:
            raise FlowError(f"{self}: {what} must live on {context.device}, but {x} lives on {x.device}")
        return x

    def numbers(self, x: Value) -> Value:
        """An input that must not be a condition."""
        if x.dtype == torch.bool:
            raise FlowError(f"{self}: {x} is a condition, not a number: choose with Where")
        return x

    def count(self, inputs: tuple[Any, ...], n: int) -> None:
        """Raise where the number of arguments is wrong."""
        if len(inputs) != n:
            raise FlowError(f"{self} takes {n} arguments, not {len(inputs)}")


def _advice(x: Value, formats: tuple[FORMAT, ...]) -> str:
    if x.format is FORMAT.PAGED:
        return ": Load it first"
    if x.format is FORMAT.ELEMENT and FORMAT.RAGGED in formats:
        return ": reduce it over its blocks first (Sum, Mean, Max, Min, L2Norm)"
    return ""


class Elementwise(Op):
    """An operation entry by entry, on values of one format and on numbers; inner shapes broadcast."""

    operation: ClassVar[str]
    arity: ClassVar[int] = 2
    gives_bool: ClassVar[bool] = False

    def profile(self, context: Context, *inputs: Any) -> Value:
        """Formats must agree; numbers go with either."""
        self.count(inputs, self.arity)
        values = []
        for i, x in enumerate(inputs):
            if not isinstance(x, (int, float)):
                values.append(self.expect(context, f"argument {i + 1}", x, FORMAT.ELEMENT, FORMAT.RAGGED))
        if not values:
            raise FlowError(f"{self}: at least one argument must be a value of the flow")
        for other in values[1:]:
            if other.format is not values[0].format:
                raise FlowError(f"{self}: {values[0]} and {other} have different formats: reduce the ELEMENT one first")
        inner = values[0].inner
        for other in values[1:]:
            if any(a != b and 1 not in (a, b) for a, b in zip(inner, other.inner, strict=True)):
                raise FlowError(f"{self}: the inner shapes of {values[0]} and {other} do not agree")
            inner = tuple(max(a, b) for a, b in zip(inner, other.inner, strict=True))
        self.check_types(values, inputs)
        output = context.value(str(self), values[0].format, inner, torch.bool if self.gives_bool else torch.float32)
        context.record(self, inputs, output)
        return output

    def check_types(self, values: list[Value], inputs: tuple[Any, ...]) -> None:
        """Numbers in; only Where takes a condition."""
        for x in values:
            self.numbers(x)

    def execute(self, *inputs: Any) -> Any:
        """The torch operation of this name."""
        return OPERATIONS[self.operation](*inputs)


def _elementwise(name: str, operation: str, arity: int, formula: str, gives_bool: bool = False) -> type[Elementwise]:
    doc = f"`{formula}`, entry by entry."
    body = {"operation": operation, "arity": arity, "gives_bool": gives_bool, "__doc__": doc, "__module__": __name__}
    return type(name, (Elementwise,), body)


Add = _elementwise("Add", "add", 2, "a + b")
Subtract = _elementwise("Subtract", "sub", 2, "a − b")
Multiply = _elementwise("Multiply", "mul", 2, "a · b")
Divide = _elementwise("Divide", "div", 2, "a / b")
Negate = _elementwise("Negate", "neg", 1, "−a")
Abs = _elementwise("Abs", "abs", 1, "|a|")
Square = _elementwise("Square", "square", 1, "a²")
Sqrt = _elementwise("Sqrt", "sqrt", 1, "√a")
Log = _elementwise("Log", "log", 1, "ln a")
Exp = _elementwise("Exp", "exp", 1, "e^a")
Relu = _elementwise("Relu", "relu", 1, "max(a, 0)")
Sigmoid = _elementwise("Sigmoid", "sigmoid", 1, "1 / (1 + e^−a)")
Maximum = _elementwise("Maximum", "maximum", 2, "max(a, b)")
Minimum = _elementwise("Minimum", "minimum", 2, "min(a, b)")
Greater = _elementwise("Greater", "gt", 2, "a > b", gives_bool=True)
GreaterEqual = _elementwise("GreaterEqual", "ge", 2, "a ≥ b", gives_bool=True)
Less = _elementwise("Less", "lt", 2, "a < b", gives_bool=True)
LessEqual = _elementwise("LessEqual", "le", 2, "a ≤ b", gives_bool=True)


class Where(Elementwise):
    """`b` where the condition `a` holds, `c` elsewhere."""

    operation = "where"
    arity = 3

    def check_types(self, values: list[Value], inputs: tuple[Any, ...]) -> None:
        """The first argument is a condition, the others are numbers."""
        if not isinstance(inputs[0], Value) or inputs[0].dtype != torch.bool:
            raise FlowError(f"{self}: argument 1 must be a condition such as a > b, not {inputs[0]!r}")
        super().check_types([x for x in values if x is not inputs[0]], inputs)


class BlockReduction(Op):
    """ELEMENT → RAGGED: the elements of each block become one number."""

    kind: ClassVar[FoldKind] = "sum"
    prepares: ClassVar[str | None] = None

    def profile(self, context: Context, *inputs: Any) -> Value:
        """One value of elements in, one number for each block out."""
        self.count(inputs, 1)
        x = self.expect(context, "argument 1", inputs[0], FORMAT.ELEMENT)
        self.numbers(x)
        output = context.value(str(self), FORMAT.RAGGED)
        context.record(self, (x,), output)
        return output

    def finish(self, folded: Tensor, blocks: EndToEnd) -> Tensor:
        """What becomes of the folded blocks, which stand end to end."""
        return folded


class Sum(BlockReduction):
    """`Σ x` over each block."""

    def execute(self, elements: Tensor) -> Tensor:
        """`(…, elements)` → `(…)`."""
        return elements.sum(-1)


class Mean(BlockReduction):
    """`Σ x / n` over each block of n elements."""

    def finish(self, folded: Tensor, blocks: EndToEnd) -> Tensor:
        """The sum over the count."""
        return folded / blocks.sizes

    def execute(self, elements: Tensor) -> Tensor:
        """`(…, elements)` → `(…)`."""
        return elements.mean(-1)


class Max(BlockReduction):
    """The largest element of each block."""

    kind = "max"

    def execute(self, elements: Tensor) -> Tensor:
        """`(…, elements)` → `(…)`."""
        return elements.amax(-1)


class Min(BlockReduction):
    """The smallest element of each block."""

    kind = "min"

    def execute(self, elements: Tensor) -> Tensor:
        """`(…, elements)` → `(…)`."""
        return elements.amin(-1)


class L2Norm(BlockReduction):
    """`√(Σ x²)` over each block."""

    prepares = "square"

    def finish(self, folded: Tensor, blocks: EndToEnd) -> Tensor:
        """The root of the sum of squares."""
        return folded.sqrt()

    def execute(self, elements: Tensor) -> Tensor:
        """`(…, elements)` → `(…)`."""
        return elements.square().sum(-1).sqrt()


class Grouped(Op):
    """RAGGED → RAGGED: each block in relation to the others of its parameter or of its scope.

    Args:
        per: "parameter" or "scope".
    """

    def __init__(self, per: Per = "parameter") -> None:
        if per not in ("parameter", "scope"):
            raise FlowError(f'{self}: per is "parameter" or "scope", not {per!r}')
        self.per = per

    def profile(self, context: Context, *inputs: Any) -> Value:
        """One value of blocks in, one of the same inner shape out."""
        self.count(inputs, 1)
        x = self.numbers(self.expect(context, "argument 1", inputs[0], FORMAT.RAGGED))
        output = context.value(str(self), FORMAT.RAGGED, x.inner)
        context.record(self, (x,), output)
        return output


class Normalize(Grouped):
    """`x / √(Σ x²)` over the blocks of each parameter or scope; all zeros stay zeros."""

    def execute(self, x: Tensor, groups: Segments) -> Tensor:
        """`x` is `(S, D0, D1)`."""
        largest = groups.spread(groups.max(x.abs()))
        scaled = torch.where(largest > 0, x / largest, 0)  # so that no square leaves the range of fp32
        return torch.where(largest > 0, scaled / groups.spread(groups.sum(scaled.square())).sqrt(), 0)


class Softmax(Grouped):
    """`e^x / Σ e^x` over the blocks of each parameter or scope."""

    def execute(self, x: Tensor, groups: Segments) -> Tensor:
        """`x` is `(S, D0, D1)`."""
        powers = (x - groups.spread(groups.max(x))).exp()
        return powers / groups.spread(groups.sum(powers))


class Rank(Grouped):
    """The place of each block among those of its parameter or scope: 0 for the lowest score, 1 for the highest.

    Of equal scores the lower index ranks higher, NaN ranks lowest, and a block alone has rank 1.
    """

    def execute(self, x: Tensor, groups: Segments) -> Tensor:
        """`x` is `(S, D0, D1)`."""
        return groups.rank(x)


class Stack(Op):
    """Several statistics of each block as one value: inner shapes `(1, 1)` become `(k, 1)`."""

    def profile(self, context: Context, *inputs: Any) -> Value:
        """Values of blocks with one number each."""
        values = [
            self.numbers(self.expect(context, f"argument {i + 1}", x, FORMAT.RAGGED)) for i, x in enumerate(inputs)
        ]
        if not values or any(x.inner != (1, 1) for x in values):
            raise FlowError(f"{self}: takes values of inner shape [1, 1], not {[list(x.inner) for x in values]}")
        output = context.value(str(self), FORMAT.RAGGED, (len(values), 1))
        context.record(self, tuple(values), output)
        return output

    def execute(self, *values: Tensor) -> Tensor:
        """`(S, 1, 1)`, k times → `(S, k, 1)`."""
        entries = max(len(value) for value in values)
        return torch.cat([value.expand(entries, 1, 1) for value in values], 1)


class Pick(Op):
    """One of the statistics of a stacked value: inner shape `(k, 1)` becomes `(1, 1)`.

    Args:
        at: which one.
    """

    def __init__(self, at: int) -> None:
        self.at = at

    def profile(self, context: Context, *inputs: Any) -> Value:
        """A stacked value of blocks."""
        self.count(inputs, 1)
        x = self.expect(context, "argument 1", inputs[0], FORMAT.RAGGED)
        if not 0 <= self.at < x.inner[0]:
            raise FlowError(f"{self}: there is no statistic {self.at} in {x}")
        output = context.value(str(self), FORMAT.RAGGED, (1, x.inner[1]))
        context.record(self, (x,), output)
        return output

    def execute(self, x: Tensor) -> Tensor:
        """`(S, k, D1)` → `(S, 1, D1)`."""
        return x[:, self.at : self.at + 1]


class Load(Op):
    """PAGED → RAGGED: what a field of state held after the previous run, even where this run saves to it."""

    def profile(self, context: Context, *inputs: Any) -> Value:
        """A field of `x.state`."""
        self.count(inputs, 1)
        kept = self.expect(context, "argument 1", inputs[0], FORMAT.PAGED)
        output = context.value(str(self), FORMAT.RAGGED, kept.inner)
        context.record(self, (kept,), output)
        return output

    def execute(self, kept: Tensor) -> Tensor:
        """The entries of the field, already gathered from its pages."""
        return kept


class Save(Op):
    """RAGGED → PAGED: keep a value in a field of state, in place, for the next run. Gives nothing back."""

    def __call__(self, *inputs: Any) -> None:  # type: ignore[override]
        """Check the inputs and record the side effect."""
        self.profile(Context.current(str(self)), *inputs)

    def profile(self, context: Context, *inputs: Any) -> None:  # type: ignore[override]
        """A value of blocks and a field of `x.state` with the same inner shape."""
        self.count(inputs, 2)
        x = self.expect(context, "argument 1", inputs[0], FORMAT.RAGGED)
        kept = self.expect(context, "argument 2", inputs[1], FORMAT.PAGED)
        if x.inner != kept.inner:
            raise FlowError(f"{self}: {x} does not have the inner shape {list(kept.inner)} of the field {kept}")
        self.numbers(x)
        context.record(self, (x, kept), None)

    def execute(self, value: Tensor) -> Tensor:
        """What is written to the pages."""
        return value
