"""Elementwise operations: coordinates that meet are unified."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sparse_lightning.graph.call import Call, rule
from sparse_lightning.graph.rules.broadcasting import broadcast, zeros_of
from sparse_lightning.graph.traced_value import Sign, TracedValue

MAY_BE_ZERO = "it is not finite at zero, and weights of pruned units are zero"


def _names(words: str, overload: str = "default") -> list[str]:
    return [f"aten.{word}.{overload}" for word in words.split()]


@rule(
    *_names("dropout alpha_dropout feature_dropout contiguous clone alias detach detach_ lift_fresh_copy lift_fresh"),
    *_names("to_dense positive resolve_conj resolve_neg"),
    *[f"aten.to.{overload}" for overload in ("dtype", "dtype_layout", "device", "other", "prim_Device")],
    *[f"aten.{name}.default" for name in ("_to_copy", "type_as")],
    "prims.convert_element_type.default",
)
def identity(call: Call, x: TracedValue, *args: Any, **kwargs: Any) -> TracedValue:
    """Return the same value."""
    return x


@rule(
    *_names("relu relu6 leaky_relu elu selu celu gelu silu mish tanh hardtanh hardswish softshrink"),
    *_names("hardshrink neg sin sinh asinh asin atan tan erf expm1 sign trunc floor ceil round square abs sqrt"),
    *_names("threshold rrelu nan_to_num"),
)
def zero_at_zero(call: Call, x: TracedValue, *args: Any, **kwargs: Any) -> TracedValue:
    """Return a function of each element that is zero at zero."""
    name = call.operation.split(".")[1]
    if not _keeps_zero(name, *args):
        return x.nonzero()
    if name == "sqrt" and x.sign is not Sign.ANY:
        return x
    positive = {"abs", "square", "relu", "relu6", "sqrt"}
    return replace(x, sign=Sign.NONNEGATIVE if name in positive else Sign.ANY)


def _keeps_zero(name: str, *bounds: float) -> bool:
    """Whether a function is zero at zero, which for some depends on their arguments."""
    if name == "hardtanh" and bounds:
        low, high = (*bounds, 1.0)[:2]
        return low <= 0 <= high
    return name != "threshold" or bounds[0] < 0 or bounds[1] == 0


@rule(*_names("sigmoid exp exp2 softplus cosh hardsigmoid"))
def positive_everywhere(call: Call, x: TracedValue, *args: Any, **kwargs: Any) -> TracedValue:
    """Return a function of each element that is finite and not negative, but not zero at zero."""
    sign = Sign.NONNEGATIVE if "hardsigmoid" in call.operation else Sign.POSITIVE
    return replace(x.nonzero(), sign=sign)


@rule(
    *_names("cos log_sigmoid logical_not bitwise_not isnan isinf isfinite erfc"),
    *[f"aten.{name}.{kind}" for name in ("eq", "ne", "lt", "le", "gt", "ge") for kind in ("Scalar", "Tensor")],
    *[f"aten.{name}.{kind}" for name in ("__and__", "__or__", "__xor__") for kind in ("Scalar", "Tensor")],
    *[f"aten.bitwise_{name}.{kind}" for name in ("and", "or", "xor") for kind in ("Scalar", "Tensor")],
    *_names("logical_and logical_or logical_xor maximum minimum fmax fmin atan2"),
    *[f"aten.{name}.{kind}" for name in ("max", "min") for kind in ("other",)],
    *[f"aten.{name}.{kind}" for name in ("clamp", "clamp_min", "clamp_max") for kind in ("default", "Tensor")],
)
def finite(call: Call, *args: Any, **kwargs: Any) -> TracedValue:
    """Return a function of elements that is finite wherever they are."""
    values = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, TracedValue)]
    dims = broadcast(call, values)
    low = args[1] if "clamp" in call.operation and "max" not in call.operation and len(args) > 1 else None
    known = Sign.POSITIVE if isinstance(low, int | float) and low > 0 else Sign.ANY
    return TracedValue(dims, (False,) * len(dims), sign=known)


@rule(*_names("log log2 log10 reciprocal rsqrt log1p digamma lgamma acos acosh erfinv"))
def singular(call: Call, x: TracedValue, *args: Any, **kwargs: Any) -> TracedValue:
    """Return a function of each element that need not be finite at zero: exact only where elements are positive."""
    need = Sign.NONNEGATIVE if "log1p" in call.operation else Sign.POSITIVE
    if x.sign < need and not x.fixed:
        call.pin_all(x, MAY_BE_ZERO)
    rational = any(name in call.operation for name in ("reciprocal", "rsqrt"))
    return replace(x.nonzero(), sign=Sign.POSITIVE if rational and x.sign is Sign.POSITIVE else Sign.ANY)


@rule(*_names("add sub rsub", "Tensor"), *_names("add sub rsub", "Scalar"))
def add(call: Call, x: Any, y: Any, alpha: float = 1) -> TracedValue:
    """Add or subtract: zero where both are."""
    values = [arg for arg in (x, y) if isinstance(arg, TracedValue)]
    dims = broadcast(call, values)
    number = 0 if len(values) == 2 else (y if isinstance(x, TracedValue) else x)
    still = isinstance(number, int | float) and number == 0
    zero = tuple(still and all(known) for known in zeros_of(values, len(dims)))
    signs = [_sign(arg) for arg in (x, y)] if "sub" not in call.operation and alpha == 1 else [Sign.ANY]
    sign = max(signs) if min(signs) >= Sign.NONNEGATIVE else Sign.ANY
    return TracedValue(dims, zero, sign=sign)


@rule(*_names("mul", "Tensor"), *_names("mul", "Scalar"))
def mul(call: Call, x: Any, y: Any) -> TracedValue:
    """Multiply: zero where either is."""
    values = [arg for arg in (x, y) if isinstance(arg, TracedValue)]
    dims = broadcast(call, values)
    zero = tuple(any(known) for known in zeros_of(values, len(dims)))
    same = call.node.args[0] is call.node.args[1]
    sign = Sign.NONNEGATIVE if same else min(_sign(x), _sign(y))
    return TracedValue(dims, zero, sign=sign)


@rule(
    *_names("div true_divide", "Tensor"),
    *_names("floor_divide"),
    *_names("div", "Scalar"),
    *_names("div", "Tensor_mode"),
    *_names("div", "Scalar_mode"),
    *_names("fmod remainder", "Tensor"),
    *_names("fmod remainder", "Scalar"),
)
def div(call: Call, x: Any, y: Any, **kwargs: Any) -> TracedValue:
    """Divide: exact only by what cannot become zero; zero where the numerator is."""
    values = [arg for arg in (x, y) if isinstance(arg, TracedValue)]
    if isinstance(y, TracedValue) and y.sign is not Sign.POSITIVE and not y.fixed:
        call.pin_all(y, "a division: " + MAY_BE_ZERO)
    dims = broadcast(call, values)
    numerators = zeros_of([x], len(dims)) if isinstance(x, TracedValue) else [[False]] * len(dims)
    return TracedValue(dims, tuple(known[0] for known in numerators), sign=min(_sign(x), _sign(y)))


@rule(*_names("pow", "Tensor_Scalar"))
def power(call: Call, x: TracedValue, exponent: Any) -> TracedValue:
    """Raise to a fixed power."""
    if not isinstance(exponent, int | float) or exponent <= 0:
        return replace(singular(call, x), sign=x.sign if x.sign is Sign.POSITIVE else Sign.ANY)
    even = exponent % 2 == 0
    return replace(x, sign=max(x.sign, Sign.NONNEGATIVE) if even else x.sign)


@rule(*[f"aten.where.{kind}" for kind in ("self", "ScalarOther", "ScalarSelf", "Scalar")])
def where(call: Call, condition: TracedValue, x: Any, y: Any) -> TracedValue:
    """Choose by a condition: zero where both are."""
    values = [arg for arg in (condition, x, y) if isinstance(arg, TracedValue)]
    dims = broadcast(call, values)
    chosen = [arg for arg in (x, y) if isinstance(arg, TracedValue)]
    still = all(isinstance(arg, TracedValue) or arg == 0 for arg in (x, y)) and bool(chosen)
    zero = tuple(still and all(known) for known in zeros_of(chosen, len(dims)))
    return TracedValue(dims, zero, sign=min(_sign(x), _sign(y)))


@rule("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def masked_fill(call: Call, x: TracedValue, mask: TracedValue, value: Any) -> TracedValue:
    """Fill by a mask: zero where the value is, if the filling is zero."""
    dims = broadcast(call, [x, mask])
    still = isinstance(value, int | float) and value == 0
    return TracedValue(dims, tuple(still and all(known) for known in zeros_of([x], len(dims))))


@rule("aten.lerp.Scalar", "aten.lerp.Tensor", "aten.addcmul.default")
def several(call: Call, *args: Any, **kwargs: Any) -> TracedValue:
    """Return a polynomial of several values: zero where all are."""
    values = [arg for arg in args if isinstance(arg, TracedValue)]
    dims = broadcast(call, values)
    return TracedValue(dims, tuple(all(known) for known in zeros_of(values, len(dims))))


@rule("aten.prelu.default")
def prelu(call: Call, x: TracedValue, weight: TracedValue) -> TracedValue:
    """Scale negative elements by one number, or one for each channel."""
    if x.ndim > 1 and weight.is_wide(0):
        call.unify(x.dims[1], weight.dims[0])
    return replace(x, sign=Sign.ANY)


@rule("aten.glu.default")
def glu(call: Call, x: TracedValue, dim: int = -1) -> TracedValue:
    """Gate the first half of a dimension by the second."""
    dim %= x.ndim
    ids = x.dims[dim]
    if ids is None:
        return x.nonzero()
    half = len(ids) // 2
    call.unify(ids[:half], ids[half:])
    return replace(x, dims=(*x.dims[:dim], ids[:half], *x.dims[dim + 1 :]), sign=Sign.ANY)


def _sign(x: Any) -> Sign:
    if isinstance(x, TracedValue):
        return x.sign
    if not isinstance(x, int | float):
        return Sign.ANY
    return Sign.POSITIVE if x > 0 else Sign.NONNEGATIVE if x == 0 else Sign.ANY
