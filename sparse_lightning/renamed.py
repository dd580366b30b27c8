"""Names of version 0.1.0 that keep working for a release: arguments, attributes, methods and classes."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


def renamed_arguments(**new_of: str) -> Callable[[type[T]], type[T]]:
    """Let a class accept arguments under their old names too, with a DeprecationWarning.

    Args:
        new_of: the new name of each old one.

    Example:
        >>> from sparse_lightning import Global
        >>> Global.renamed_arguments
        {'floor': 'min_density'}
    """

    def decorate(cls: type[T]) -> type[T]:
        init: Any = cls.__init__

        @wraps(init)
        def __init__(self: T, *args: Any, **kwargs: Any) -> None:
            for old in [name for name in kwargs if name in new_of]:
                new = new_of[old]
                if new in kwargs:
                    raise TypeError(f"{cls.__name__} got both {new} and {old}, its old name: pass {new} alone")
                warn_renamed(f"{cls.__name__}({old}=…)", f"{cls.__name__}({new}=…)", stacklevel=3)
                kwargs[new] = kwargs.pop(old)
            init(self, *args, **kwargs)

        cls.__init__ = __init__  # type: ignore[assignment, method-assign]
        cls.renamed_arguments = new_of  # type: ignore[attr-defined]
        return cls

    return decorate


def renamed_keyword(
    old: str, new: str, former: Callable[..., Any] | None = None
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let a method accept a keyword under its old name too, with a DeprecationWarning.

    Args:
        old: the old name.
        new: the new name.
        former: called instead of the method, with its value last, if the old name also meant something else.
    """

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if old not in kwargs:
                return method(*args, **kwargs)
            name, value = f"{type(args[0]).__name__}.{method.__name__}", kwargs.pop(old)
            if new in inspect.signature(method).bind_partial(*args, **kwargs).arguments:
                raise TypeError(f"{name} got both {new} and {old}, its old name: pass {new} alone")
            warn_renamed(f"{name}({old}=…)", f"{name}({new}=…)", stacklevel=3)
            if former is not None:
                return former(*args, value, **kwargs)  # type: ignore[no-any-return]
            kwargs[new] = value
            return method(*args, **kwargs)

        return call

    return decorate


def renamed_attribute(old: str, new: str) -> Any:
    """Return a property that reads an attribute under its old name, with a DeprecationWarning."""

    def read(self: object) -> Any:
        kind = type(self).__name__
        warn_renamed(f"{kind}.{old}", f"{kind}.{new}", stacklevel=3)
        return getattr(self, new)

    return property(read, doc=f"The old name of `{new}`.")


def adopt_renamed_method(cls: type, old: str, new: str) -> None:
    """Let a subclass that overrides a method under its old name override the new one, with a DeprecationWarning."""
    if old in vars(cls) and new not in vars(cls):
        warn_renamed(f"{cls.__name__}.{old}", f"{cls.__name__}.{new}", stacklevel=4)
        setattr(cls, new, vars(cls)[old])


def renamed_names(module: str, **new_of: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that finds classes under their old names, with a DeprecationWarning."""

    def find(name: str) -> Any:
        if name not in new_of:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", f"{module}.{new_of[name]}", stacklevel=3)
        return getattr(sys.modules[module], new_of[name])

    return find


def warn_renamed(old: str, new: str, stacklevel: int) -> None:
    """Warn that an old name is used."""
    warnings.warn(f"{old} is deprecated: use {new}", DeprecationWarning, stacklevel=stacklevel + 1)
