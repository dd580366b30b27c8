"""resolve: the patterns of a list on one model, so that each weight is in one block at most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from sparse_lightning.block import BlockSpec
from sparse_lightning.errors import PatternError
from sparse_lightning.layout import Layout
from sparse_lightning.names import Names
from sparse_lightning.patterns.pattern import Attachment, Pattern


def resolve(patterns: Sequence[Pattern], model: nn.Module) -> list[Attachment]:
    """The scopes that patterns make of a model.

    Patterns are taken in their order. Blocks, NM and Filters leave alone what an earlier one took; others that
    need such a weight are refused, and so are any two blocks that share one.

    Args:
        patterns: in order of precedence.
        model: as it is trained: wrapped, compiled and sharded.

    Example:
        >>> from sparse_lightning.patterns import Blocks, Neurons
        >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.Linear(4, 4))
        >>> [found.name for found in resolve([Neurons("0", "2"), Blocks("*.weight", (2, 2))], mlp)]
        ['0 (neurons)', '3.weight']
    """
    names = Names(model)
    _refuse_flat(names)
    claims, made = _Claims(names), []
    for pattern, label in zip(patterns, _labels(patterns), strict=True):
        found = pattern.resolve(names)
        if not found:
            raise PatternError(f"{pattern} matches nothing in {type(model).__name__}: change its names, or drop it")
        claims.add(label, str(pattern), found)
        made += [replace(attachment, pattern=label) for attachment in found]
    return _with_unique_names(made)


def check_apart(some: Iterable[Attachment], others: Iterable[Attachment]) -> None:
    """Refuse attachments of two lists that share a weight: two callbacks may not prune the same."""
    taken: dict[int, list[tuple[str, Layout]]] = {}
    for name, spec in _specs(others):
        taken.setdefault(id(spec.param), []).append((name, spec.view.layout))
    for name, spec in _specs(some):
        for other, layout in taken.get(id(spec.param), ()):
            if _meet(spec.view.layout, layout):
                raise PatternError(
                    f"{name} and {other} of another callback claim the same weights, in a parameter of shape "
                    f"{tuple(spec.param.shape)}: a weight is in one block only. Change the names in one of them"
                )


def _specs(attachments: Iterable[Attachment]) -> Iterator[tuple[str, BlockSpec]]:
    for made in attachments:
        for block in made.scope.blocks():
            yield from ((made.name, spec) for spec in block.blocks())


def _refuse_flat(names: Names) -> None:
    """Parameters that are a flat piece of many have no layout to cut into blocks.

    FSDP1 marks what it has flattened, whether it shows the flat parameter or views that look like the original.
    """
    instead = "Use FSDP2 (fully_shard; in Lightning ModelParallelStrategy), which keeps parameters as they are"
    for name, parameter in names.parameters.items():
        if type(parameter).__name__ == "FlatParameter" or getattr(parameter, "_fsdp_flattened", False):
            what = "is part of a flat parameter of FSDP1"
        elif hasattr(parameter, "ds_id"):
            what = "is partitioned by DeepSpeed ZeRO-3"
        else:
            continue
        shape = tuple(parameter.shape)
        raise PatternError(f"{name} of shape {shape} {what}, which hides its layout. {instead}")


def _labels(patterns: Sequence[Pattern]) -> Iterator[str]:
    """The label of each pattern; the second of a kind has a 2 behind it."""
    seen: Counter[str] = Counter()
    for pattern in patterns:
        if not isinstance(pattern, Pattern):
            raise PatternError(f"{pattern!r} is not a pattern: give Blocks, NM, Filters, Neurons, Heads or Custom")
        seen[pattern.label] += 1
        yield pattern.label if seen[pattern.label] == 1 else f"{pattern.label}_{seen[pattern.label]}"


@dataclass(frozen=True)
class _Claim:
    label: str
    pattern: str
    layout: Layout


class _Claims:
    """Which pattern has which elements of each parameter."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._of: dict[int, list[_Claim]] = {}

    def add(self, label: str, pattern: str, found: Sequence[Attachment]) -> None:
        """Note what a pattern takes, or refuse it."""
        specs = [spec for made in found for block in made.scope.blocks() for spec in block.blocks()]
        for spec in specs:
            self._check(label, pattern, spec)
            self._of.setdefault(id(spec.param), []).append(_Claim(label, pattern, spec.view.layout))
        for spec in specs:
            self._names.claim(spec.param, pattern)

    def _check(self, label: str, pattern: str, spec: BlockSpec) -> None:
        layout = spec.view.layout
        where = f"{self._names.name_of(spec.param) or spec.name} of shape {tuple(spec.param.shape)}"
        if not layout.is_injective():
            raise PatternError(f"{pattern} sees a weight of {where} twice in {spec}: use strides that do not overlap")
        for claim in self._of.get(id(spec.param), ()):
            if _meet(layout, claim.layout):
                raise PatternError(
                    f"{pattern} needs weights of {where} that {claim.pattern} claimed before: a weight is in one block "
                    "only. Change the order of the patterns (Blocks, NM and Filters leave alone what was claimed), or "
                    "the names in one of them"
                    if label != claim.label
                    else f"{pattern} claims weights of {where} twice: a weight is in one block only. Change its names"
                )


def _meet(one: Layout, other: Layout) -> bool:
    """Whether two layouts share an element; mostly their ends already tell."""
    (low, high), (other_low, other_high) = one.span, other.span
    return low <= other_high and other_low <= high and one.overlaps(other)


def _with_unique_names(made: list[Attachment]) -> list[Attachment]:
    seen: Counter[str] = Counter()
    unique = []
    for attachment in made:
        seen[attachment.name] += 1
        count = seen[attachment.name]
        unique.append(attachment if count == 1 else replace(attachment, name=f"{attachment.name} #{count}"))
    return unique
