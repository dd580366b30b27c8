"""New targets: a `_target_` of a recipe or the command line starts from its own arguments, not those of another one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from sparse_lightning.app import catalog
from sparse_lightning.app.arguments import RESERVED
from sparse_lightning.app.stale_overrides import known_arguments


def drop_replaced(config: DictConfig, settings: DictConfig, overrides: Iterable[str]) -> None:
    """Remove the values that were meant for another target.

    Where a recipe replaces the target of an option, the values of the recipe remain. Where the user does, those remain
    that a class of the allowlist takes; for another class, only what is typed.

    Args:
        config: the job's configuration, which is changed; its interpolations are not resolved.
        settings: Hydra's own, with the chosen options and the folders that they come from.
        overrides: those of the command line.
    """
    typed = {line.partition("=")[0].lstrip("+~") for line in overrides}
    raw, recipe = OmegaConf.to_container(config), _content(settings, "recipe")
    for group in catalog.groups():
        option = _content(settings, group)
        for place in _replaced(_at(raw, group), option, group):
            found, own = _at(raw, place), set(_at(recipe, place))
            if f"{place}._target_" in typed:
                own &= known_arguments(found) or set()
            for key in set(found) - own - RESERVED:
                if key in _meant(recipe, {group: option}, place) and not _is_typed(f"{place}.{key}", typed):
                    del OmegaConf.select(config, place)[key]


def _meant(recipe: Any, option: Any, place: str) -> set[str]:
    """Return the keys that were written for the target before."""
    return set(_at(recipe, place)) | set(_at(option, place))


def _is_typed(place: str, typed: Iterable[str]) -> bool:
    return any(line == place or line.startswith(f"{place}.") for line in typed)


def _replaced(node: dict[str, Any], option: Any, place: str) -> Iterator[str]:
    """Yield the places below a group, the group included, where the option has another target."""
    if not isinstance(option, dict):
        return
    if "_target_" in option:
        if node.get("_target_", option["_target_"]) != option["_target_"]:
            yield place
        return
    for key in [key for key in node if key in option]:  # the entries of a pattern
        yield from _replaced(_at(node, key), option[key], f"{place}.{key}")


def _at(node: Any, place: str) -> dict[str, Any]:
    """Return the mapping at a place; an empty one where there is another value, or none."""
    for part in place.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node if isinstance(node, dict) else {}


def _content(settings: DictConfig, group: str) -> Any:
    """Return the content of the chosen option of a group, from the first folder that has it."""
    choice = settings.runtime.choices.get(group)
    folders = [source.path for source in settings.runtime.config_sources if source.schema == "file"]
    for folder in folders:
        file = Path(folder, group, f"{choice}.yaml")
        if isinstance(choice, str) and file.is_file():
            return yaml.safe_load(file.read_text("utf-8")) or {}
    return {}
