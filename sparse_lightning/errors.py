"""The errors of sparse_lightning: one family. A message says what is wrong, why, and what to change."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class SparseLightningError(Exception):
    """The base class of all errors that sparse_lightning raises."""


class LayoutError(SparseLightningError, ValueError):
    """A shape, stride, offset or block does not fit its parameter."""


class CouplingError(SparseLightningError, ValueError):
    """The grids of coupled blocks or scopes do not match."""


class PatternError(SparseLightningError, ValueError):
    """A pattern matches nothing in the model, does not fit a parameter, or needs weights that are already claimed."""


class FlowError(SparseLightningError, ValueError):
    """A scoring program is inconsistent, or reads a value that is not available."""


class CheckpointError(SparseLightningError):
    """A checkpoint or file does not fit the model that it is loaded into."""


class UnseenInputsError(FlowError):
    """A layer had no inputs since the last update, so that its weights cannot be scored by them."""


class SparsityError(SparseLightningError, ValueError):
    """A sparsity, a density, a number of blocks or a threshold is out of range."""


class ScoreWarning(UserWarning):
    """Scores are NaN: their blocks rank lowest."""


class CopyWarning(UserWarning):
    """A tensor that is usually live is a copy: a write to it is lost."""


class InputsWarning(UserWarning):
    """What was observed of the inputs of layers is forgotten: the next scores are those of fewer steps."""


class ShortRunWarning(UserWarning):
    """A run ended below the final target sparsity of its schedule."""


class FixedSizeWarning(UserWarning):
    """A traced program takes only batches or sequences of the size that it was traced with."""


class NothingToRemoveWarning(UserWarning):
    """No unit of a model is zero in all of its weights: compacting it leaves it as it is."""


class PretrainedConfigWarning(UserWarning):
    """The configuration of a model of Hugging Face cannot hold the sizes of its compacted copy."""


class ConfigError(SparseLightningError, ValueError):
    """A configuration is invalid; the message names the place in the configuration."""


class UntrustedError(ConfigError):
    """A configuration names code that configurations are not allowed to run."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: the closest known name, or all of them if there are few, or nothing.

    Names that begin with the given one come first, however much longer they are.

    Example:
        >>> print("no scope 'nuerons'" + did_you_mean("nuerons", ["neurons", "heads"]))
        no scope 'nuerons': did you mean 'neurons'?
        >>> print("no criterion 'mag'" + did_you_mean("mag", ["ema", "magnitude"]))
        no criterion 'mag': did you mean 'magnitude'?
    """
    names = list(known)
    longer = [each for each in names if name and each.startswith(name)]
    near = get_close_matches(name, longer, n=1, cutoff=0.0) or get_close_matches(name, names, n=1)
    if near:
        return f": did you mean {near[0]!r}?"
    return f": there are {', '.join(map(repr, names))}" if 0 < len(names) <= 10 else ""
