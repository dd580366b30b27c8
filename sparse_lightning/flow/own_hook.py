"""OwnHook: a forward pre-hook that belongs to one module, and not to its copies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import nn

Collect = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


class OwnHook:
    """A forward pre-hook, with keyword arguments, whose copy does nothing.

    A model is copied and pickled with its hooks. A copy that observed its inputs as well would keep the state of this
    run alive, and a file with it could not be loaded without this package: both get a function of Python's own.

    Args:
        collect: what the hook does.

    Example:
        >>> import copy
        >>> hook = OwnHook(lambda module, inputs, named: print("observed"))
        >>> hook(nn.ReLU(), (), {})
        observed
        >>> copy.deepcopy(hook)(nn.ReLU(), (), {})
    """

    def __init__(self, collect: Collect) -> None:
        self._collect = collect

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Observe the inputs of a module."""
        self._collect(module, inputs, named)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # it takes three arguments and returns None
