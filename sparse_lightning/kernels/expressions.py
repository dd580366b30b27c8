"""Elementwise steps as C++ expressions that the compiler vectorizes, with the bits that torch computes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sparse_lightning.kernels.stage import Ref, Step

OPTIONS = ("-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
"""Products are rounded before they are added, as in torch."""

HELPERS = """
// NaN wins, as in torch.
static inline T highest(T a, T b) { return a > b || a != a ? a : b; }
static inline T lowest(T a, T b) { return a < b || a != a ? a : b; }
"""
"""Functions that expressions call, for a type T."""

EXPRESSIONS = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "{} / {}",
    "neg": "-{}",
    "abs": "std::abs({})",
    "square": "{0} * {0}",
    "sqrt": "std::sqrt({})",
    "maximum": "highest({}, {})",
    "minimum": "lowest({}, {})",
    "where": "{} != 0 ? {} : {}",
    "relu": "highest({}, T(0))",
    "gt": "T({} > {})",
    "ge": "T({} >= {})",
    "lt": "T({} < {})",
    "le": "T({} <= {})",
}
"""The operations that the compiler vectorizes, as C++ expressions; others are left to torch."""


def expression(step: Step) -> str:
    """Return a step in C++, where `v0`, `v1`, … are the earlier values."""
    arguments = [f"v{a.at}" if isinstance(a, Ref) else literal(a) for a in step.arguments]
    return EXPRESSIONS[step.operation].format(*arguments)


def literal(number: float) -> str:
    """Return a number in C++: exact, as a hexadecimal of the precision of Python; infinity and NaN have names."""
    if math.isnan(number):
        return "T(NAN)"
    if math.isinf(number):
        return f"T({'-' if number < 0 else ''}INFINITY)"
    return f"T({float(number).hex()})"


def lines(source: Sequence[str], indent: int) -> str:
    """Return lines of source as one text, indented but for directives."""
    return "\n".join(line if line.startswith("#") else " " * indent + line for line in source)
