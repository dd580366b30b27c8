"""The errors of sparse_lightning: one family, each telling what was wrong and what to change."""

from __future__ import annotations


class SparseLightningError(Exception):
    """Any error that sparse_lightning raises on purpose."""


class LayoutError(SparseLightningError, ValueError):
    """A shape, stride, offset or block that does not fit its parameter."""


class CouplingError(SparseLightningError, ValueError):
    """Grids that cannot be laid on one another."""


class PatternError(SparseLightningError, ValueError):
    """A pattern that names nothing in the model, or what another pattern has claimed."""


class FlowError(SparseLightningError, ValueError):
    """A scoring program that does not fit together, or that asks for what is not there."""


class CheckpointError(SparseLightningError):
    """A checkpoint that does not fit the model it is loaded into."""


class SparsityError(SparseLightningError, ValueError):
    """A sparsity, a count of blocks or a threshold that is out of range."""


class ScoreWarning(UserWarning):
    """Scores that are not numbers: the blocks they belong to rank lowest."""


class ConfigError(SparseLightningError, ValueError):
    """A configuration that cannot be run; it names the place in the configuration."""


class UntrustedError(ConfigError):
    """A configuration that asks for code which configurations may not run."""
