"""Resources: a recipe starts no crowd of processes, and has no regular expression that takes for ever."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from sparse_lightning.app.typed import Typed
from sparse_lightning.errors import UntrustedError

MAX_PROCESSES = 256
"""Of one kind: workers of a loader, or devices of a machine."""
MAX_REPEATS = 6
"""Signs of repetition in one regular expression of a recipe: the time to match grows with each."""

_PROCESSES = ("num_workers", "devices")
_REGEX = "re:"
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_REPEAT = re.compile(r"(?<!\\)[*+{]")


def check_resources(config: dict[str, Any], typed: Typed) -> None:
    """Raise `UntrustedError` where a recipe, not the user, would start too many processes, or match for ever.

    Args:
        config: plain.
        typed: the overrides of the command line.
    """
    for place, value in _values(config):
        if typed.sets(place) or (isinstance(value, str) and typed.has(place, value)):
            continue
        if place.rpartition(".")[2] in _PROCESSES and _number(value) > MAX_PROCESSES:
            raise UntrustedError(
                f"{place}: {value!r} is not allowed in a recipe: it would start more than {MAX_PROCESSES} processes. "
                f"Pass {place}=… on the command line"
            )
        if isinstance(value, str) and value.startswith(_REGEX) and is_slow(value.removeprefix(_REGEX)):
            raise UntrustedError(
                f"{place}: {value!r} is not allowed in a recipe: it repeats a group, or more than {MAX_REPEATS} times, "
                "and may take for ever to match. Use a glob, or pass it on the command line"
            )


def is_slow(regex: str) -> bool:
    r"""Whether the time to match a regular expression may be exponential.

    Example:
        >>> is_slow("(a+)+b"), is_slow(r"layers\.[0-3]\.(mlp|attention)\..*weight")
        (True, False)
    """
    return bool(_REPEATED_GROUP.search(regex)) or len(_REPEAT.findall(regex)) > MAX_REPEATS


def _number(value: Any) -> int:
    """Return a number of processes; 0 for what is not one, such as "auto"."""
    text = str(value)
    return int(text) if text.isdecimal() else 0


def _values(node: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every plain value, and its place without the index in a list."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _values(value, f"{place}.{key}" if place else str(key))
    elif isinstance(node, list):
        for value in node:
            yield from _values(value, place)
    else:
        yield place, node
