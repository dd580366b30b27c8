"""Trust: a configuration is data. `instantiate` is the one door to Hydra's, and every `_target_` is checked before it.

Nothing is imported before all names have been looked at, and nothing is called before all have been resolved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from sparse_lightning.configuration.danger import FUNCTIONS, PACKAGES, danger_of, is_within
from sparse_lightning.errors import ConfigError, UntrustedError
from sparse_lightning.nearest import did_you_mean


@dataclass(frozen=True)
class Target:
    """A `_target_` in a configuration.

    Args:
        place: where it stands, such as "model.layers[0]".
        path: the dotted name that it asks for.
    """

    place: str
    path: Any

    def refused(self, reason: str) -> UntrustedError:
        """The error that names the place and the reason."""
        where = f"{self.place}._target_" if self.place else "_target_"
        return UntrustedError(f"{where}: {self.path!r} is refused: {reason}")


def instantiate(node: Any, place: str = "", trusted: Iterable[str] = ()) -> Any:
    """Make the objects that a plain, resolved configuration describes, if all of them may be trusted.

    Args:
        node: dicts, lists and plain values.
        place: where the node stands in the whole configuration, for errors.
        trusted: prefixes of dotted names that the user trusts beside the packages that are allowed.

    Example:
        >>> instantiate({"_target_": "sparse_lightning.Linear", "final": 0.5})
        Linear(final=0.5, begin=0, end=1.0, initial=0.0)
        >>> instantiate({"_target_": "os.system", "command": "ls"}, "model")
        Traceback (most recent call last):
        sparse_lightning.errors.UntrustedError: model._target_: 'os.system' is refused: os runs programs...
    """
    from hydra.utils import instantiate as hydra_instantiate
    from omegaconf import OmegaConf

    check_trust(node, place, trusted)
    if isinstance(node, dict) and "_target_" in node:
        return hydra_instantiate(OmegaConf.create(node), _convert_="all")
    # A mapping or list of objects: Hydra would turn dataclass instances in it into configs again.
    if isinstance(node, dict):
        return {key: instantiate(value, f"{place}.{key}", trusted) for key, value in node.items()}
    if isinstance(node, list):
        return [instantiate(value, f"{place}[{i}]", trusted) for i, value in enumerate(node)]
    return node


def check_trust(config: Any, place: str = "", trusted: Iterable[str] = ()) -> None:
    """Raise `UntrustedError` where a configuration asks for code that it may not run."""
    prefixes = tuple(trusted)
    found = list(targets(config, place))
    for target in found:
        check_name(target, prefixes)
    for target in found:
        _check_thing(target, prefixes)


def targets(node: Any, place: str = "") -> Iterator[Target]:
    """Every `_target_` of a plain configuration, at any depth."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield Target(place, node["_target_"])
        for key, value in node.items():
            yield from targets(value, f"{place}.{key}" if place else str(key))
    elif isinstance(node, list | tuple):
        for i, value in enumerate(node):
            yield from targets(value, f"{place}[{i}]")
    elif isinstance(node, str) and "${" in node:
        # Hydra would resolve it once more, when everything has been checked.
        raise UntrustedError(
            f"{place}: {node!r} is refused: an interpolation that is still there when all are resolved"
        )


def check_name(target: Target, trusted: tuple[str, ...]) -> None:
    """What can be told from the name alone; nothing is imported."""
    path = target.path
    if not isinstance(path, str):
        raise target.refused("a target is the dotted name of a class or function")
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise target.refused("a target is the dotted name of a class or function")
    hidden = [part for part in parts if part.startswith("_")]
    if hidden:
        raise target.refused(f"{hidden[0]} is private")
    danger = danger_of(path)
    if danger:
        raise target.refused(danger)
    if not is_within(path, (*PACKAGES, *trusted)):
        raise target.refused(
            f"it is not in {', '.join(PACKAGES)}. If {parts[0]} is yours and you trust it, add "
            f"trusted_targets=[{parts[0]}] to the command line"
        )


def _check_thing(target: Target, trusted: tuple[str, ...]) -> None:
    """What the name stands for: a class or function with a home in a package that is allowed."""
    thing = locate(target)
    if isinstance(thing, ModuleType):
        raise target.refused("it is a module, not a class or function")
    if not callable(thing):
        raise target.refused("it cannot be called")
    home = f"{getattr(thing, '__module__', None) or 'builtins'}.{getattr(thing, '__qualname__', '')}"
    if not isinstance(thing, type) and home.startswith("builtins.") and is_within(target.path, FUNCTIONS):
        home = target.path  # functions that torch has written in C++ do not say where they are from
    danger = danger_of(home)
    if danger:
        raise target.refused(f"it is {home}, and {danger}")
    if is_within(target.path, trusted):
        return
    if not is_within(home, PACKAGES):
        raise target.refused(f"it is {home}, which is not in {', '.join(PACKAGES)}")
    if not isinstance(thing, type) and not is_within(home, FUNCTIONS):
        raise target.refused(f"of {target.path.split('.')[0]}, configurations may make objects but not call functions")


def locate(target: Target) -> Any:
    """The object that a dotted name stands for; modules are imported on the way, classes are not looked into."""
    from importlib import import_module

    parts = target.path.split(".")
    thing: Any = import_module(parts[0]) if _exists(parts[0]) else None
    for i, part in enumerate(parts[1:], start=1):
        if not isinstance(thing, ModuleType):
            raise target.refused(f"{'.'.join(parts[:i])} is no module that is installed")
        thing = _member(thing, ".".join(parts[: i + 1]), part, target)
    return thing


def _member(module: ModuleType, name: str, part: str, target: Target) -> Any:
    from importlib import import_module

    if hasattr(module, part):
        return getattr(module, part)
    try:
        return import_module(name)
    except ImportError as error:
        if getattr(error, "name", name) != name:
            raise ConfigError(f"{target.place}._target_: {target.path!r} cannot be imported: {error}") from error
        known = [n for n in dir(module) if not n.startswith("_")]
        raise ConfigError(
            f"{target.place}._target_: there is no {part!r} in {module.__name__}{did_you_mean(part, known)}"
        ) from None


def _exists(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None
