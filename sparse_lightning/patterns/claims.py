"""resolve: apply patterns to a model such that each weight belongs to one block, or to two units that cross."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from sparse_lightning.blocks.spec import BlockSpec
from sparse_lightning.compat.torch import is_fsdp1_flattened
from sparse_lightning.errors import PatternError
from sparse_lightning.layout import Layout
from sparse_lightning.layout.crossing import meet
from sparse_lightning.patterns.adapters import adapted_layers, with_adapters
from sparse_lightning.patterns.given import Patterns, labelled
from sparse_lightning.patterns.names import Names, may_share
from sparse_lightning.patterns.pattern import Attachment, NamedScope, Pattern


def resolve(patterns: Patterns, model: nn.Module) -> list[Attachment]:
    """Return the scopes that patterns find in a model.

    The first match wins: `Blocks`, `NM`, `Filters` and `Strided` skip parameters that an earlier pattern claimed. Other
    patterns, blocks and scopes raise an error if they need such a parameter. Two blocks that share a weight raise an
    error, too, unless both are units that cross: a weight between two layers of pruned channels belongs to a channel
    that it computes, and to one that it reads.

    Args:
        patterns: in order of precedence: patterns, and blocks and scopes on parameters of the model. The keys of a
            mapping are their labels.
        model: as it is trained: wrapped, compiled and sharded.

    Raises:
        PatternError: if a pattern matches nothing, does not fit a shape, or needs weights that are claimed; or if the
            parameter of a block is not in the model.

    Example:
        >>> from sparse_lightning.patterns import Blocks, Neurons
        >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.Linear(4, 4))
        >>> [found.name for found in resolve([Neurons("0", "2"), Blocks("*.weight", (2, 2))], mlp)]
        ['0 (neurons)', '3.weight']
    """
    return resolve_in(patterns, Names(model))


def resolve_in(patterns: Patterns, names: Names) -> list[Attachment]:
    """Return the scopes that patterns find among the names of a model; what they claim is noted there."""
    _check_not_flattened(names)
    claims, made, adapted = _Claims(names), [], adapted_layers(names)
    for label, pattern in labelled(patterns):
        found = [with_adapters(attachment, adapted) for attachment in pattern.resolve(names)]
        if not found:
            raise PatternError(
                f"{pattern} matches nothing in {type(names.model).__name__}: change its names, or remove it"
            )
        claims.add(pattern, found)
        made += [replace(attachment, pattern=label) for attachment in found]
    return _with_unique_names(made)


def check_apart(some: Iterable[NamedScope], others: Iterable[NamedScope]) -> None:
    """Raise a PatternError if scopes of two callbacks share a weight."""
    shared = shared_weights(some, others)
    if shared is not None:
        name, other, shape = shared
        raise PatternError(
            f"{name} and {other} of another callback claim the same weights, in a parameter of shape {shape}: a weight "
            "can belong to one block only. Change the names in one of the callbacks"
        )


def shared_weights(some: Iterable[NamedScope], others: Iterable[NamedScope]) -> tuple[str, str, tuple[int, ...]] | None:
    """Return the names of a scope and of one of the others that share a weight, and the shape of its parameter."""
    taken: dict[int, list[tuple[str, Layout]]] = {}
    for name, spec in _specs(others):
        taken.setdefault(id(spec.param), []).append((name, spec.view.layout))
    for name, spec in _specs(some):
        for other, layout in taken.get(id(spec.param), ()):
            if meet(spec.view.layout, layout):
                return name, other, tuple(spec.param.shape)
    return None


def _specs(scopes: Iterable[NamedScope]) -> Iterator[tuple[str, BlockSpec]]:
    for found in scopes:
        for block in found.scope.blocks():
            yield from ((found.name, spec) for spec in block.blocks())


def _check_not_flattened(names: Names) -> None:
    """Raise a PatternError for FSDP1 and DeepSpeed ZeRO-3: their flat parameters have no layout of blocks."""
    instead = "Use FSDP2 (fully_shard; in Lightning ModelParallelStrategy), which keeps the shapes of parameters"
    for name, parameter in names.parameters.items():
        if is_fsdp1_flattened(parameter):
            what = "is part of a flat parameter of FSDP1"
        elif hasattr(parameter, "ds_id"):
            what = "is partitioned by DeepSpeed ZeRO-3"
        else:
            continue
        shape = tuple(parameter.shape)
        raise PatternError(f"{name} of shape {shape} {what}, which hides its layout. {instead}")


@dataclass(frozen=True)
class _Claim:
    pattern: Pattern
    layout: Layout
    units: Layout | None


class _Claims:
    """The elements of each parameter that patterns have claimed."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._of: dict[int, list[_Claim]] = {}

    def add(self, pattern: Pattern, found: Sequence[Attachment]) -> None:
        """Record the claims of a pattern; raise a PatternError where weights are claimed twice."""
        specs = [(made, spec) for made in found for block in made.scope.blocks() for spec in block.blocks()]
        for made, spec in specs:
            claim = _Claim(pattern, spec.view.layout, _units(made, spec))
            self._check(claim, spec)
            self._of.setdefault(id(spec.param), []).append(claim)
        for made, spec in specs:
            self._names.claim(spec.param, str(pattern), _units(made, spec))

    def _check(self, new: _Claim, spec: BlockSpec) -> None:
        pattern, layout = new.pattern, new.layout
        where = f"{self._names.name_of(spec.param) or spec.name} of shape {tuple(spec.param.shape)}"
        if not layout.is_injective():
            raise PatternError(f"{pattern} has a weight of {where} twice in {spec}: use strides that do not overlap")
        for claim in self._of.get(id(spec.param), ()):
            if meet(layout, claim.layout) and not may_share(new.units, claim.units):
                raise PatternError(
                    f"{pattern} needs weights of {where} that are already claimed by {claim.pattern}: a weight can "
                    "belong to one block only. Change the order of the patterns (Blocks, NM, Filters and Strided skip "
                    "claimed parameters), or the names in one of them"
                    if pattern is not claim.pattern
                    else f"{pattern} claims weights of {where} twice: a weight can belong to one block only. Change "
                    "its names"
                )


def _units(made: Attachment, spec: BlockSpec) -> Layout | None:
    return spec.view.layout if made.has_units else None


def _with_unique_names(made: list[Attachment]) -> list[Attachment]:
    seen: Counter[str] = Counter()
    unique = []
    for attachment in made:
        seen[attachment.name] += 1
        count = seen[attachment.name]
        unique.append(attachment if count == 1 else replace(attachment, name=f"{attachment.name} #{count}"))
    return unique
