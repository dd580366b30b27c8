"""Blocks and NM: every matching parameter is cut into blocks on its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from sparse_lightning.block import BlockSpec
from sparse_lightning.errors import PatternError
from sparse_lightning.names import Names
from sparse_lightning.nearest import did_you_mean
from sparse_lightning.patterns.layer import Layer
from sparse_lightning.patterns.pattern import Attachment, Pattern, as_globs
from sparse_lightning.scope import ScopeSpec
from sparse_lightning.view import View

_SCOPES = {"tensor": (), "row": (1,), "column": (-1, 1)}


@dataclass(frozen=True)
class Blocks(Pattern):
    """Blocks of one shape in every matching parameter.

    Parameters that an earlier pattern took are left to it.

    Args:
        match: a glob of parameter names, a regular expression after `re:`, or a list of such.
        shape: the block; −1 spans its dimension, missing trailing entries are 1.
        scope: which blocks compete: "tensor" for all of a parameter, "row" or "column" for those in one row or
            column of blocks, or a shape that counts blocks.
        edge: "error" refuses parameters that the block does not divide; "partial" lets the last block of a
            dimension be smaller.

    Example:
        >>> from torch import nn
        >>> [found] = Blocks("*.weight", shape=(4, 4), scope="row").resolve(Names(nn.Sequential(nn.Linear(8, 16))))
        >>> found.name, found.scope.numscp(), found.scope.numblk_per_scope()
        ('0.weight', 4, 2)
    """

    match: str | Sequence[str]
    shape: Sequence[int]
    scope: str | Sequence[int] = "tensor"
    edge: Literal["error", "partial"] = "error"

    label: ClassVar[str] = "blocks"

    def __post_init__(self) -> None:
        object.__setattr__(self, "match", as_globs(self.match))
        object.__setattr__(self, "shape", tuple(self.shape))
        if isinstance(self.scope, str) and self.scope not in _SCOPES:
            raise PatternError(f"there is no scope {self.scope!r}{did_you_mean(self.scope, _SCOPES)}, or give a shape")
        if not isinstance(self.scope, str):
            object.__setattr__(self, "scope", tuple(self.scope))

    def resolve(self, names: Names) -> list[Attachment]:
        """A scope for each parameter."""
        return [self._attach(names, name) for name in self.unclaimed(names, self.match)]

    def _attach(self, names: Names, name: str) -> Attachment:
        parameter = names.parameters[name]
        shape = _SCOPES[self.scope] if isinstance(self.scope, str) else self.scope
        with self.refusing(name, parameter):
            spec = BlockSpec(parameter, self.shape, name=name, edge=self.edge)
            return Attachment(name, self.label, ScopeSpec(spec, shape, name=name))


@dataclass(frozen=True)
class NM(Pattern):
    """Of every m neighbouring weights along the input dimension n are kept.

    Parameters of one dimension have no inputs and are passed over; those that an earlier pattern took are left
    to it.

    Args:
        match: a glob of parameter names, a regular expression after `re:`, or a list of such.
        n: weights kept in each group.
        m: weights in a group.

    Example:
        >>> from torch import nn
        >>> [found] = NM("*.weight", n=2, m=4).resolve(Names(nn.Sequential(nn.Linear(8, 16))))
        >>> found.final, found.scope.numscp(), found.scope.numblk_per_scope()
        (0.5, 32, 4)
    """

    match: str | Sequence[str]
    n: int = 2
    m: int = 4

    label: ClassVar[str] = "nm"

    def __post_init__(self) -> None:
        object.__setattr__(self, "match", as_globs(self.match))
        if not 1 <= self.n <= self.m:
            raise PatternError(f"{self.n}:{self.m} keeps {self.n} of {self.m} weights: n must lie between 1 and m")

    def resolve(self, names: Names) -> list[Attachment]:
        """A scope for each parameter of two or more dimensions."""
        return [self._attach(names, name) for name in self.unclaimed(names, self.match, least_ndim=2)]

    def _attach(self, names: Names, name: str) -> Attachment:
        parameter, layout = names.parameters[name], Layer.at(names, name).upright()
        if layout.shape[1] % self.m:
            raise PatternError(
                f"{self} does not fit {name} of shape {tuple(parameter.shape)}: its {layout.shape[1]} inputs are not "
                f"a multiple of {self.m}, the groups of blocks of one weight. Change m, or the names in the pattern"
            )
        spec = BlockSpec(View(parameter, layout.shape, layout.stride, layout.offset), (1,), name=name)
        scope = ScopeSpec(spec, (1, self.m, *(1,) * (layout.ndim - 2)), name=name)
        return Attachment(name, self.label, scope, final=1 - self.n / self.m)
