"""Flows: small scoring programs, traced once, checked, and run each time scores are due."""

from sparse_lightning.flow.context import FORMAT, Context, Value
from sparse_lightning.flow.criterion import Criterion
from sparse_lightning.flow.inputs import Inputs
from sparse_lightning.flow.ops import (
    Abs,
    Exp,
    L2Norm,
    Load,
    Log,
    Max,
    Maximum,
    Mean,
    Min,
    Minimum,
    Normalize,
    Op,
    Pick,
    Rank,
    Relu,
    Save,
    Sigmoid,
    Softmax,
    Sqrt,
    Square,
    Stack,
    Sum,
    Where,
)
from sparse_lightning.flow.paged import State
from sparse_lightning.flow.program import Program, trace
from sparse_lightning.flow.scorer import Proposal, Scorer
from sparse_lightning.flow.sources import Sources

__all__ = [
    "FORMAT",
    "Abs",
    "Context",
    "Criterion",
    "Exp",
    "Inputs",
    "L2Norm",
    "Load",
    "Log",
    "Max",
    "Maximum",
    "Mean",
    "Min",
    "Minimum",
    "Normalize",
    "Op",
    "Pick",
    "Program",
    "Proposal",
    "Rank",
    "Relu",
    "Save",
    "Scorer",
    "Sigmoid",
    "Softmax",
    "Sources",
    "Sqrt",
    "Square",
    "Stack",
    "State",
    "Sum",
    "Value",
    "Where",
    "trace",
]
