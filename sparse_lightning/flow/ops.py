"""The operations of flows: each checks its inputs when it is traced (`profile`), and computes (`execute`)."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from sparse_lightning.errors import FlowError, did_you_mean
from sparse_lightning.flow.context import FORMAT, OPERATORS, Context, Op, Value, number
from sparse_lightning.flow.ragged_blocks import RaggedBlocks
from sparse_lightning.flow.segments import Segments, floating
from sparse_lightning.kernels.stage import OPERATIONS, FoldKind

Per = Literal["parameter", "scope"]


FP32 = torch.finfo(torch.float32)


class Elementwise(Op):
    """An elementwise operation on values of one format and on numbers; inner shapes broadcast.

    ELEMENT values are fp32 (fp64 for fp64 weights). The dtypes of RAGGED values are promoted as in torch, and numbers
    do not change them: an integer field of state plus 1 is an integer, plus 1.0 it is fp32.
    """

    operation: ClassVar[str]
    arity: ClassVar[int] = 2
    returns_bool: ClassVar[bool] = False

    def profile(self, context: Context, *inputs: Any) -> Value:
        """Check that all values have one format and that their inner shapes broadcast."""
        self.count(inputs, self.arity)
        values = []
        for i, x in enumerate(inputs):
            if not isinstance(x, (int, float)):
                values.append(self.expect(context, f"argument {i + 1}", x, FORMAT.ELEMENT, FORMAT.RAGGED))
            elif FP32.max < abs(x) < math.inf:
                raise FlowError(
                    f"{self}: the number {str(x)[:20]} is beyond the range of fp32, in which scores are computed: use "
                    f"one of a magnitude up to {FP32.max:.3g}, or math.inf"
                )
        if not values:
            raise FlowError(f"{self}: all arguments are numbers, but at least one must be a value of the flow")
        for other in values[1:]:
            if other.format is not values[0].format:
                raise FlowError(f"{self}: {values[0]} and {other} have different formats: reduce the ELEMENT one first")
        inner = values[0].inner
        for other in values[1:]:
            if any(a != b and 1 not in (a, b) for a, b in zip(inner, other.inner, strict=True)):
                raise FlowError(f"{self}: the inner shapes of {values[0]} and {other} do not broadcast")
            inner = tuple(max(a, b) for a, b in zip(inner, other.inner, strict=True))
        self.check_types(values, inputs)
        output = context.value(str(self), values[0].format, inner, self._dtype(values[0].format, inputs))
        context.record(self, inputs, output)
        return output

    def _dtype(self, format: FORMAT, inputs: tuple[Any, ...]) -> torch.dtype:
        if format is FORMAT.ELEMENT:
            return torch.bool if self.returns_bool else torch.float32
        named = getattr(self, "operation", None)
        if type(self).execute is Elementwise.execute and named not in OPERATIONS:
            raise FlowError(f"{self}: there is no operation {named!r}{did_you_mean(str(named), OPERATIONS)}")
        ones = [
            torch.ones(1, 1, 1, dtype=x.dtype, device="cpu") if isinstance(x, Value) else number(x, inputs)
            for x in inputs
        ]
        dtype: torch.dtype = self.execute(*ones).dtype
        return dtype

    def has_element_rule(self) -> bool:
        """Whether `operation` is one of those that lowerings know; they do not call an overridden `execute`."""
        known = getattr(self, "operation", None) in OPERATIONS
        return known and type(self).execute is Elementwise.execute

    def check_types(self, values: list[Value], inputs: tuple[Any, ...]) -> None:
        """Check that all values are numbers; only `Where` takes a condition."""
        for x in values:
            self.numbers(x)

    def execute(self, *inputs: Any) -> Any:
        """Apply the torch operation."""
        return OPERATIONS[self.operation](*inputs)


def _elementwise(name: str, operation: str, arity: int, formula: str, returns_bool: bool = False) -> type[Elementwise]:
    doc = f"`{formula}`, elementwise."
    body = {
        "operation": operation,
        "arity": arity,
        "returns_bool": returns_bool,
        "__doc__": doc,
        "__module__": __name__,
    }
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
Greater = _elementwise("Greater", "gt", 2, "a > b", returns_bool=True)
GreaterEqual = _elementwise("GreaterEqual", "ge", 2, "a ≥ b", returns_bool=True)
Less = _elementwise("Less", "lt", 2, "a < b", returns_bool=True)
LessEqual = _elementwise("LessEqual", "le", 2, "a ≤ b", returns_bool=True)


OPERATORS.update(
    {
        "+": Add,
        "-": Subtract,
        "*": Multiply,
        "/": Divide,
        "neg": Negate,
        "abs": Abs,
        ">": Greater,
        ">=": GreaterEqual,
        "<": Less,
        "<=": LessEqual,
    }
)


class Where(Elementwise):
    """`b` where the condition `a` is true, `c` elsewhere."""

    operation = "where"
    arity = 3

    def check_types(self, values: list[Value], inputs: tuple[Any, ...]) -> None:
        """Check that the first argument is a condition, and the others are numbers."""
        if not isinstance(inputs[0], Value) or inputs[0].dtype != torch.bool:
            raise FlowError(f"{self}: argument 1 must be a condition such as a > b, not {inputs[0]!r}")
        super().check_types([x for x in values if x is not inputs[0]], inputs)


class BlockReduction(Op):
    """ELEMENT → RAGGED: reduce the elements of each block to one number, in fp32.

    A subclass names how elements are folded (`kind`), the operation on each before that (`prepares`), and computes the
    result from the folds (`finish`). `execute` is the definition, on the elements of a block.
    """

    kind: ClassVar[FoldKind]
    prepares: ClassVar[str | None] = None

    def profile(self, context: Context, *inputs: Any) -> Value:
        """Check that the input is one ELEMENT value."""
        self.count(inputs, 1)
        x = self.expect(context, "argument 1", inputs[0], FORMAT.ELEMENT)
        self.numbers(x)
        output = context.value(str(self), FORMAT.RAGGED)
        context.record(self, (x,), output)
        return output

    def has_element_rule(self) -> bool:
        """Whether the fold is one of those that lowerings know, and was declared with or after `execute`."""
        known = getattr(self, "kind", None) in get_args(FoldKind) and self.prepares in (None, *OPERATIONS)
        line = type(self).__mro__
        declared, executed = (
            next((i for i, cls in enumerate(line) if names & vars(cls).keys()), len(line))
            for names in ({"kind", "prepares", "finish"}, {"execute"})
        )
        return known and declared <= executed

    def finish(self, folded: Tensor, blocks: RaggedBlocks) -> Tensor:
        """Compute the result from the folds of all blocks, `(S,)`, which may be overwritten."""
        return folded


class Sum(BlockReduction):
    """`Σ x` over each block."""

    kind = "sum"

    def execute(self, elements: Tensor) -> Tensor:
        """`(…, elements)` → `(…)`."""
        return elements.sum(-1)


class Mean(BlockReduction):
    """`Σ x / n` over each block of n elements."""

    kind = "sum"

    def finish(self, folded: Tensor, blocks: RaggedBlocks) -> Tensor:
        """Divide the sum by the number of elements."""
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

    kind, prepares = "sum", "square"

    def finish(self, folded: Tensor, blocks: RaggedBlocks) -> Tensor:
        """Take the square root of the sum of squares."""
        return folded.sqrt_()

    def execute(self, elements: Tensor) -> Tensor:
        """`(…, elements)` → `(…)`."""
        return elements.square().sum(-1).sqrt()


class Grouped(Op):
    """RAGGED → RAGGED: compare each block with the others of its parameter or of its scope. Integers become fp32.

    Args:
        per: "parameter" or "scope".
    """

    def __init__(self, per: Per = "parameter") -> None:
        if per not in ("parameter", "scope"):
            raise FlowError(f'{self}: per={per!r} is not a group: pass "parameter" or "scope"')
        self.per = per

    def profile(self, context: Context, *inputs: Any) -> Value:
        """Check that the input is one RAGGED value; the result has its inner shape."""
        self.count(inputs, 1)
        x = self.numbers(self.expect(context, "argument 1", inputs[0], FORMAT.RAGGED))
        output = context.value(str(self), FORMAT.RAGGED, x.inner, floating(x.dtype))
        context.record(self, (x,), output)
        return output


class Normalize(Grouped):
    """`x / √(Σ x²)` over the blocks of each parameter or scope; 0 if all are zero."""

    def execute(self, x: Tensor, groups: Segments) -> Tensor:
        """`x` is `(S, D0, D1)`."""
        x = x.to(floating(x.dtype))
        largest = groups.spread(groups.max(x.abs()))
        scaled = torch.where(largest > 0, x / largest, 0)  # so that no square overflows in fp32
        return torch.where(largest > 0, scaled / groups.spread(groups.sum(scaled.square())).sqrt(), 0)


class Softmax(Grouped):
    """`e^x / Σ e^x` over the blocks of each parameter or scope."""

    def execute(self, x: Tensor, groups: Segments) -> Tensor:
        """`x` is `(S, D0, D1)`."""
        x = x.to(floating(x.dtype))
        powers = (x - groups.spread(groups.max(x))).exp()
        return powers / groups.spread(groups.sum(powers))


class Rank(Grouped):
    """The rank of each block in its parameter or scope, from 0 for the lowest score to 1 for the highest.

    Of equal scores, the lower index ranks higher. NaN ranks lowest. A single block has rank 1.
    """

    def execute(self, x: Tensor, groups: Segments) -> Tensor:
        """`x` is `(S, D0, D1)`."""
        return groups.rank(x)


class Stack(Op):
    """Several statistics of each block as one value: inner shapes `(1, 1)` become `(k, 1)`."""

    def profile(self, context: Context, *inputs: Any) -> Value:
        """Check that all inputs are RAGGED with one number per block."""
        values = [
            self.numbers(self.expect(context, f"argument {i + 1}", x, FORMAT.RAGGED)) for i, x in enumerate(inputs)
        ]
        if not values or any(x.inner != (1, 1) for x in values):
            raise FlowError(f"{self} takes values of inner shape [1, 1], not {[list(x.inner) for x in values]}")
        dtype = reduce(torch.promote_types, [x.dtype for x in values])
        output = context.value(str(self), FORMAT.RAGGED, (len(values), 1), dtype)
        context.record(self, tuple(values), output)
        return output

    def execute(self, *values: Tensor) -> Tensor:
        """`(S, 1, 1)`, k times → `(S, k, 1)`."""
        entries = max(len(value) for value in values)
        return torch.cat([value.expand(entries, 1, 1) for value in values], 1)


class Pick(Op):
    """One statistic of a stacked value: inner shape `(k, 1)` becomes `(1, 1)`.

    Args:
        at: its index, from 0.
    """

    def __init__(self, at: int) -> None:
        self.at = at

    def profile(self, context: Context, *inputs: Any) -> Value:
        """Check that the input is RAGGED and has this statistic."""
        self.count(inputs, 1)
        x = self.expect(context, "argument 1", inputs[0], FORMAT.RAGGED)
        if not 0 <= self.at < x.inner[0]:
            raise FlowError(f"{self}: index {self.at} is out of range: {x} has {x.inner[0]} statistics, from 0")
        output = context.value(str(self), FORMAT.RAGGED, (1, x.inner[1]), x.dtype)
        context.record(self, (x,), output)
        return output

    def execute(self, x: Tensor) -> Tensor:
        """`(S, k, D1)` → `(S, 1, D1)`."""
        return x[:, self.at : self.at + 1]


class Load(Op):
    """PAGED → RAGGED: the value of a field of state after the previous run, even if this run saves to it first.

    It has the dtype of the field.
    """

    def profile(self, context: Context, *inputs: Any) -> Value:
        """Check that the input is a field of `x.state`."""
        self.count(inputs, 1)
        kept = self.expect(context, "argument 1", inputs[0], FORMAT.PAGED)
        output = context.value(str(self), FORMAT.RAGGED, kept.inner, kept.dtype)
        context.record(self, (kept,), output)
        return output

    def execute(self, kept: Tensor) -> Tensor:
        """Return the entries of the field, which are already gathered from its pages."""
        return kept


class Save(Op):
    """RAGGED → PAGED: save a value to a field of state, in place, for the next run. Returns nothing.

    The value is converted to the dtype of the field, see `State`. A flow saves to a field once.
    """

    def __call__(self, *inputs: Any) -> None:  # type: ignore[override]
        """Check the inputs and record the side effect."""
        self.profile(Context.current(str(self)), *inputs)

    def profile(self, context: Context, *inputs: Any) -> None:  # type: ignore[override]
        """Check that the inputs are a RAGGED value and a field of `x.state` with the same inner shape."""
        self.count(inputs, 2)
        x = self.expect(context, "argument 1", inputs[0], FORMAT.RAGGED)
        kept = self.expect(context, "argument 2", inputs[1], FORMAT.PAGED)
        if x.inner != kept.inner:
            raise FlowError(
                f"{self}: {x} does not have the inner shape {list(kept.inner)} of the field {kept}: declare the state "
                f"with inner={x.inner}"
            )
        self.numbers(x)
        if any(isinstance(node.op, Save) and kept.id in node.needs() for node in context.nodes):
            raise FlowError(
                f"{self}: the field {kept} is already saved by this flow, and one of the values would be lost: save "
                "one value, or declare another state"
            )
        context.record(self, (x, kept), None)

    def execute(self, value: Tensor) -> Tensor:
        """Return the value, which is written to the pages after the run."""
        return value
