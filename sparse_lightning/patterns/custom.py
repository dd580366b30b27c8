"""Custom: scopes that a user's function makes from the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from sparse_lightning.blocks.scope import SparseScope
from sparse_lightning.errors import PatternError
from sparse_lightning.patterns.names import Names
from sparse_lightning.patterns.pattern import Attachment, Pattern


@dataclass(frozen=True)
class Custom(Pattern):
    """The scopes that a function returns for the model.

    A scope without a name gets the name of its first parameter.

    Args:
        fn: called with the model; returns a scope or a list of scopes on its parameters.

    Example:
        >>> from sparse_lightning import BlockSpec, ScopeSpec
        >>> halves = Custom(lambda model: ScopeSpec(BlockSpec(model.weight, (-1, 2))))
        >>> [found.name for found in halves.resolve(Names(nn.Linear(4, 4)))]
        ['weight']
    """

    fn: Callable[[nn.Module], SparseScope | Sequence[SparseScope]]

    label: ClassVar[str] = "custom"

    def resolve(self, names: Names) -> list[Attachment]:
        """Return one attachment for each scope that the function returns."""
        made = self.fn(names.model)
        scopes = [made] if isinstance(made, SparseScope) else list(made)
        if not scopes:
            raise PatternError(f"{self} returns no scopes for {type(names.model).__name__}: return at least one")
        return [self._attach(names, scope) for scope in scopes]

    def _attach(self, names: Names, scope: SparseScope) -> Attachment:
        if not isinstance(scope, SparseScope):
            raise PatternError(
                f"{self} returns {scope!r}, not a scope: return a ScopeSpec, a ScopeCoupling, or a list of them"
            )
        for parameter in scope.unique_params():
            if names.name_of(parameter) is None:
                raise PatternError(
                    f"{self} returns {scope} on a tensor of shape {tuple(parameter.shape)} that is not a parameter of "
                    "the model: use the parameters of the model that is passed to the function"
                )
        return Attachment(scope.name or str(names.name_of(scope.unique_params()[0])), self.label, scope)
