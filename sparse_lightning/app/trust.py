"""Trust: a configuration is data. Every `_target_` is checked before `instantiate` calls Hydra's.

A name is allowed if it stands for an object of the allowlist, or is in a package that the user trusts. No package of
the user is imported before all names are checked, and nothing is called before all of them are resolved.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from hydra.utils import instantiate as hydra_instantiate
from omegaconf import OmegaConf

import sparse_lightning
from sparse_lightning.app.allowlist import ALLOWED, CLOSED, PACKAGES, homes, is_within, listed_name
from sparse_lightning.errors import ConfigError, UntrustedError, did_you_mean


@dataclass(frozen=True)
class Target:
    """A name of code in a configuration.

    Args:
        place: where it is, such as "model.layers[0]".
        path: the dotted name.
        key: the key that has it.
    """

    place: str
    path: Any
    key: str = "_target_"

    def not_allowed(self, reason: str) -> UntrustedError:
        """Return the error that names the place and the reason."""
        where = f"{self.place}.{self.key}" if self.place else self.key
        return UntrustedError(f"{where}: {self.path!r} is not allowed: {reason}")


def instantiate(node: Any, place: str = "", trusted: Iterable[str] = ()) -> Any:
    """Build the objects that a plain, resolved configuration describes, if all of their targets are allowed.

    Args:
        node: dicts, lists and plain values.
        place: where the node is in the whole configuration, for errors.
        trusted: prefixes of dotted names that the user trusts, in addition to the allowlist.

    Example:
        >>> instantiate({"_target_": "sparse_lightning.Linear", "final": 0.5})
        Linear(final=0.5, begin=0.1, end=0.7, initial=0.0)
        >>> instantiate({"_target_": "os.system", "command": "ls"}, "model")
        Traceback (most recent call last):
        sparse_lightning.errors.UntrustedError: model._target_: 'os.system' is not allowed: os belongs to Python...
    """
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
    """Raise `UntrustedError` where a configuration names code that it may not run."""
    prefixes = tuple(trusted)
    found = list(targets(config, place))
    for target in found:
        check_name(target, prefixes)
    for target in found:
        _check_thing(target, prefixes)


def targets(node: Any, place: str = "") -> Iterator[Target]:
    """Yield every `_target_` and `class_path` of a plain configuration, at any depth."""
    if isinstance(node, dict):
        for key in ("_target_", "class_path"):
            if key in node:
                yield Target(place, node[key], key)
        for key, value in node.items():
            yield from targets(value, f"{place}.{key}" if place else str(key))
    elif isinstance(node, list | tuple):
        for i, value in enumerate(node):
            yield from targets(value, f"{place}[{i}]")
    elif not isinstance(node, str | int | float | None):
        raise UntrustedError(f"{place}: {node!r} is not allowed: it is neither text nor a number. Write a plain value")
    elif isinstance(node, str) and "${" in node:
        raise UntrustedError(f"{place}: {node!r} is not allowed: Hydra would resolve it after the check")


def check_name(target: Target, trusted: tuple[str, ...]) -> None:
    """Raise `UntrustedError` for a name that cannot be on the list; of the user's packages, nothing is imported."""
    path = target.path
    if not isinstance(path, str):
        raise target.not_allowed("a target is the dotted name of a class or function")
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise target.not_allowed("a target is the dotted name of a class or function")
    hidden = [part for part in parts if part.startswith("_")]
    if hidden:
        raise target.not_allowed(f"{hidden[0]} is private")
    if not is_within(path, trusted) and not (parts[0] in PACKAGES and homes(parts[-1])):
        _check_spelling(target)
        raise target.not_allowed(_not_listed(path))


def _check_spelling(target: Target) -> None:
    """Raise `ConfigError` where a module of the list does not have the name."""
    module, _, name = target.path.rpartition(".")
    if module in ALLOWED and not hasattr(import_module(module), name):
        near = did_you_mean(name, ALLOWED[module].split())
        raise ConfigError(f"{target.place}.{target.key}: there is no {name!r} in {module}{near}")


def _not_listed(path: str) -> str:
    """Return why a name is not allowed, and what to do."""
    package = path.partition(".")[0]
    if package in sys.stdlib_module_names:
        return f"{package} belongs to Python itself, and a recipe that may call it can run any code. Remove it"
    if package in PACKAGES:
        return (
            "it is not on the list of what a configuration may name. If you know what it does and trust it, add "
            f"trusted_targets=[{path}] to the command line"
        )
    return (
        f"it is not in {', '.join(PACKAGES)}. If {package} is yours and you trust it, add trusted_targets=[{package}] "
        "to the command line"
    )


def _check_thing(target: Target, trusted: tuple[str, ...]) -> None:
    """Raise `UntrustedError` unless the name stands for a class or function of the list, or of a trusted package."""
    is_trusted = is_within(target.path, trusted)
    thing = locate(target) if is_trusted else _locate_listed(target)
    if isinstance(thing, ModuleType):
        raise target.not_allowed("it is a module, not a class or function")
    if not callable(thing):
        raise target.not_allowed("it cannot be called")
    if listed_name(thing, target.path.rpartition(".")[2]):
        return
    home = home_of(thing)
    if not is_trusted or (home is not None and not is_within(home, trusted)):
        raise target.not_allowed(f"it is {home or type(thing).__name__}: {_not_listed(home or target.path)}")


def _locate_listed(target: Target) -> Any:
    """Return the object of a name; only modules that the list imports are looked at, and those of this package."""
    module, _, name = target.path.rpartition(".")
    for home in homes(name):
        import_module(home)
    if module not in sys.modules and not is_within(module, (sparse_lightning.__name__,)):
        raise target.not_allowed(_not_listed(target.path))
    thing = locate(target)
    # An old module path of this package stands for the new one.
    if module not in sys.modules or is_within(sys.modules[module].__name__, CLOSED):
        raise target.not_allowed(_not_listed(target.path))
    return thing


def home_of(thing: Any) -> str | None:
    """Return where a class or function is defined; None for other objects, which belong to the module that has them.

    Example:
        >>> from collections import OrderedDict as alias
        >>> home_of(alias)
        'collections.OrderedDict'
    """
    name = getattr(thing, "__qualname__", None)
    return None if name is None else f"{getattr(thing, '__module__', None) or 'builtins'}.{name}"


def locate(target: Target) -> Any:
    """Return the object of a dotted name; its modules are imported, and attributes of classes are not accepted."""
    parts = target.path.split(".")
    thing: Any = import_module(parts[0]) if _exists(parts[0]) else None
    for i, part in enumerate(parts[1:], start=1):
        if not isinstance(thing, ModuleType):
            module = ".".join(parts[:i])
            raise target.not_allowed(
                f"{module} is not an installed module. Install it, or add its folder to PYTHONPATH, as in "
                "PYTHONPATH=. sparse-lightning …"
            )
        thing = _member(thing, ".".join(parts[: i + 1]), part, target)
    return thing


def _member(module: ModuleType, name: str, part: str, target: Target) -> Any:
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
    return find_spec(package) is not None
