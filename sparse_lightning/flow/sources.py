"""Sources: the tensors that the inputs of a flow are read from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparse_lightning.blocks.sparse_block import SparseBlock
from sparse_lightning.errors import FlowError, UnseenInputsError, did_you_mean
from sparse_lightning.flow.inputs import OPTIMIZER
from sparse_lightning.flow.optimizer_state import fresh, state_tensors

NO_STATE = ": no optimizer has a state tensor of the shape of the parameter, use one that does"


@dataclass(frozen=True)
class Sources:
    """The inputs of a run beside the weights.

    Args:
        optimizers: whose state the flow may read.
        input_norms: for each parameter, a tensor that expands to its shape; see `InputNorms`.
        grads: gradients to use instead of `param.grad`.
        step: the optimizer step.
        target: the target sparsity.
        removal_error: returns the grid of removal errors of a block.
        pruned: masks by the name of their block, True where all weights are zero: scores that would be zero there,
            such as weight times gradient, are not computed from the elements.
    """

    optimizers: Sequence[Optimizer] = ()
    input_norms: Mapping[Tensor, Tensor] = field(default_factory=dict)
    grads: Mapping[Tensor, Tensor] = field(default_factory=dict)
    step: int = 0
    target: float = 0.0
    removal_error: Callable[[SparseBlock], Tensor] | None = None
    pruned: Mapping[str, Tensor] = field(default_factory=dict)

    def element(self, name: str, param: Tensor, owner: str) -> Tensor:
        """Return the tensor of an input with one entry per weight, in the shape of the parameter.

        Raises:
            FlowError: the input is missing, or on another device than the parameter.
        """
        found = self._find(name, param)
        if found is None:
            is_unseen = name == "input_norm" and self._watches(param)
            error = UnseenInputsError if is_unseen else FlowError
            raise error(f"{name} of {owner} is missing{self._missing(name, param)}")
        if found.device != param.device:
            raise FlowError(
                f"{name} of {owner} is on {found.device}, but the parameter is on {param.device}: move them to "
                "one device"
            )
        return found.detach() if found.shape == param.shape else found.detach().expand(param.shape)

    def _find(self, name: str, param: Tensor) -> Tensor | None:
        if name == "weight":
            return param
        if name == "grad":
            return self.grads.get(param, param.grad)
        if name == "input_norm":
            return self.input_norms.get(param)
        return self._state(param).get(name.removeprefix(OPTIMIZER))

    def _state(self, param: Tensor) -> dict[str, Tensor]:
        kept = [state_tensors(optimizer, param) for optimizer in self.optimizers]
        return {name: tensor for state in kept for name, tensor in state.items()}

    def _missing(self, name: str, param: Tensor) -> str:
        if name == "grad":
            return ": call backward() first, or exclude the parameter"
        if name == "input_norm" and self._watches(param):
            return (
                ": no forward pass with gradients enabled has called its layer since the last update. Exclude the "
                "weight from the patterns, or use a criterion that needs no inputs, such as Magnitude"
            )
        if name == "input_norm":
            return (
                ": collect it with InputNorms, for the weight or bias of nn.Linear, nn.Conv1d, nn.Conv2d or nn.Conv3d. "
                f"If the parameter of shape {tuple(param.shape)} belongs to another layer, such as a norm or a "
                "transposed convolution, use a criterion that needs no inputs, such as Magnitude"
            )
        names = [OPTIMIZER + k for k in self._state(param)]
        return did_you_mean(name, names) or NO_STATE

    def check(self, names: Set[str], owner: str, param: Tensor) -> None:
        """Raise `FlowError` before training if an input would be missing in a run.

        Gradients are not checked: they exist after the first backward pass. The state of an optimizer that has made
        no step is inferred from a step of a copy of it, on a small parameter.
        """
        if "input_norm" in names and not self._watches(param):
            raise FlowError(f"input_norm of {owner} is missing{self._missing('input_norm', param)}")
        if "removal_error" in names and self.removal_error is None:
            raise FlowError(
                f"removal_error of {owner} is missing: score it in a Sparsifier or by prune, which collect it"
            )
        needed = sorted(name for name in names if name.startswith(OPTIMIZER))
        kept = [OPTIMIZER + name for name in self._names_kept(param)] if needed else []
        for name in needed:
            if name not in kept:
                raise FlowError(f"{name} of {owner} is missing{did_you_mean(name, kept) or NO_STATE}")

    def _watches(self, param: Tensor) -> bool:
        watched = getattr(self.input_norms, "watched", self.input_norms)
        return any(weight is param for weight in watched)

    def _names_kept(self, param: Tensor) -> list[str]:
        names = list(self._state(param))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if param not in optimizer.state and any(p is param for p in group["params"]):
                    names += _names_after_a_step(optimizer, group)
        return names


def _names_after_a_step(optimizer: Optimizer, group: Mapping[str, Any]) -> list[str]:
    trial = torch.nn.Parameter(torch.zeros(2, 3, device=group["params"][0].device))
    trial.grad = torch.zeros_like(trial)
    other = fresh(optimizer, group, [trial])
    other.step(lambda: 0.0)
    return list(state_tensors(other, trial))
