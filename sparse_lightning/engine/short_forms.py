"""Short forms of the parts of a Sparsifier: a number for a schedule, a name for a criterion, a method or a budget."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

from sparse_lightning import budgets, criteria, methods
from sparse_lightning.budgets import Budget
from sparse_lightning.compaction.shrink import Shrink
from sparse_lightning.compensation import Compensation
from sparse_lightning.errors import FlowError, SparsityError, did_you_mean
from sparse_lightning.flow import Criterion
from sparse_lightning.methods import Method
from sparse_lightning.schedules import Constant, Schedule


def as_schedule(given: Any) -> Schedule:
    """Return a schedule; a number is the sparsity of a `Constant`.

    Example:
        >>> as_schedule(0.75)
        Constant(final=0.75, begin=0, end=0.75)
    """
    if isinstance(given, Schedule):
        return given
    if isinstance(given, int | float) and not isinstance(given, bool):
        return Constant(float(given))
    raise SparsityError(
        f"schedule={given!r} is not a schedule: pass one, such as Cubic(final=0.9), or a number for the sparsity of a "
        "Constant"
    )


def as_criterion(given: Any) -> Criterion:
    """Return a criterion; a text is its name.

    Example:
        >>> type(as_criterion("average_taylor")).__name__
        'AverageTaylor'
    """
    if isinstance(given, Criterion):
        return given
    made: Criterion = _named(given, "criterion", criteria, Criterion)
    return made


def as_method(given: Any) -> Method:
    """Return a method; a text is its name."""
    if isinstance(given, Method):
        return given
    made: Method = _named(given, "method", methods, Method)
    return made


def as_budget(given: Any) -> Budget:
    """Return a budget; a text is its name."""
    if isinstance(given, Budget):
        return given
    made: Budget = _named(given, "budget", budgets, Budget)
    return made


def as_compensation(given: Any) -> Compensation | None:
    """Return a compensation, or None for none."""
    if given is None or isinstance(given, Compensation):
        return given
    raise SparsityError(f"compensation={given!r} is not a compensation: pass Refit(), or None")


def as_shrink(given: Any) -> Shrink | None:
    """Return when pruned units are removed while a model trains, or None for never."""
    if given is None or isinstance(given, Shrink):
        return given
    raise SparsityError(f"shrink={given!r} is not a Shrink: pass Shrink(), or None")


def _named(given: Any, role: str, home: ModuleType, base: type) -> Any:
    """Return an object of the class of a module that has this name; raise an error if there is none."""
    kinds = [kind for kind in vars(home).values() if isinstance(kind, type) and issubclass(kind, base)]
    known = {_snake(kind.__name__): kind for kind in kinds if kind.__module__ == home.__name__ and kind is not base}
    wrong = FlowError if base is Criterion else SparsityError
    if not isinstance(given, str):
        raise wrong(f"{role}={given!r} is not a {role}: pass one, such as {next(iter(known.values())).__name__}()")
    name = next((name for name in known if name.replace("_", "") == _snake(given).replace("_", "")), None)
    if name is None:
        raise wrong(f"there is no {role} {given!r}{did_you_mean(_snake(given), known)}")
    try:
        return known[name]()
    except TypeError as error:
        raise wrong(f"{role}={given!r} needs arguments: pass {known[name].__name__}(…), not its name") from error


def _snake(name: str) -> str:
    """Return a name of a class as it is written in configurations.

    Example:
        >>> _snake("AverageTaylor"), _snake("RigL"), _snake("LAMP")
        ('average_taylor', 'rigl', 'lamp')
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "_", name).lower().replace("-", "_")
