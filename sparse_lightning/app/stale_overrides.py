"""Stale overrides: values of a recipe for an option that the command line has replaced by another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparse_lightning.app import catalog
from sparse_lightning.app.arguments import RESERVED, parameters_of
from sparse_lightning.app.trust import check_trust
from sparse_lightning.errors import ConfigError


def without_stale_overrides(config: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the configuration without values of a recipe that the chosen options do not take.

    `recipe=digits_blocks schedule=steps` works, though the recipe sets `schedule.begin`, which Steps does not take.
    Only groups that the command line chooses are changed, and values that the command line sets are kept.
    """
    keys = [line.partition("=")[0].lstrip("+~") for line in overrides]
    chosen = [group for group in catalog.groups() if group in keys]
    return {**config, **{group: _kept(config[group], group, keys) for group in chosen if group in config}}


def _kept(node: Any, group: str, keys: Sequence[str]) -> Any:
    if not isinstance(node, dict):
        return node
    set_here = {key.split(".")[1] for key in keys if key.startswith(f"{group}.")}
    if group == "pattern":
        entries = node.items()
        return {k: v for k, v in entries if k in set_here or not isinstance(v, dict) or "_target_" in v}
    known = known_arguments(node)
    return {key: value for key, value in node.items() if known is None or key in known or key in set_here}


def known_arguments(node: dict[str, Any]) -> set[str] | None:
    """Return the arguments of a node's target; None where it takes any, or is not to be trusted."""
    try:
        check_trust({"_target_": node.get("_target_")})
        taken = parameters_of(node["_target_"])
    except (ConfigError, KeyError):
        return None
    return None if any(p.kind is p.VAR_KEYWORD for p in taken.values()) else RESERVED | set(taken)
