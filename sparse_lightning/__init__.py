"""Structured sparsity for PyTorch Lightning: blocks of weights that are scored, pruned and held at zero.

Names are imported on first use: `import sparse_lightning` alone is quick and does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparse_lightning.moved import install

if TYPE_CHECKING:
    from sparse_lightning.blocks.builder import SparsityBuilder
    from sparse_lightning.blocks.scope import ScopeCoupling, ScopeSpec, SparseScope
    from sparse_lightning.blocks.sparse_block import SparseBlock
    from sparse_lightning.blocks.spec import BlockCoupling, BlockSpec
    from sparse_lightning.blocks.view import View, copy_, empty_strided
    from sparse_lightning.budgets import ERK, LAMP, Global, Uniform
    from sparse_lightning.callbacks import SparseModelCheckpoint, SparsityCallback
    from sparse_lightning.compaction import compact
    from sparse_lightning.compaction.shrink import Shrink
    from sparse_lightning.compensation import Refit
    from sparse_lightning.criteria import (
        EMA,
        OBS,
        AdamFisher,
        AverageTaylor,
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
    from sparse_lightning.engine.prune import prune
    from sparse_lightning.engine.sparsifier import Sparsifier
    from sparse_lightning.errors import (
        CheckpointError,
        CopyWarning,
        CouplingError,
        FixedSizeWarning,
        FlowError,
        InputsWarning,
        LayoutError,
        NothingToRemoveWarning,
        PatternError,
        PretrainedConfigWarning,
        ScoreWarning,
        ShortRunWarning,
        SparseLightningError,
        SparsityError,
    )
    from sparse_lightning.flow import Criterion, InputNorms, Load, Save, Scorer, State
    from sparse_lightning.graph import couplings
    from sparse_lightning.kernels.nm_select import nm_select
    from sparse_lightning.layout import Layout
    from sparse_lightning.methods import SET, Gradual, Proximal, PruneOnce, RigL, Soft
    from sparse_lightning.metrics import BlockSparsity, MaskChurn, MaskOverlap
    from sparse_lightning.patterns import (
        NM,
        Blocks,
        Coupled,
        Custom,
        Experts,
        Filters,
        Heads,
        Neurons,
        Strided,
        check_pruned,
    )
    from sparse_lightning.schedules import Constant, Cosine, Cubic, Cyclic, Exponential, Join, Linear, OneShot, Steps
    from sparse_lightning.tiles import TileLinear, tiled

__version__ = "0.1.0"

__all__ = [
    "EMA",
    "ERK",
    "LAMP",
    "NM",
    "OBS",
    "SET",
    "AdamFisher",
    "AverageTaylor",
    "BlockCoupling",
    "BlockSparsity",
    "BlockSpec",
    "Blocks",
    "CheckpointError",
    "Constant",
    "CopyWarning",
    "Cosine",
    "Coupled",
    "CouplingError",
    "Criterion",
    "Cubic",
    "Custom",
    "Cyclic",
    "ElementwiseTaylor",
    "Experts",
    "Exponential",
    "Filters",
    "Fisher",
    "FixedSizeWarning",
    "FlowError",
    "Global",
    "Gradient",
    "Gradual",
    "Heads",
    "InputNorms",
    "InputsWarning",
    "Join",
    "Layout",
    "LayoutError",
    "Linear",
    "Load",
    "Magnitude",
    "MaskChurn",
    "MaskOverlap",
    "Movement",
    "Neurons",
    "NothingToRemoveWarning",
    "OneShot",
    "PatternError",
    "PretrainedConfigWarning",
    "Proximal",
    "PruneOnce",
    "Random",
    "Refit",
    "RigL",
    "Save",
    "ScopeCoupling",
    "ScopeSpec",
    "ScoreWarning",
    "Scorer",
    "Sensitivity",
    "ShortRunWarning",
    "Shrink",
    "Soft",
    "SparseBlock",
    "SparseLightningError",
    "SparseModelCheckpoint",
    "SparseScope",
    "Sparsifier",
    "SparsityBuilder",
    "SparsityCallback",
    "SparsityError",
    "State",
    "Steps",
    "Strided",
    "Taylor",
    "TileLinear",
    "Uniform",
    "View",
    "Wanda",
    "check_pruned",
    "compact",
    "copy_",
    "couplings",
    "draw",
    "empty_strided",
    "nm_select",
    "prune",
    "tiled",
]

_HOMES = {
    # Train to sparsity
    "callbacks": ["SparseModelCheckpoint", "SparsityCallback"],
    "engine.sparsifier": ["Sparsifier"],
    "engine.prune": ["prune"],
    "compensation": ["Refit"],
    "compaction.shrink": ["Shrink"],
    # Which weights form blocks
    "patterns": [
        "NM",
        "Blocks",
        "Coupled",
        "Custom",
        "Experts",
        "Filters",
        "Heads",
        "Neurons",
        "Strided",
        "check_pruned",
    ],
    "graph": ["couplings"],
    # When, how many, which
    "schedules": ["Constant", "Cosine", "Cubic", "Cyclic", "Exponential", "Join", "Linear", "OneShot", "Steps"],
    "budgets": ["ERK", "LAMP", "Global", "Uniform"],
    "methods": ["SET", "Gradual", "Proximal", "PruneOnce", "RigL", "Soft"],
    # Scores
    "criteria": [
        "EMA",
        "OBS",
        "AdamFisher",
        "AverageTaylor",
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
    "flow": ["Criterion", "InputNorms", "Load", "Save", "Scorer", "State"],
    "kernels.nm_select": ["nm_select"],
    # Zeros become speed
    "compaction": ["compact"],
    "tiles": ["TileLinear", "tiled"],
    # Metrics and figures
    "metrics": ["BlockSparsity", "MaskChurn", "MaskOverlap"],
    "drawing": ["draw"],
    # Views, blocks and scopes
    "layout": ["Layout"],
    "blocks.view": ["View", "copy_", "empty_strided"],
    "blocks.spec": ["BlockCoupling", "BlockSpec"],
    "blocks.sparse_block": ["SparseBlock"],
    "blocks.scope": ["ScopeCoupling", "ScopeSpec", "SparseScope"],
    "blocks.builder": ["SparsityBuilder"],
    # Errors and warnings
    "errors": [
        "CheckpointError",
        "CopyWarning",
        "CouplingError",
        "FixedSizeWarning",
        "FlowError",
        "InputsWarning",
        "LayoutError",
        "NothingToRemoveWarning",
        "PatternError",
        "PretrainedConfigWarning",
        "ScoreWarning",
        "ShortRunWarning",
        "SparseLightningError",
        "SparsityError",
    ],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

install()


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
