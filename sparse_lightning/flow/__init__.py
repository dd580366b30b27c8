"""Flows: small scoring programs, traced and checked once, then run at each update."""

from sparse_lightning.flow.context import FORMAT, Context, Op, Value
from sparse_lightning.flow.criterion import Criterion
from sparse_lightning.flow.input_norms import InputNorms
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
    "InputNorms",
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
