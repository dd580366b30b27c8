"""Check: refuse, before anything is made, a configuration that is not to be trusted or cannot be right."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sparse_lightning.configuration import catalog
from sparse_lightning.configuration.arguments import check_arguments, fits
from sparse_lightning.configuration.folders import is_checkpoint
from sparse_lightning.configuration.trust import check_trust
from sparse_lightning.errors import ConfigError
from sparse_lightning.nearest import did_you_mean

SETTINGS: dict[str, tuple[Any, str]] = {
    "name": (str, "a name"),
    "folder": (str, "a path"),
    "seed": (int, "a whole number"),
    "update_every": (int, "a whole number"),
    "checkpoint_every": (int, "a whole number"),
    "compare_dense": (bool, "true or false"),
    "ckpt_path": (str | None, '"last", a path or null'),
    "trusted_targets": (list[str], "a list of prefixes"),
}
"""The keys that are no groups: their types, and what to write."""


def check(config: dict[str, Any], trusted: Iterable[str] = ()) -> None:
    """Raise `ConfigError` where a plain configuration cannot be right, as far as that can be told without a model."""
    prefixes = tuple(trusted)
    check_trust(config, trusted=prefixes)
    _check_keys(config)
    for name, (hint, wanted) in SETTINGS.items():
        if not fits(config.get(name), hint):
            raise ConfigError(f"{name}: {config.get(name)!r} is not {wanted}")
    for name in ("update_every", "checkpoint_every"):
        if config[name] < 1:
            raise ConfigError(f"{name}: {config[name]} steps: it must be at least 1")
    if not 0 <= config["seed"] < 2**32:
        raise ConfigError(f"seed: {config['seed']} does not lie between 0 and 2³² − 1")
    for group in catalog.groups():
        _check_group(config[group], group)
    _check_checkpoint(config["ckpt_path"])


def _check_keys(config: dict[str, Any]) -> None:
    known = [*catalog.groups(), *SETTINGS]
    for key in config:
        if key not in known:
            raise ConfigError(f"{key}: there is no such key{did_you_mean(str(key), known)}")
    missing = [key for key in known if key not in config]
    if missing:
        raise ConfigError(f"{missing[0]}: this key is missing: give it, or choose an option of its group")


def _check_group(node: Any, group: str) -> None:
    if not isinstance(node, dict):
        raise ConfigError(f"{group}: {node!r} is not an option: choose {group}={catalog.default(group)}, or another")
    if group == "pattern":
        if not node:
            raise ConfigError("pattern: there is none: choose pattern=blocks, or another")
        for name, entry in node.items():
            _check_object(entry, f"pattern.{name}")
    elif node or group not in ("logger", "export"):
        _check_object(node, group)
    check_arguments(node, group)


def _check_object(node: Any, place: str) -> None:
    if not isinstance(node, dict) or not node.get("_target_"):
        raise ConfigError(f"{place}._target_: it is missing, so nobody knows what {place} is")


def _check_checkpoint(path: str | None) -> None:
    if path is not None and path != "last" and not is_checkpoint(Path(path)):
        raise ConfigError(f'ckpt_path: there is no file {path}. Give a checkpoint, or "last"')
