"""Sparsity schedules: the target sparsity at each optimizer step, and the steps at which masks are updated.

The sparsity level is the fraction of weights that are pruned; the density is 1 − sparsity.
"""

from sparse_lightning.schedules.curves import (
    Constant,
    Cosine,
    Cubic,
    Cyclic,
    Exponential,
    Linear,
    OneShot,
    Steps,
)
from sparse_lightning.schedules.join import Join
from sparse_lightning.schedules.schedule import Ramp, Schedule, When

__all__ = [
    "Constant",
    "Cosine",
    "Cubic",
    "Cyclic",
    "Exponential",
    "Join",
    "Linear",
    "OneShot",
    "Ramp",
    "Schedule",
    "Steps",
    "When",
]
