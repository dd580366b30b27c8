"""Stage: the computation on the elements of blocks that results in grids, as a small program.

The inputs are windows. Steps are elementwise, and some of the values are folded over each block. A stage is data: plain
torch runs it, `torch.compile` compiles it, and a Triton kernel is generated from it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

FoldKind = Literal["sum", "max", "min"]


@dataclass(frozen=True)
class Ref:
    """An earlier value: the input windows come first, then the results of the steps."""

    at: int


@dataclass(frozen=True)
class Step:
    """One elementwise operation, by its name in `OPERATIONS`, on earlier values and numbers."""

    operation: str
    arguments: tuple[Ref | float, ...]


@dataclass(frozen=True)
class Stage:
    """Elementwise steps on windows, and folds of their results over the elements of each block.

    Attributes:
        inputs: the number of windows.
        steps: the operations in order.
        folds: the value that each fold reduces, and its kind.
    """

    inputs: int
    steps: tuple[Step, ...]
    folds: tuple[tuple[Ref, FoldKind], ...]


def elementwise(stage: Stage, windows: Sequence[Tensor]) -> list[Tensor]:
    """Return the values that the folds of a stage reduce, each in the shape of the windows."""
    values: list[Any] = list(windows)
    for step in stage.steps:
        arguments = [values[a.at] if isinstance(a, Ref) else a for a in step.arguments]
        values.append(OPERATIONS[step.operation](*arguments))
    return [values[ref.at] for ref, _ in stage.folds]


def vanishes(stage: Stage) -> bool:
    """Whether all folds are zero over elements whose first input, the weight, is zero and whose others are finite.

    Example:
        >>> vanishes(Stage(2, (Step("mul", (Ref(0), Ref(1))), Step("abs", (Ref(2),))), ((Ref(3), "sum"),)))
        True
        >>> vanishes(Stage(2, (Step("square", (Ref(1),)),), ((Ref(2), "sum"),)))
        False
    """
    zero = {0}
    for i, step in enumerate(stage.steps, start=stage.inputs):
        known = [a.at in zero if isinstance(a, Ref) else a == 0 for a in step.arguments]
        if all(known) if step.operation in _ZERO_OF_ZEROS else step.operation == "mul" and any(known):
            zero.add(i)
    return all(ref.at in zero for ref, _ in stage.folds)


_ZERO_OF_ZEROS = ("add", "sub", "neg", "abs", "square", "sqrt", "relu", "maximum", "minimum")


def _maximum(a: Any, b: Any) -> Tensor:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.maximum(a, b)
    return torch.clamp(a, min=b) if isinstance(a, Tensor) else torch.clamp(b, min=a)


def _minimum(a: Any, b: Any) -> Tensor:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.minimum(a, b)
    return torch.clamp(a, max=b) if isinstance(a, Tensor) else torch.clamp(b, max=a)


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "neg": operator.neg,
    "abs": torch.abs,
    "square": torch.square,
    "sqrt": torch.sqrt,
    "log": torch.log,
    "exp": torch.exp,
    "power": operator.pow,
    "maximum": _maximum,
    "minimum": _minimum,
    "where": torch.where,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "gt": operator.gt,
    "ge": operator.ge,
    "lt": operator.lt,
    "le": operator.le,
}
