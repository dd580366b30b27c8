"""Pattern and Attachment: what every pattern is, and what it makes of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import ClassVar

from torch import Tensor

from sparse_lightning.errors import CouplingError, LayoutError, PatternError
from sparse_lightning.names import Names, nearest
from sparse_lightning.scope import SparseScope


@dataclass(frozen=True)
class Attachment:
    """A scope of a model, with the name it goes by.

    Args:
        name: unique in the model: that of the parameter, or of the module with the pattern for coupled ones.
        pattern: the label of the pattern that made it, for logs.
        scope: the blocks that compete.
        final: the sparsity that the pattern fixes, as N:M does; None leaves it to the budget.
    """

    name: str
    pattern: str
    scope: SparseScope
    final: float | None = None


class Pattern(ABC):
    """Names parameters of a model and says how they become scopes.

    `str` of a pattern is how errors speak of it: its class with the arguments that are not the default.
    """

    label: ClassVar[str]

    @abstractmethod
    def resolve(self, names: Names) -> list[Attachment]:
        """The scopes that this pattern makes of a model; `PatternError` where names or shapes do not fit."""

    def __str__(self) -> str:
        kind: type = type(self)
        if not is_dataclass(kind):
            return repr(self)
        given = [(f.name, getattr(self, f.name)) for f in fields(kind) if getattr(self, f.name) != f.default]
        return f"{kind.__name__}({', '.join(f'{name}={_text(value)}' for name, value in given)})"

    @contextmanager
    def refusing(self, name: str, parameter: Tensor) -> Iterator[None]:
        """Adds to an error of shapes which pattern and which parameter it is about, and what can be changed."""
        try:
            yield
        except (LayoutError, CouplingError) as error:
            raise PatternError(
                f"{self} does not fit {name} of shape {tuple(parameter.shape)}: {error}. Or change the names in the "
                "pattern, so that it is left out"
            ) from error

    def unclaimed(self, names: Names, globs: Iterable[str], least_ndim: int = 0) -> list[str]:
        """Names of the parameters that match a glob and that no earlier pattern took; a tied one once.

        Parameters of fewer dimensions are passed over. To find nothing is an error.
        """
        found: dict[int, str] = {}
        for glob in globs:
            for name in self._matching(names, glob):
                found.setdefault(id(names.parameters[name]), name)
        fit = [name for name in found.values() if names.parameters[name].ndim >= least_ndim]
        if not fit:
            name = next(iter(found.values()))
            raise PatternError(
                f"{self} matches no parameter of {least_ndim} or more dimensions: {name} has the shape "
                f"{tuple(names.parameters[name].shape)}. Name weights of linear layers or convolutions"
            )
        return self.left_over(names, fit)

    def left_over(self, names: Names, found: Sequence[str]) -> list[str]:
        """Those parameters that no earlier pattern took; to find none is an error."""
        left = [name for name in found if names.owner_of(names.parameters[name]) is None]
        if not left:
            owners = dict.fromkeys(str(names.owner_of(names.parameters[name])) for name in found)
            raise PatternError(
                f"{self} matches nothing that is left: {_some(found)} were claimed earlier by {' and '.join(owners)}. "
                "The first match wins: change the order of the patterns, or drop this one"
            )
        return left

    def _matching(self, names: Names, glob: str) -> list[str]:
        found = list(names.find(glob))
        if not found:
            raise PatternError(f"{self}: {glob!r} matches no parameter{nearest(glob, names.parameters)}")
        return found


def _text(value: object) -> str:
    """A value as it is written; a function by its name, which is the same in every process."""
    name = getattr(value, "__qualname__", None)
    return f"{getattr(value, '__module__', '')}.{name}" if callable(value) and name else repr(value)


def as_globs(match: str | Sequence[str]) -> tuple[str, ...]:
    """One glob or several, as a tuple."""
    globs = (match,) if isinstance(match, str) else tuple(match)
    if not globs or not all(isinstance(glob, str) for glob in globs):
        raise PatternError(f"{match!r} does not name parameters: give a glob, or a list of globs")
    return globs


def _some(found: Sequence[str]) -> str:
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
