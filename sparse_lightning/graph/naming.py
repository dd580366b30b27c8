"""Names of families: the innermost common module, and what the units are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

import numpy as np

from sparse_lightning.graph.atoms import Ids, Kind

Places = Mapping[tuple[str, int], Ids]
"""For each parameter and dimension the coordinates of each unit."""


def possible_names(kind: Kind, places: Places, readers: set[tuple[str, int]], ndim: Mapping[str, int]) -> list[str]:
    """Return names of a family, the best first: later ones tell families apart that share the first.

    Channels are named after the convolution that computes them if there is only one, other units after the innermost
    module that has all their slices.

    Args:
        kind: what the coordinates are.
        places: the slices of the family.
        readers: the parameters and dimensions that read units.
        ndim: the number of dimensions of each parameter.

    Example:
        >>> places = {("net.up.weight", 0): np.zeros((3, 1)), ("net.down.weight", 1): np.zeros((3, 1))}
        >>> possible_names(Kind.UNITS, places, {("net.down.weight", 1)}, {})
        ['net (units)', 'net.up (units)', 'net.up (units)']
    """
    word = _word(kind, places, readers)
    makers = list(dict.fromkeys(_owner(place[0]) for place in places if place not in readers))
    convolutions = {_owner(name) for name, dim in places if (name, dim) not in readers and ndim.get(name, 0) > 2}
    first = (makers or [_owner(next(iter(places))[0])])[0]
    common = common_module([_owner(name) for name, _ in places])
    found = [common or first, common_module(makers) or first, first]
    if word == "channels":
        found.insert(0, next(iter(convolutions)) if len(convolutions) == 1 else common_module(makers) or first)
    return [f"{name} ({word})".lstrip() for name in found]


def unique_names(possible: Sequence[Sequence[str]]) -> list[str]:
    """Choose one name for each family, such that all differ.

    Example:
        >>> unique_names([["net (units)", "net.0 (units)"], ["net (units)", "net.2 (units)"]])
        ['net.0 (units)', 'net.2 (units)']
    """
    depth = [0] * len(possible)
    while True:
        names = [options[at] for options, at in zip(possible, depth, strict=True)]
        shared = {name for name, count in Counter(names).items() if count > 1}
        deeper = [i for i, name in enumerate(names) if name in shared and depth[i] + 1 < len(possible[i])]
        if not deeper:
            break
        for i in deeper:
            depth[i] += 1
    seen: Counter[str] = Counter()
    for i, name in enumerate(names):
        seen[name] += 1
        names[i] = name if seen[name] == 1 else f"{name} #{seen[name]}"
    return names


def common_module(names: Iterable[str]) -> str:
    """Return the name of the innermost module that contains all of these.

    Example:
        >>> common_module(["blocks.0.attn.q", "blocks.0.attn.out"])
        'blocks.0.attn'
    """
    levels = zip(*(name.split(".") for name in names), strict=False)
    return ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))


def _owner(parameter: str) -> str:
    """Return the module of a parameter; the parameter itself if it is of the model."""
    return parameter.rpartition(".")[0] or parameter


def _word(kind: Kind, places: Places, readers: set[tuple[str, int]]) -> str:
    if kind & Kind.HEADS and kind & Kind.EXPANDED:
        first = next((ids for place, ids in places.items() if place not in readers), next(iter(places.values())))
        apart = bool((np.diff(first[0]) > 1).any())
        return "q heads of each group" if apart else "heads"
    words = {
        Kind.HEADS: "heads",
        Kind.HEAD_DIMENSIONS: "head dimensions",
        Kind.CHANNELS: "channels",
        Kind.EXPERTS: "experts",
    }
    return next((word for flag, word in words.items() if kind & flag), "units")
