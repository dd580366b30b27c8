"""Blocks and NM: patterns that divide each matching parameter into blocks by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from typing_extensions import TypeAliasType

from sparse_lightning.blocks.scope import ScopeSpec
from sparse_lightning.blocks.spec import BlockSpec
from sparse_lightning.blocks.view import View
from sparse_lightning.errors import PatternError, did_you_mean
from sparse_lightning.patterns.layer import Layer
from sparse_lightning.patterns.names import Names
from sparse_lightning.patterns.pattern import Attachment, Globs, Pattern, as_globs, as_shape

ScopeShape = TypeAliasType("ScopeShape", str | Sequence[int])
"""Which blocks compete: a name, or a shape in blocks."""

_SCOPES = {"tensor": (), "row": (1,), "column": (-1, 1)}


@dataclass(frozen=True)
class Blocks(Pattern):
    """Structured sparsity in blocks of one shape, in every matching parameter.

    Parameters that have fewer dimensions than the block, such as norms and biases, are skipped; so are those that an
    earlier pattern claimed.

    Args:
        match: a glob of parameter names, a regular expression after `re:`, or a list of them.
        shape: the block shape; −1 spans its dimension, missing trailing entries are 1: `(32,)` is 32×1 in a matrix.
        scope: which blocks compete: "tensor" for all blocks of a parameter, "row" or "column" for those in one row
            or column of blocks, or a shape in blocks.
        edge: "error" raises an error where the block does not divide the parameter; "partial" allows a smaller last
            block in each dimension.

    Example:
        >>> from torch import nn
        >>> [found] = Blocks("*.weight", shape=(4, 4), scope="row").resolve(Names(nn.Sequential(nn.Linear(8, 16))))
        >>> found.name, found.scope.numscp(), found.scope.numblk_per_scope()
        ('0.weight', 4, 2)
    """

    match: Globs
    shape: Sequence[int]
    scope: ScopeShape = "tensor"
    edge: Literal["error", "partial"] = "error"

    label: ClassVar[str] = "blocks"

    def __post_init__(self) -> None:
        object.__setattr__(self, "match", as_globs(self.match))
        object.__setattr__(self, "shape", as_shape("shape", self.shape))
        if isinstance(self.scope, str) and self.scope not in _SCOPES:
            hint = did_you_mean(self.scope, _SCOPES)
            raise PatternError(f"there is no scope {self.scope!r}{hint} (or pass a shape in blocks)")
        if not isinstance(self.scope, str):
            object.__setattr__(self, "scope", as_shape("scope", self.scope))

    def resolve(self, names: Names) -> list[Attachment]:
        """Return one attachment for each parameter."""
        return [self._attach(names, name) for name in self.unclaimed(names, self.match, min_ndim=len(self.shape))]

    def _attach(self, names: Names, name: str) -> Attachment:
        parameter = names.parameters[name]
        shape = _SCOPES[self.scope] if isinstance(self.scope, str) else self.scope
        with self.error_context(name, parameter):
            spec = BlockSpec(parameter, self.shape, name=name, edge=self.edge)
            return Attachment(name, self.label, ScopeSpec(spec, shape, name=name))


@dataclass(frozen=True)
class NM(Pattern):
    """N:M sparsity: keep n of every m consecutive weights along the input dimension, as in 2:4 sparsity.

    Parameters with one dimension have no inputs and are skipped; so are those that an earlier pattern claimed.

    Args:
        match: a glob of parameter names, a regular expression after `re:`, or a list of them.
        n: weights that are kept in each group.
        m: weights in a group.

    Example:
        >>> from torch import nn
        >>> [found] = NM("*.weight", n=2, m=4).resolve(Names(nn.Sequential(nn.Linear(8, 16))))
        >>> found.final, found.scope.numscp(), found.scope.numblk_per_scope()
        (0.5, 32, 4)
    """

    match: Globs
    n: int = 2
    m: int = 4

    label: ClassVar[str] = "nm"

    def __post_init__(self) -> None:
        object.__setattr__(self, "match", as_globs(self.match))
        if not 1 <= self.n <= self.m:
            raise PatternError(f"n={self.n}, m={self.m} is not an N:M pattern: n must lie between 1 and m")

    def resolve(self, names: Names) -> list[Attachment]:
        """Return one attachment for each parameter with two or more dimensions."""
        return [self._attach(names, name) for name in self.unclaimed(names, self.match, min_ndim=2)]

    def _attach(self, names: Names, name: str) -> Attachment:
        parameter, layout = names.parameters[name], Layer.at(names, name).upright()
        if layout.shape[1] % self.m:
            raise PatternError(
                f"{self} does not fit {name} of shape {tuple(parameter.shape)}: its {layout.shape[1]} inputs are not "
                f"divisible by m={self.m}. Change m, or change the names to exclude this parameter"
            )
        spec = BlockSpec(View(parameter, layout.shape, layout.stride, layout.offset), (1,), name=name)
        scope = ScopeSpec(spec, (1, self.m, *(1,) * (layout.ndim - 2)), name=name)
        return Attachment(name, self.label, scope, final=1 - self.n / self.m)
