"""Arguments: compare the keys and values of a configuration with the signatures of its targets."""

from __future__ import annotations

import collections.abc
import inspect
import types
import typing
from typing import Any

from typing_extensions import TypeAliasType

from sparse_lightning.app.trust import Target, locate
from sparse_lightning.errors import ConfigError, did_you_mean

RESERVED = {"_target_", "_partial_", "_args_", "_convert_", "_recursive_"}
"""Keys of Hydra, which are not arguments."""


def check_arguments(node: Any, place: str) -> None:
    """Raise `ConfigError` where a node, at any depth, has a key that its target does not take, or a wrong type."""
    if isinstance(node, list):
        for i, value in enumerate(node):
            check_arguments(value, f"{place}[{i}]")
    if not isinstance(node, dict):
        return
    if "_target_" in node:
        _check_node(node, place)
    for key, value in node.items():
        check_arguments(value, f"{place}.{key}")


def parameters_of(path: str, place: str = "") -> dict[str, inspect.Parameter]:
    """Return the parameters of a target, by name."""
    try:
        return dict(inspect.signature(locate(Target(place, path))).parameters)
    except (TypeError, ValueError):  # not every target in C++ has a signature
        return {"kwargs": inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)}


def _check_node(node: dict[str, Any], place: str) -> None:
    path = node["_target_"]
    short, taken = path.rpartition(".")[2], parameters_of(path, place)
    hints = _hints(locate(Target(place, path)))
    unknown = [key for key in node if str(key).startswith("_") and key not in RESERVED | set(taken)]
    if unknown:
        raise ConfigError(f"{place}.{unknown[0]}: Hydra has no such key{did_you_mean(unknown[0], RESERVED)}")
    for key in [key for key in node if key not in RESERVED]:
        if key not in taken:
            if any(p.kind is p.VAR_KEYWORD for p in taken.values()):
                continue
            raise ConfigError(f"{place}.{key}: {short} takes no {key!r}{did_you_mean(str(key), taken)}")
        if not fits(node[key], hints.get(key, Any)):
            raise ConfigError(
                f"{place}.{key}: {node[key]!r} is not {_text(hints[key])}, the type that {short} requires"
            )
    if not node.get("_partial_") and not node.get("_args_"):
        _check_complete(node, place, short, taken)


def _check_complete(node: dict[str, Any], place: str, short: str, taken: dict[str, inspect.Parameter]) -> None:
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = [name for name, p in taken.items() if p.default is p.empty and p.kind not in variable]
    missing = [name for name in needed if name not in node]
    if missing:
        raise ConfigError(f"{place}.{missing[0]}: {short} requires {missing[0]!r}, which is missing")


def _hints(thing: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(getattr(thing, "__init__", thing) if isinstance(thing, type) else thing)
    except (NameError, TypeError, AttributeError):  # names that are imported for type checkers only
        return {}


def fits(value: Any, hint: Any) -> bool:
    """Whether a plain value fits a type hint; objects of a `_target_` fit any.

    Example:
        >>> fits(1, float), fits("high", float), fits([4, 4], collections.abc.Sequence[int]), fits("4", int | None)
        (True, False, True, False)
    """
    if isinstance(value, dict) and "_target_" in value:
        return True
    if isinstance(hint, TypeAliasType):
        return fits(value, hint.__value__)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, option) for option in args)
    if origin is typing.Literal:
        return value in args
    if hint is None or hint is type(None):
        return value is None
    if hint in (bool, int, float, str):
        return _is_plain(value, hint)
    return _fits_container(value, origin or hint, args)


def _is_plain(value: Any, hint: type) -> bool:
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _fits_container(value: Any, kind: Any, args: tuple[Any, ...]) -> bool:
    if not isinstance(kind, type) or kind is object:
        return True
    if issubclass(kind, collections.abc.Mapping):
        return isinstance(value, dict)
    if issubclass(kind, collections.abc.Collection) and kind is not str and kind.__module__ in _PLAIN:
        return isinstance(value, list) and all(fits(v, args[0]) for v in value if args and args[0] is not Ellipsis)
    # An object of this package cannot be written as a string or a number.
    return not kind.__module__.startswith("sparse_lightning.") or value is None


_PLAIN = ("builtins", "collections.abc", "typing")


def _text(hint: Any) -> str:
    if isinstance(hint, TypeAliasType):
        return _text(hint.__value__)
    options = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_text(option) for option in options)
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(map(repr, options))
    if hint is type(None):
        return "null"
    return str(getattr(hint, "__name__", hint))
