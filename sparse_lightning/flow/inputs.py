"""What a flow can ask for by name while it is traced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sparse_lightning.errors import FlowError
from sparse_lightning.flow.context import FORMAT, Context, Value
from sparse_lightning.nearest import did_you_mean

OPTIMIZER = "optimizer."


class Inputs:
    """The `x` of `flow(self, x)`; what is asked for here must be there when the flow runs."""

    def __init__(self, context: Context) -> None:
        self._context = context

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


class _Fields(dict[str, Value]):
    def __missing__(self, name: str) -> Value:
        raise FlowError(f"the criterion declares no state {name!r}{did_you_mean(name, self)}")


class _OptimizerState(Mapping[str, Value]):
    def __init__(self, context: Context) -> None:
        self._context = context

    def __getitem__(self, name: str) -> Value:
        return self._context.input(OPTIMIZER + name, FORMAT.ELEMENT)

    def __iter__(self) -> Iterator[str]:
        raise FlowError("which state an optimizer keeps is not known while a flow is traced: ask for it by name")

    def __len__(self) -> int:
        raise FlowError("which state an optimizer keeps is not known while a flow is traced: ask for it by name")
