"""Patterns: which parameters of a model become which blocks and scopes."""

from __future__ import annotations

from sparse_lightning.patterns.blocks import NM, Blocks
from sparse_lightning.patterns.check import check_pruned
from sparse_lightning.patterns.claims import resolve
from sparse_lightning.patterns.custom import Custom
from sparse_lightning.patterns.families import Coupled
from sparse_lightning.patterns.filters import Filters
from sparse_lightning.patterns.given import PatternLike, Patterns, as_list
from sparse_lightning.patterns.heads import Heads
from sparse_lightning.patterns.neurons import Neurons
from sparse_lightning.patterns.pattern import Attachment, NamedScope, Pattern
from sparse_lightning.patterns.strided import Strided
from sparse_lightning.patterns.summary_table import summary
from sparse_lightning.patterns.whole_experts import Experts

__all__ = [
    "NM",
    "Attachment",
    "Blocks",
    "Coupled",
    "Custom",
    "Experts",
    "Filters",
    "Heads",
    "NamedScope",
    "Neurons",
    "Pattern",
    "PatternLike",
    "Patterns",
    "Strided",
    "as_list",
    "check_pruned",
    "resolve",
    "summary",
]
