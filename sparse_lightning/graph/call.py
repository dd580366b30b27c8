"""Call: one operation of the traced model, as a rule sees it; and the registry of rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx

from sparse_lightning.compat.torch import is_operation
from sparse_lightning.graph.atoms import Atoms, Ids, Kind, Reason
from sparse_lightning.graph.traced_value import TracedValue

Result = TracedValue | tuple[TracedValue | None, ...]
Rule = Callable[..., Result]
AnyRule = TypeVar("AnyRule", bound=Rule)
Resize = Callable[["Resizing"], None]

RULES: dict[str, Rule] = {}
"""The rule of each operation, by name, such as `aten.linear.default`."""

RESIZES: dict[str, Resize] = {}
"""How the constants of an operation follow the sizes that removal leaves, for operations that have such constants."""


def rule(*operations: str, resize: Resize | None = None) -> Callable[[AnyRule], AnyRule]:
    """Register a rule: what an operation does to the atoms of its inputs.

    The rule gets the `Call`, then the arguments of the operation with a `TracedValue` for each tensor, and returns that
    of the result, or a tuple of them.

    Args:
        operations: names with overload, such as `aten.linear.default`.
        resize: rewrites the constants of the operation, such as sizes, when units are removed; see `Resizing`.

    Example:
        >>> from sparse_lightning.graph.call import RULES
        >>> "aten.linear.default" in RULES
        True
    """

    def register(function: AnyRule) -> AnyRule:
        for operation in operations:
            RULES[operation] = function
            if resize is not None:
                RESIZES[operation] = resize
        return function

    return register


def operation_name(node: fx.Node) -> str:
    """Return the name of the operation of a node, with its overload."""
    if isinstance(node.target, str) or is_operation(node.target):
        return str(node.target)
    return str(getattr(node.target, "__name__", node.target))


def plain_sizes(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the shape of a traced tensor: integers where sizes are known, and symbols where they are dynamic."""
    return tuple(_plain(size) for size in tensor.shape)


def _plain(size: Any) -> Any:
    """Return a size that torch.export has specialised as an integer."""
    return int(size) if isinstance(size, int) or size.node.expr.is_number else size


@dataclass(frozen=True)
class Call:
    """One operation of the traced model.

    Args:
        atoms: of the whole model.
        node: of the graph.
        operation: its name, such as `aten.linear.default`.
        module: the name of the innermost module that calls it.
    """

    atoms: Atoms
    node: fx.Node
    operation: str
    module: str

    def pin(self, ids: Ids | None, why: str, listed: bool = True) -> None:
        """Record that coordinates cannot be removed, and why; a dynamic dimension (None) never is."""
        if ids is not None and len(ids):
            self.atoms.pin(ids, self.reason(why, listed))

    def reason(self, why: str, listed: bool = True) -> Reason:
        """Return a reason that names this operation and its module."""
        return Reason(self.operation.removesuffix(".default"), self.module, why, listed)

    def pin_all(self, value: TracedValue, why: str, listed: bool = True) -> None:
        """Pin every dimension of a value."""
        for ids in value.dims:
            self.pin(ids, why, listed)

    def unify(self, one: Ids | None, other: Ids | None) -> Ids | None:
        """Record that two dimensions have the same coordinates; a fixed size pins where it meets a dynamic one."""
        if one is None or other is None or len(one) != len(other):
            for ids in (one, other):
                self.pin(ids, "a fixed size meets a dynamic one")
            return None
        self.atoms.unify(one, other)
        return one

    def mark(self, ids: Ids | None, kind: Kind) -> None:
        """Record what coordinates are called."""
        if ids is not None:
            self.atoms.kinds.append((ids, kind))

    def product(self, flat: Ids, axes: Sequence[Ids]) -> None:
        """Record that a flat dimension consists of axes, outermost first."""
        self.atoms.product(flat, axes, self.operation.removesuffix(".default"), self.module)

    def sizes(self, index: int | None = None) -> tuple[Any, ...]:
        """Return the shape of the result, or of one of several: integers, and symbols for dynamic sizes."""
        made = self.node.meta["val"]
        return plain_sizes(made if index is None else made[index])

    def pinned(self, sizes: Sequence[Any]) -> TracedValue:
        """Return a new value with dimensions that cannot be removed."""
        dims = tuple(self.fixed(size) for size in sizes)
        return TracedValue(dims, (False,) * len(dims))

    def fixed(self, size: Any) -> Ids | None:
        """Return atoms of a new dimension that cannot be removed and is not worth a line in the table."""
        if not isinstance(size, int):
            return None
        ids = self.atoms.fresh(size)
        self.pin(ids, "its size is fixed", listed=False)
        return ids

    def free(self, size: Any) -> Ids | None:
        """Return atoms of a new dimension; None for a dynamic size."""
        if not isinstance(size, int):
            return None
        return self.atoms.fresh(size) if size != 1 else self.fixed(1)


@dataclass(frozen=True)
class Resizing:
    """A node of the smaller program whose constants are to be rewritten.

    Args:
        node: of the smaller program; its `args` and `kwargs` may be replaced.
        before: the value of each node before removal, by name.
        kept: returns which coordinates are kept, as booleans; None for a dynamic dimension.
    """

    node: fx.Node
    before: dict[str, Any]
    kept: Callable[[Ids | None], Any]

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """Return an argument by position or name."""
        if len(self.node.args) > index:
            return self.node.args[index]
        return self.node.kwargs.get(name, default)

    def replace(self, index: int, name: str, value: Any) -> None:
        """Replace an argument, by position or by name."""
        if len(self.node.args) > index:
            self.node.update_arg(index, value)
        else:
            self.node.update_kwarg(name, value)

    def result(self) -> Any:
        """Return the value of this node before removal: one, or a tuple of them."""
        return self.before[self.node.name]

    def input(self, index: int) -> TracedValue:
        """Return the value of a tensor argument before removal."""
        node = self.node.args[index]
        assert isinstance(node, fx.Node)
        value = self.before[node.name]
        assert isinstance(value, TracedValue)
        return value

    def sizes(self, value: TracedValue) -> list[int | None]:
        """Return the size of each dimension after removal; None for a dynamic one."""
        return [None if ids is None else int(self.kept(ids).sum()) for ids in value.dims]
