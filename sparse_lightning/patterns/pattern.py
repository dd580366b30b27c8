"""Pattern: the base class of all patterns; Attachment: what a pattern returns for a model."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import ClassVar, Protocol

from torch import Tensor
from typing_extensions import TypeAliasType

from sparse_lightning.blocks.scope import SparseScope
from sparse_lightning.errors import CouplingError, LayoutError, PatternError
from sparse_lightning.graph import Couplings
from sparse_lightning.layout import Layout
from sparse_lightning.patterns.names import Names, nearest

Globs = TypeAliasType("Globs", str | Sequence[str])
"""One glob or several. It is a named type because OmegaConf, and with it Hydra, accepts no union with a list."""


@dataclass(frozen=True)
class Attachment:
    """A scope of a model with its name: what a pattern returns.

    Args:
        name: unique in the model: the name of the parameter; for coupled blocks that of the module and the pattern.
        pattern: the label of the pattern, for logs.
        scope: the blocks that compete.
        final: the final sparsity if the pattern fixes it, as N:M does; None leaves it to the budget.
        has_units: whether each block is a unit of the model, such as a channel, that may cross other units: rows of a
            weight belong to the units that it computes, and columns to those that it reads.
        traced: the families of the model, where the pattern has found its units among them.
    """

    name: str
    pattern: str
    scope: SparseScope
    final: float | None = None
    has_units: bool = False
    traced: Couplings | None = field(default=None, repr=False, compare=False)


class NamedScope(Protocol):
    """What tables, reports and checks read of a scope: an `Attachment` has it, and so has a scope in training."""

    @property
    def name(self) -> str:
        """Unique in the model."""

    @property
    def pattern(self) -> str:
        """The label of the pattern."""

    @property
    def scope(self) -> SparseScope:
        """The blocks that compete."""

    @property
    def final(self) -> float | None:
        """The final sparsity if the pattern fixes it."""


class Pattern(ABC):
    """Selects parameters of a model by name, and divides them into blocks and scopes.

    Errors show `str(pattern)`: the class with all arguments that differ from their defaults.
    """

    label: ClassVar[str]

    @abstractmethod
    def resolve(self, names: Names) -> list[Attachment]:
        """Return the scopes of a model; raise a `PatternError` if names or shapes do not fit."""

    def __str__(self) -> str:
        kind: type = type(self)
        if not is_dataclass(kind):
            return repr(self)
        given = [(f.name, getattr(self, f.name)) for f in fields(kind) if getattr(self, f.name) != f.default]
        return f"{kind.__name__}({', '.join(f'{name}={_text(value)}' for name, value in given)})"

    @contextmanager
    def error_context(self, name: str, parameter: Tensor) -> Iterator[None]:
        """Add the pattern, the name and the shape of the parameter to errors that are raised inside."""
        try:
            yield
        except (LayoutError, CouplingError) as error:
            where = f"{name} of shape {tuple(parameter.shape)}"
            what = str(self) if where in str(error) else f"{self} does not fit {where}"
            raise PatternError(f"{what}: {error}. Or change the names to exclude this parameter") from error

    def refusing(self, name: str, parameter: Tensor) -> AbstractContextManager[None]:
        """Deprecated: the former name of `error_context`."""
        warnings.warn("Pattern.refusing is deprecated: use error_context", DeprecationWarning, stacklevel=2)
        return self.error_context(name, parameter)

    def unclaimed(self, names: Names, globs: Iterable[str], min_ndim: int = 0) -> list[str]:
        """Return the names of matching parameters that no earlier pattern claimed; a tied one once.

        Parameters with fewer than `min_ndim` dimensions are skipped, and noted in `names.passed_over`.

        Raises:
            PatternError: if there are none.
        """
        found: dict[int, str] = {}
        for glob in globs:
            for name in self._matching(names, glob):
                found.setdefault(id(names.parameters[name]), name)
        fit = [name for name in found.values() if names.parameters[name].ndim >= min_ndim]
        names.passed_over += [name for name in found.values() if name not in fit]
        if not fit:
            name = next(iter(found.values()))
            advice = "" if self.label == "nm" else ", or remove entries of the shape"
            raise PatternError(
                f"{self} matches no parameter with {min_ndim} or more dimensions: {name} has the shape "
                f"{tuple(names.parameters[name].shape)}. Name weights of linear layers or convolutions{advice}"
            )
        return self.drop_claimed(names, fit)

    def drop_claimed(self, names: Names, found: Sequence[str], units: Mapping[str, Layout] | None = None) -> list[str]:
        """Drop the parameters that an earlier pattern claimed; raise a PatternError if none are left.

        Args:
            names: of the model.
            found: the names of parameters.
            units: by name, the layout of their units, which may cross units that are claimed.
        """
        owners = {name: names.owner_of(names.parameters[name], (units or {}).get(name)) for name in found}
        left = [name for name, owner in owners.items() if owner is None]
        if not left:
            claimed = " and ".join(dict.fromkeys(map(str, owners.values())))
            raise PatternError(
                f"{self} matches no unclaimed parameter: {_some(found)} already claimed by {claimed}. "
                "The first match wins: change the order of the patterns, or remove this one"
            )
        return left

    def _matching(self, names: Names, glob: str) -> list[str]:
        found = list(names.find(glob))
        if not found:
            raise PatternError(f"{self}: {glob!r} matches no parameter{nearest(glob, names.parameters)}")
        return found


def _text(value: object) -> str:
    """Return the repr of a value; of a function its name, which is the same in every process."""
    name = getattr(value, "__qualname__", None)
    return f"{getattr(value, '__module__', '')}.{name}" if callable(value) and name else repr(value)


def as_globs(match: Globs) -> tuple[str, ...]:
    """Return one glob or several as a tuple."""
    globs = (match,) if isinstance(match, str) else tuple(match)
    if not globs or not all(isinstance(glob, str) for glob in globs):
        raise PatternError(f"{match!r} does not name parameters: pass a glob, or a list of globs")
    return globs


def as_shape(role: str, given: object) -> tuple[int, ...]:
    """Return a shape as a tuple; raise a PatternError if it is not a sequence of numbers.

    Example:
        >>> as_shape("shape", [4, 4])
        (4, 4)
    """
    if not isinstance(given, Sequence) or not all(isinstance(n, int) for n in given):
        raise PatternError(
            f"{role}={given!r} is not a shape: pass a whole number for each dimension, such as (4, 4); (4,) is 4 along "
            "the first and 1 along the others"
        )
    return tuple(given)


def _some(found: Sequence[str]) -> str:
    names = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    return f"{names} {'is' if len(found) == 1 else 'are'}"
