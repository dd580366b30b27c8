"""Check a configuration before any object is built: trust, keys, types and ranges."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sparse_lightning import schedules
from sparse_lightning.app import catalog
from sparse_lightning.app.arguments import check_arguments, fits
from sparse_lightning.app.folders import is_checkpoint
from sparse_lightning.app.paths import check_written
from sparse_lightning.app.trust import check_trust
from sparse_lightning.errors import ConfigError, SparsityError, did_you_mean

SETTINGS: dict[str, tuple[Any, str]] = {
    "name": (str, "a name"),
    "folder": (str, "a path"),
    "seed": (int, "a whole number"),
    "update_every": (int | None, "a whole number or null"),
    "observe_every": (int | None, "a whole number or null"),
    "masks": (str | None, '"from weights" or null'),
    "calibration_batches": (int | None, "a whole number or null"),
    "checkpoint_every": (int, "a whole number"),
    "monitor": (str | None, "the name of a metric or null"),
    "monitor_mode": (str, '"min" or "max"'),
    "compare_dense": (bool, "true or false"),
    "ckpt_path": (str | None, '"last", a path or null'),
    "trust_checkpoint": (bool, "true or false"),
    "trusted_targets": (list[str], "a list of prefixes"),
}
"""The keys that are not groups: their types, and what to write."""


def check(config: dict[str, Any], trusted: Iterable[str] = ()) -> None:
    """Raise `ConfigError` for an invalid configuration, as far as it shows without a model.

    Args:
        config: plain, from `Composed.plain`.
        trusted: prefixes of dotted names that the user trusts.
    """
    prefixes = tuple(trusted)
    _check_schedule(config.get("schedule"), prefixes)
    check_trust(config, trusted=prefixes)
    _check_keys(config)
    for name, (hint, wanted) in SETTINGS.items():
        if not fits(config.get(name), hint):
            raise ConfigError(f"{name}: {config.get(name)!r} is not {wanted}")
    for name in ("update_every", "observe_every", "calibration_batches", "checkpoint_every"):
        if config[name] is not None and config[name] < 1:
            raise ConfigError(f"{name}: {config[name]} is too small: it must be at least 1")
    if config["monitor_mode"] not in ("min", "max"):
        raise ConfigError(f"monitor_mode: {config['monitor_mode']!r} is not min or max")
    if not 0 <= config["seed"] < 2**32:
        raise ConfigError(f"seed: {config['seed']} is not between 0 and 2³² − 1")
    for group in catalog.groups():
        _check_group(config[group], group)
    check_written(config)
    _check_checkpoint(config["ckpt_path"])


def _check_schedule(node: Any, trusted: tuple[str, ...]) -> None:
    """Build a schedule of this package, which needs no torch, so that a value out of range is reported at once."""
    target = node.get("_target_") if isinstance(node, dict) else None
    package, _, name = str(target).rpartition(".")
    values = {key: value for key, value in node.items() if key != "_target_"} if isinstance(node, dict) else {}
    is_flat = not any(str(key).startswith("_") or isinstance(value, (dict, list)) for key, value in values.items())
    if package not in ("sparse_lightning", schedules.__name__) or name not in schedules.__all__ or not is_flat:
        return
    check_trust({"schedule": node}, trusted=trusted)
    check_arguments(node, "schedule")
    try:
        getattr(schedules, name)(**values)
    except SparsityError as error:
        raise ConfigError(f"schedule: {error}") from error


def _check_keys(config: dict[str, Any]) -> None:
    known = [*catalog.groups(), *SETTINGS]
    for key in config:
        if key not in known:
            raise ConfigError(f"{key}: there is no such key{did_you_mean(str(key), known)}")
    missing = [key for key in known if key not in config]
    if missing:
        raise ConfigError(f"{missing[0]}: this key is missing: set it, or choose an option of its group")


def _check_group(node: Any, group: str) -> None:
    if not isinstance(node, dict):
        raise ConfigError(f"{group}: {node!r} is not an option: choose {group}={catalog.default(group)}, or another")
    if group == "pattern":
        if not node:
            raise ConfigError("pattern: no pattern is set: choose pattern=blocks, or another")
        for name, entry in node.items():
            _check_object(entry, f"pattern.{name}")
    elif node or group not in ("criterion", "compensation", "shrink", "logger", "export"):
        _check_object(node, group)
    check_arguments(node, group)


def _check_object(node: Any, place: str) -> None:
    if not isinstance(node, dict) or not node.get("_target_"):
        raise ConfigError(f"{place}._target_ is missing: set it to the class of {place}")


def _check_checkpoint(path: str | None) -> None:
    if path is not None and path != "last" and not is_checkpoint(Path(path)):
        raise ConfigError(f'ckpt_path: there is no checkpoint at {path}: set it to a path, or to "last"')
