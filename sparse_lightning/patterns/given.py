"""Blocks and scopes where patterns are expected: what the arguments called `patterns` take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sparse_lightning.blocks.scope import ScopeSpec, SparseScope
from sparse_lightning.blocks.sparse_block import SparseBlock
from sparse_lightning.errors import PatternError
from sparse_lightning.patterns.names import Names
from sparse_lightning.patterns.pattern import Attachment, Pattern

PatternLike = Pattern | SparseBlock | SparseScope
"""A pattern, or blocks or scopes on parameters of the model. The blocks of a `SparseBlock` compete in one scope."""

Patterns = PatternLike | Sequence[PatternLike] | Mapping[str, PatternLike]
"""A pattern, or several in order of precedence; the keys of a mapping are their labels in logs and tables."""


_PASS = (
    "pass Coupled, Blocks, NM, Filters, Neurons, Heads, Experts, Strided or Custom, or a BlockSpec, BlockCoupling, "
    "ScopeSpec or ScopeCoupling"
)


@dataclass(frozen=True)
class Given(Pattern):
    """The scope of blocks or scopes that a user has made on parameters of the model.

    Its name is the name of the scope or block, or that of its first parameter.

    Args:
        made: a BlockSpec, BlockCoupling, ScopeSpec or ScopeCoupling.
    """

    made: SparseBlock | SparseScope

    label: ClassVar[str] = "scopes"

    def __str__(self) -> str:
        return repr(self.made)

    def resolve(self, names: Names) -> list[Attachment]:
        """Return one attachment, of the scope itself, or of one scope of all blocks."""
        scope = self.made if isinstance(self.made, SparseScope) else ScopeSpec(self.made, name=self.made.name)
        first, *_ = [_name_of(names, parameter, self) for parameter in scope.unique_params()]
        blocks = scope.blocks()
        return [Attachment(scope.name or (blocks[0].name if len(blocks) == 1 else None) or first, self.label, scope)]


def _name_of(names: Names, parameter: Tensor, owner: object) -> str:
    found = names.name_of(parameter)
    if found is None:
        raise PatternError(
            f"{owner} is on a tensor of shape {tuple(parameter.shape)} that is not a parameter of "
            f"{type(names.model).__name__}: make it on a parameter of the model that is trained. If parameters are "
            "replaced before training, as by sharding, use Strided or Custom, which find them by name"
        )
    return found


def collected(patterns: Patterns) -> list[PatternLike] | dict[str, PatternLike]:
    """Return patterns as a list or a dict of their own; a single pattern in a list.

    Raises:
        PatternError: for anything else.
    """
    if isinstance(patterns, PatternLike):
        return [patterns]
    if isinstance(patterns, Mapping):
        return dict(patterns)
    given: object = patterns  # whatever a caller without type checks passes
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise PatternError(f"{given!r} is not a pattern: {_PASS}")
    return list(patterns)


def as_list(patterns: Patterns) -> list[PatternLike]:
    """Return the patterns of a list or a mapping, in order.

    Example:
        >>> from sparse_lightning import NM, Blocks
        >>> [type(pattern).__name__ for pattern in as_list({"tiles": Blocks("*", (4, 4)), "rest": NM("*")})]
        ['Blocks', 'NM']
    """
    found = collected(patterns)
    return list(found.values()) if isinstance(found, dict) else found


def labelled(patterns: Patterns) -> Iterator[tuple[str, Pattern]]:
    """Yield patterns with their labels; the second of a kind in a list gets the suffix `_2`."""
    keys = list(patterns) if isinstance(patterns, Mapping) else None
    seen: Counter[str] = Counter()
    for i, given in enumerate(as_list(patterns)):
        pattern = Given(given) if isinstance(given, SparseBlock | SparseScope) else given
        if not isinstance(pattern, Pattern):
            raise PatternError(f"{given!r} is not a pattern: {_PASS}")
        if keys is not None:
            yield str(keys[i]), pattern
            continue
        seen[pattern.label] += 1
        number = 1 if isinstance(pattern, Given) else seen[pattern.label]  # scopes share one label
        yield pattern.label if number == 1 else f"{pattern.label}_{number}", pattern
