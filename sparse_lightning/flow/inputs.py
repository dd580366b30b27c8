"""What a flow can ask for by name while it is traced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NoReturn

from sparse_lightning.errors import FlowError
from sparse_lightning.flow.context import FORMAT, Context, Value
from sparse_lightning.nearest import did_you_mean

OPTIMIZER = "optimizer."


class Inputs:
    """The `x` of `flow(self, x)`; what is asked for here must be there when the flow runs."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def __getattr__(self, name: str) -> NoReturn:
        names = [known for known, kind in vars(Inputs).items() if isinstance(kind, property)]
        raise _no_such(self, name, f"a flow can ask x for {_not_among(name, names)}")

    @property
    def weight(self) -> Value:
        """The weights: ELEMENT."""
        return self._context.input("weight", FORMAT.ELEMENT)

    @property
    def grad(self) -> Value:
        """Their gradients: ELEMENT."""
        return self._context.input("grad", FORMAT.ELEMENT)

    @property
    def input_norm(self) -> Value:
        """For each weight the 2-norm of the input feature that it multiplies: ELEMENT."""
        return self._context.input("input_norm", FORMAT.ELEMENT)

    @property
    def optimizer(self) -> Mapping[str, Value]:
        """The tensors that the optimizer keeps for a parameter, by their name in its state: ELEMENT."""
        return _OptimizerState(self._context)

    @property
    def random(self) -> Value:
        """A uniform number in [0, 1) for each block, another one in each run, the same on all ranks: RAGGED."""
        return self._context.input("random", FORMAT.RAGGED)

    @property
    def step(self) -> Value:
        """The optimizer step: RAGGED, the same number for all blocks."""
        return self._context.input("step", FORMAT.RAGGED)

    @property
    def target(self) -> Value:
        """The sparsity asked for at this step: RAGGED, the same number for all blocks."""
        return self._context.input("target", FORMAT.RAGGED)

    @property
    def state(self) -> Mapping[str, Value]:
        """The criterion's fields of state, by name: PAGED."""
        return _Fields(self._context.fields)


class _NoSuchName(FlowError, AttributeError):
    """A name that a flow can't ask for. Also an AttributeError, so that `hasattr` and `getattr` work as ever."""


def _no_such(owner: object, name: str, text: str) -> AttributeError:
    """The error for an attribute; Python itself looks for some that begin with `_`, to copy and to pickle."""
    return AttributeError(f"{type(owner).__name__} has no {name}") if name.startswith("_") else _NoSuchName(text)


def _not_among(name: str, names: list[str]) -> str:
    """All names that there are, the one that is not, and the nearest to it."""
    hint = did_you_mean(name, names)
    return f"{', '.join(names) or 'nothing'}, not {name!r}{hint if hint.endswith('?') else ''}"


class _Fields(dict[str, Value]):
    def __missing__(self, name: str) -> Value:
        raise FlowError(f"the states that the criterion declares are {_not_among(name, list(self))}")

    def __getattr__(self, name: str) -> NoReturn:
        raise _no_such(self, name, f'a state is asked for by its name, x.state["{name}"], not x.state.{name}')


class _OptimizerState(Mapping[str, Value]):
    def __init__(self, context: Context) -> None:
        self._context = context

    def __getitem__(self, name: str) -> Value:
        return self._context.input(OPTIMIZER + name, FORMAT.ELEMENT)

    def __getattr__(self, name: str) -> NoReturn:
        raise _no_such(self, name, f'what an optimizer keeps is asked for by its name: x.optimizer["{name}"]')

    def __contains__(self, name: object) -> bool:
        raise _unknown_yet()

    def __iter__(self) -> Iterator[str]:
        raise _unknown_yet()

    def __len__(self) -> int:
        raise _unknown_yet()


def _unknown_yet() -> FlowError:
    return FlowError("which state an optimizer keeps is not known while a flow is traced: ask for it by name")
