"""Structured sparsity for PyTorch Lightning: blocks of weights that are scored, pruned and held at zero.

Names are imported on first use: `import sparse_lightning` alone costs nothing and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparse_lightning.block import BlockCoupling, BlockSpec
    from sparse_lightning.budgets import ERK, LAMP, Global, Uniform
    from sparse_lightning.builder import SparsityBuilder
    from sparse_lightning.callbacks import SparsityCallback
    from sparse_lightning.criteria import (
        EMA,
        AdamFisher,
        ElementwiseTaylor,
        Fisher,
        Gradient,
        Magnitude,
        Movement,
        Random,
        Sensitivity,
        Taylor,
        Wanda,
    )
    from sparse_lightning.drawing import draw
    from sparse_lightning.errors import (
        CheckpointError,
        CouplingError,
        FlowError,
        LayoutError,
        PatternError,
        ScoreWarning,
        SparseLightningError,
        SparsityError,
    )
    from sparse_lightning.layout import Layout
    from sparse_lightning.methods import SET, Gradual, Proximal, RigL, Soft
    from sparse_lightning.metrics import BlockSparsity, MaskChurn, MaskOverlap
    from sparse_lightning.patterns import NM, Blocks, Custom, Filters, Heads, Neurons
    from sparse_lightning.schedules import Constant, Cosine, Cubic, Cyclic, Exponential, Join, Linear, Steps
    from sparse_lightning.scope import ScopeCoupling, ScopeSpec, SparseScope
    from sparse_lightning.sparse_block import SparseBlock
    from sparse_lightning.sparsifier import Sparsifier
    from sparse_lightning.view import View, copy_, empty_strided

__version__ = "0.1.0"

__all__ = [
    "EMA",
    "ERK",
    "LAMP",
    "NM",
    "SET",
    "AdamFisher",
    "BlockCoupling",
    "BlockSparsity",
    "BlockSpec",
    "Blocks",
    "CheckpointError",
    "Constant",
    "Cosine",
    "CouplingError",
    "Cubic",
    "Custom",
    "Cyclic",
    "ElementwiseTaylor",
    "Exponential",
    "Filters",
    "Fisher",
    "FlowError",
    "Global",
    "Gradient",
    "Gradual",
    "Heads",
    "Join",
    "Layout",
    "LayoutError",
    "Linear",
    "Magnitude",
    "MaskChurn",
    "MaskOverlap",
    "Movement",
    "Neurons",
    "PatternError",
    "Proximal",
    "Random",
    "RigL",
    "ScopeCoupling",
    "ScopeSpec",
    "ScoreWarning",
    "Sensitivity",
    "Soft",
    "SparseBlock",
    "SparseLightningError",
    "SparseScope",
    "Sparsifier",
    "SparsityBuilder",
    "SparsityCallback",
    "SparsityError",
    "Steps",
    "Taylor",
    "Uniform",
    "View",
    "Wanda",
    "copy_",
    "draw",
    "empty_strided",
]

_HOMES = {
    "callbacks": ["SparsityCallback"],
    "sparsifier": ["Sparsifier"],
    "patterns": ["Blocks", "Custom", "Filters", "Heads", "NM", "Neurons"],
    "schedules": ["Constant", "Cosine", "Cubic", "Cyclic", "Exponential", "Join", "Linear", "Steps"],
    "budgets": ["ERK", "Global", "LAMP", "Uniform"],
    "methods": ["Gradual", "Proximal", "RigL", "SET", "Soft"],
    "criteria": [
        "EMA",
        "AdamFisher",
        "ElementwiseTaylor",
        "Fisher",
        "Gradient",
        "Magnitude",
        "Movement",
        "Random",
        "Sensitivity",
        "Taylor",
        "Wanda",
    ],
    "metrics": ["BlockSparsity", "MaskChurn", "MaskOverlap"],
    "block": ["BlockCoupling", "BlockSpec"],
    "builder": ["SparsityBuilder"],
    "drawing": ["draw"],
    "errors": [
        "CheckpointError",
        "CouplingError",
        "FlowError",
        "LayoutError",
        "PatternError",
        "ScoreWarning",
        "SparseLightningError",
        "SparsityError",
    ],
    "layout": ["Layout"],
    "scope": ["ScopeCoupling", "ScopeSpec", "SparseScope"],
    "sparse_block": ["SparseBlock"],
    "view": ["View", "copy_", "empty_strided"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
