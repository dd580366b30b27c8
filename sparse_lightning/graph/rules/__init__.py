"""One rule for each operation; an operation without a rule pins all that it touches."""

from sparse_lightning.graph.rules import (
    attention,
    contractions,
    convolutions,
    elementwise,
    indexing,
    normalizations,
    reductions,
    shapes,
    sources,
)

__all__ = [
    "attention",
    "contractions",
    "convolutions",
    "elementwise",
    "indexing",
    "normalizations",
    "reductions",
    "shapes",
    "sources",
]
