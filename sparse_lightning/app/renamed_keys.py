"""Renamed keys: values that a recipe or a command line sets under a name of version 0.1.0, for one release."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparse_lightning.app.stale_overrides import known_arguments
from sparse_lightning.renamed import warn_renamed

RENAMED = (("method", "share", "drop_fraction"), ("budget", "floor", "min_density"))
"""The group, the old key and the new one."""


def accept_old_keys(overrides: Sequence[str]) -> list[str]:
    """Return overrides that Hydra accepts for old keys, though the configuration does not have them any more.

    Example:
        >>> accept_old_keys(["method=rigl", "method.share=0.4"])
        ['method=rigl', '++method.share=0.4']
    """
    old_keys = tuple(f"{group}.{old}=" for group, old, _ in RENAMED)
    return [f"++{line}" if line.startswith(old_keys) else line for line in overrides]


def with_new_keys(config: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the configuration with values under their new keys, where the target of a group takes only those.

    Args:
        config: plain.
        overrides: those of the command line; a new key in them takes precedence over an old one in a recipe.
    """
    typed = {line.partition("=")[0].lstrip("+~") for line in overrides}
    found = dict(config)
    for group, old, new in RENAMED:
        node = found.get(group)
        if isinstance(node, dict) and old in node and _is_renamed(node, old, new):
            warn_renamed(f"{group}.{old}", f"{group}.{new}", stacklevel=2)
            value = node[new] if f"{group}.{new}" in typed else node[old]
            found[group] = {**{key: node[key] for key in node if key != old}, new: value}
    return found


def _is_renamed(node: dict[str, Any], old: str, new: str) -> bool:
    known = known_arguments(node)
    return known is not None and new in known and old not in known
