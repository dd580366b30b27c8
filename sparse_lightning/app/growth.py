"""Growth: how large a configuration becomes when its interpolations are resolved, estimated before they are."""

from __future__ import annotations

import re
from typing import Any

from sparse_lightning.errors import ConfigError

MAX_SIZE, MAX_NESTED = 500_000, 4
"""Characters of all values, and interpolations whose name is itself an interpolation."""

_REFERENCE, _NESTED = re.compile(r"\.*\w[\w.]*"), re.compile(r"\$\{[^}]*\$\{")
_COST = 50
"""What a value or reference counts, beside its characters: it takes time."""


def check_growth(raw: dict[str, Any]) -> None:
    """Raise `ConfigError` for interpolations of interpolations that grow too large.

    Args:
        raw: plain, with its interpolations as they are written.

    Example:
        >>> doubled = {f"x{i}": f"${{x{i - 1}}}${{x{i - 1}}}" for i in range(1, 40)}
        >>> check_growth({"x0": "ab", **doubled})
        Traceback (most recent call last):
        sparse_lightning.errors.ConfigError: x13: its interpolations grow ... Use fewer of them
    """
    try:
        _Growth(raw).check()
    except RecursionError as error:
        raise ConfigError("config: its interpolations refer to one another too deeply. Use fewer of them") from error


class _Growth:
    def __init__(self, raw: dict[str, Any]) -> None:
        self._raw, self._sizes, self._nested = raw, dict[str, int](), 0

    def check(self) -> None:
        for key in self._raw:
            self._size(self._raw[key], str(key))

    def _size(self, node: Any, place: str) -> int:
        """Return the size of a value; one that refers to itself counts once, and OmegaConf reports it."""
        if place in self._sizes:
            return self._sizes[place]
        self._sizes[place] = _COST
        if isinstance(node, dict):
            size = sum(self._size(value, f"{place}.{key}") for key, value in node.items())
        elif isinstance(node, list):
            size = sum(self._size(value, f"{place}.{i}") for i, value in enumerate(node))
        else:
            size = len(str(node)) + (self._referred(node, place) if isinstance(node, str) and "${" in node else 0)
        self._sizes[place] = size + _COST
        if size > MAX_SIZE or self._nested > MAX_NESTED:
            raise ConfigError(
                f"{place}: its interpolations grow to more than {MAX_SIZE:,} characters. Use fewer of them"
            )
        return self._sizes[place]

    def _referred(self, text: str, place: str) -> int:
        """Return the size of all that a text may refer to."""
        self._nested += len(_NESTED.findall(text))
        places = [self._absolute(found, place) for found in _REFERENCE.findall(text.replace("[", ".").replace("]", ""))]
        return sum(self._size(*found) for found in map(self._at, places) if found is not None)

    def _absolute(self, name: str, place: str) -> str:
        """Return a place from the root; each leading dot of a name goes up by one."""
        dots = len(name) - len(name.lstrip("."))
        above = place.split(".")[:-dots] if dots else []
        return ".".join([*above, name.lstrip(".")])

    def _at(self, place: str) -> tuple[Any, str] | None:
        node: Any = self._raw
        for part in place.rstrip(".").split("."):
            if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
                node = node[int(part)]
            elif isinstance(node, dict) and part in node:
                node = node[part]
            else:
                return None
        return node, place.rstrip(".")
