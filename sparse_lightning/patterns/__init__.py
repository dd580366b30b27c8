"""Patterns: name parameters of a model and say how they become scopes."""

from __future__ import annotations

from sparse_lightning.patterns.blocks import NM, Blocks
from sparse_lightning.patterns.claims import resolve
from sparse_lightning.patterns.custom import Custom
from sparse_lightning.patterns.filters import Filters
from sparse_lightning.patterns.heads import Heads
from sparse_lightning.patterns.neurons import Neurons
from sparse_lightning.patterns.overview import summary
from sparse_lightning.patterns.pattern import Attachment, Pattern

__all__ = ["NM", "Attachment", "Blocks", "Custom", "Filters", "Heads", "Neurons", "Pattern", "resolve", "summary"]
