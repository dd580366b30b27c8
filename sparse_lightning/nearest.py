"""The nearest valid name, for errors about a name that is not one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the nearest known name, or all of a few, or nothing.

    Example:
        >>> print("no scope 'nuerons'" + did_you_mean("nuerons", ["neurons", "heads"]))
        no scope 'nuerons': did you mean 'neurons'?
    """
    names = list(known)
    near = get_close_matches(name, names, n=1)
    if near:
        return f": did you mean {near[0]!r}?"
    return f": there are {', '.join(map(repr, names))}" if 0 < len(names) <= 10 else ""
