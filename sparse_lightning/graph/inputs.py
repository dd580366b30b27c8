"""Example inputs: what a model is traced with, or called with once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import TypeAliasType

from sparse_lightning.compat.accelerate import in_own_precision
from sparse_lightning.compat.torch import leaves, map_leaves
from sparse_lightning.errors import CouplingError

# Named, because OmegaConf refuses the fields of a pattern whose type is a union of containers.
Inputs = TypeAliasType("Inputs", tuple[Any, ...] | Mapping[str, Any] | Tensor | None)
"""Positional arguments as a tuple, keyword arguments as a mapping, one tensor, or None for those of the model."""


@dataclass(frozen=True)
class ExampleInputs:
    """Arguments of `forward`.

    Args:
        args: positional.
        kwargs: by name.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, model: nn.Module, inputs: Inputs) -> ExampleInputs:
        """Return inputs that are passed, or those that the model has: `example_input_array`, then `dummy_inputs`.

        Those of the model are in the precision that it has now, which a trainer may have changed since they were set;
        those that are passed stay as they are.

        Raises:
            CouplingError: if there are none, or the model is not a module.
        """
        if not isinstance(model, nn.Module):
            raise CouplingError(
                f"a {type(model).__name__} is not a model: pass an nn.Module, into which a state dict is loaded first"
            )
        if inputs is not None:
            return cls._parsed(inputs)
        for given in (_attribute(model, "example_input_array"), _attribute(model, "dummy_inputs")):
            if given is not None:
                return cls._parsed(given).in_precision_of(model)
        raise CouplingError(
            f"{type(model).__name__} has no example inputs: pass inputs, a tuple of tensors or a dict "
            "of keyword arguments, or set example_input_array in the model"
        )

    @classmethod
    def _parsed(cls, given: Any) -> ExampleInputs:
        if isinstance(given, Mapping):
            return cls((), dict(given))
        if isinstance(given, Tensor):
            return cls((given,), {})
        if isinstance(given, tuple | list):
            return cls(tuple(given), {})
        raise CouplingError(
            f"inputs={given!r} is a {type(given).__name__}: pass a tuple of tensors, or a dict of keyword arguments"
        )

    def without_cache(self, model: nn.Module) -> ExampleInputs:
        """Set `use_cache=False` for models of Hugging Face: a cache is not a tensor."""
        config = getattr(model, "config", None)
        known = hasattr(config, "use_cache") and "use_cache" in inspect.signature(model.forward).parameters
        return ExampleInputs(self.args, {**self.kwargs, "use_cache": False}) if known else self

    def on(self, device: torch.device) -> ExampleInputs:
        """Return the inputs on a device."""
        return self._changed(lambda t: t.to(device))

    def in_precision_of(self, model: nn.Module) -> ExampleInputs:
        """Return floating-point inputs as the trainer of the model converts batches, and in the dtype of its weights.

        Where the weights have several dtypes, the trainer alone decides; without a trainer they stay as they are.

        Example:
            >>> ExampleInputs((torch.zeros(2), torch.tensor(3)), {}).in_precision_of(nn.Linear(2, 2).double()).args
            (tensor([0., 0.], dtype=torch.float64), tensor(3))
        """
        plugin, dtype = _precision_plugin(model), _only_dtype(model)
        converted = self if plugin is None else ExampleInputs(*plugin.convert_input((self.args, self.kwargs)))
        return converted if dtype is None else converted.of_dtype(dtype)

    def cast_advice(self, model: nn.Module) -> str:
        """Return that inputs should be cast, if their dtype is not the one of the weights; an empty text otherwise."""
        tensors = [item for item in leaves((self.args, self.kwargs)) if isinstance(item, Tensor)]
        weights = _only_dtype(model)
        others = {str(tensor.dtype) for tensor in tensors if tensor.is_floating_point() and tensor.dtype != weights}
        if weights is None or not others:
            return ""
        return f"The inputs are {' and '.join(sorted(others))} and the parameters {weights}: cast the inputs"

    def run(self, model: nn.Module) -> Any:
        """Call a model without gradients, in evaluation mode, and return its outputs; its modes are restored.

        It computes in the precision of its weights: outputs of mixed precision are too coarse to be compared.
        """
        modes = {module: module.training for module in model.modules()}
        try:
            with torch.no_grad(), in_own_precision(model):
                return model.eval()(*self.args, **self.kwargs)
        finally:
            for module, training in modes.items():
                module.training = training

    def of_dtype(self, dtype: torch.dtype) -> ExampleInputs:
        """Return floating-point inputs in another dtype."""
        return self._changed(lambda t: t.to(dtype) if t.is_floating_point() else t)

    def varied(self) -> ExampleInputs:
        """Return random numbers for floating-point inputs whose elements are all the same; zeros hide what is computed.

        Example:
            >>> ExampleInputs((torch.zeros(2), torch.tensor([1.0, 2.0])), {}).varied().args[1]
            tensor([1., 2.])
        """
        if not any(isinstance(item, Tensor) and _is_constant(item) for item in leaves((self.args, self.kwargs))):
            return self
        numbers = torch.Generator().manual_seed(0)
        return self._changed(lambda t: torch.randn(t.shape, generator=numbers).to(t) if _is_constant(t) else t)

    def repeated(self) -> ExampleInputs:
        """Return a batch of two for a batch of one example; other batches as they are."""
        tensors = [item for item in leaves((self.args, self.kwargs)) if isinstance(item, Tensor) and item.ndim]
        if any(tensor.shape[0] != 1 for tensor in tensors):
            return self
        return self._changed(lambda t: t.expand(2, *t.shape[1:]).clone() if t.ndim else t)

    def _changed(self, change: Callable[[Tensor], Tensor]) -> ExampleInputs:
        made = map_leaves(lambda item: change(item) if isinstance(item, Tensor) else item, (self.args, self.kwargs))
        return ExampleInputs(*made)

    def dynamic_shapes(self, model: nn.Module, depth: int) -> dict[str, Any]:
        """Return which dimensions may vary, by the parameters of `forward`.

        These are the first `depth` dimensions of each tensor; only the batch of images. Sizes of 1 are fixed, as
        torch.export does not trace them as dynamic.

        Raises:
            TypeError: if `forward` does not take the inputs.
        """
        # torch.export refuses shapes by the names of inputs that are parts of *args or **kwargs.
        bound = inspect.signature(model.forward).bind(*self.args, **self.kwargs).arguments
        shapes: dict[str, Any] = map_leaves(lambda item: _varying(item, depth), dict(bound))
        return shapes


def _is_constant(t: Tensor) -> bool:
    return t.is_floating_point() and t.numel() > 1 and bool((t == t.reshape(-1)[0]).all())


def _varying(item: Any, depth: int) -> dict[int, Any] | None:
    if not isinstance(item, Tensor):
        return None
    few = min(depth, 1 if item.ndim > 3 else 2, item.ndim)
    return {d: torch.export.Dim.AUTO for d in range(few) if item.shape[d] > 1}


def _only_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the floating-point dtype of all parameters; None if they have several, or none."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else None


def _precision_plugin(model: nn.Module) -> Any:
    """Return the precision plugin of the trainer that a LightningModule is attached to; None without one."""
    try:
        return model.trainer.precision_plugin  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):  # a LightningModule without a trainer raises a RuntimeError
        return None


def _attribute(model: nn.Module, name: str) -> Any:
    """Return an attribute of the model, or of the model of Hugging Face inside of it; None without one."""
    return getattr(model, name, None)
