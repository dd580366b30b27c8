"""The inputs of a flow, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NoReturn

from sparse_lightning.errors import FlowError, did_you_mean
from sparse_lightning.flow.context import FORMAT, Context, Value

OPTIMIZER = "optimizer."


class Inputs:
    """The `x` of `flow(self, x)`. The inputs that a flow uses must be available when it runs."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def __getattr__(self, name: str) -> NoReturn:
        names = [known for known, kind in vars(Inputs).items() if isinstance(kind, property)]
        raise _no_such(self, name, _unknown(name, "an input of a flow", names))

    @property
    def weight(self) -> Value:
        """The weights. ELEMENT."""
        return self._context.input("weight", FORMAT.ELEMENT)

    @property
    def grad(self) -> Value:
        """The gradients of the weights. ELEMENT."""
        return self._context.input("grad", FORMAT.ELEMENT)

    @property
    def input_norm(self) -> Value:
        """For each weight, the 2-norm of the input feature that it multiplies. ELEMENT."""
        return self._context.input("input_norm", FORMAT.ELEMENT)

    @property
    def optimizer(self) -> Mapping[str, Value]:
        """The tensors in the optimizer state of a parameter, by their name there. ELEMENT."""
        return _OptimizerState(self._context)

    @property
    def random(self) -> Value:
        """A uniform random number in [0, 1) per block, new in each run, the same on all ranks. RAGGED."""
        return self._context.input("random", FORMAT.RAGGED)

    @property
    def removal_error(self) -> Value:
        """The squared output error of the layers that read a block if it is removed and the rest refitted. RAGGED."""
        return self._context.input("removal_error", FORMAT.RAGGED)

    @property
    def step(self) -> Value:
        """The optimizer step, the same number for all blocks. RAGGED."""
        return self._context.input("step", FORMAT.RAGGED)

    @property
    def target(self) -> Value:
        """The target sparsity at this step, the same number for all blocks. RAGGED."""
        return self._context.input("target", FORMAT.RAGGED)

    @property
    def state(self) -> Mapping[str, Value]:
        """The fields of state of the criterion, by name. PAGED."""
        return _Fields(self._context.fields)


class _NoSuchName(FlowError, AttributeError):
    """A name that is not an input. Also an AttributeError, so that `hasattr` and `getattr` work as usual."""


def _no_such(owner: object, name: str, text: str) -> AttributeError:
    """Return the error for a missing attribute; copy and pickle look for some that begin with `_`."""
    if name.startswith("_"):
        return AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}")
    return _NoSuchName(text)


def _unknown(name: str, what: str, names: list[str]) -> str:
    """Return the message for an unknown name: all known names, and the nearest one."""
    hint = did_you_mean(name, names)
    return f"{name!r} is not {what} ({', '.join(names) or 'none'}){hint if hint.endswith('?') else ''}"


class _Fields(dict[str, Value]):
    def __missing__(self, name: str) -> Value:
        raise FlowError(_unknown(name, "one of the states that the criterion declares", list(self)))

    def __getattr__(self, name: str) -> NoReturn:
        raise _no_such(self, name, f'x.state.{name} is not an attribute: use x.state["{name}"]')


class _OptimizerState(Mapping[str, Value]):
    def __init__(self, context: Context) -> None:
        self._context = context

    def __getitem__(self, name: str) -> Value:
        return self._context.input(OPTIMIZER + name, FORMAT.ELEMENT)

    def __getattr__(self, name: str) -> NoReturn:
        raise _no_such(self, name, f'x.optimizer.{name} is not an attribute: use x.optimizer["{name}"]')

    def __contains__(self, name: object) -> bool:
        raise _unknown_yet()

    def __iter__(self) -> Iterator[str]:
        raise _unknown_yet()

    def __len__(self) -> int:
        raise _unknown_yet()


def _unknown_yet() -> FlowError:
    return FlowError(
        "the names in the optimizer state are unknown while a flow is traced: read an entry by its name, "
        'such as x.optimizer["exp_avg"]'
    )
