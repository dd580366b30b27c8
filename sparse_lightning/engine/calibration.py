"""Calibration: run a model on a few batches, to observe the inputs of its layers and to compute gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from sparse_lightning.errors import FlowError, SparseLightningError, SparsityError

Step = Callable[[nn.Module, Any], Any]
"""Runs a model on a batch. What it returns is needed for gradients only: a loss."""


def default_step(model: nn.Module, batch: Any) -> Any:
    """Run a model as its kind is usually run.

    A LightningModule makes its `training_step`. Other models are called: with a mapping as keywords, as models of
    transformers are, and with the first entry of a tuple or list, without the labels.

    Example:
        >>> default_step(nn.Linear(4, 3), (torch.zeros(2, 4), torch.zeros(2))).shape
        torch.Size([2, 3])
    """
    if isinstance(model, L.LightningModule):
        with without_logging(model):
            return model.training_step(*training_arguments(model, batch))
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0]) if isinstance(batch, tuple | list) else model(batch)


def training_arguments(model: L.LightningModule, batch: Any) -> tuple[Any, ...]:
    """Return what the `training_step` of a model gets: a batch, and its index if it takes one.

    Raises:
        SparseLightningError: if the step would change the weights itself.
    """
    if not model.automatic_optimization:
        raise SparseLightningError(
            f"{type(model).__name__} has automatic_optimization=False, so that its training_step makes optimizer steps "
            "and would change the weights: pass step, a function of the model and a batch that returns the loss"
        )
    has_index = is_param_in_hook_signature(model.training_step, "batch_idx", min_args=2)
    return (batch, 0) if has_index else (batch,)


@contextmanager
def without_logging(model: nn.Module) -> Iterator[None]:
    """Let `self.log` of LightningModules do nothing: what they log of these batches are no metrics of a run."""
    modules = [module for module in model.modules() if isinstance(module, L.LightningModule)]
    names = ("log", "log_dict")
    before = [{name: vars(module)[name] for name in names if name in vars(module)} for module in modules]
    for module in modules:
        vars(module).update(dict.fromkeys(names, _ignore))
    try:
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            for name in names:
                del vars(module)[name]
            vars(module).update(own)


def _ignore(*args: Any, **kwargs: Any) -> None:
    return


class Calibration:
    """A model in evaluation mode, and batches that it runs on.

    Args:
        model: is called in evaluation mode, and left in the mode that it was in.
        batches: anything that can be iterated; what may be a stream is kept as a list, to be read several times.
        step: runs the model on a batch; None for `default_step`.
    """

    def __init__(self, model: nn.Module, batches: Iterable[Any], step: Step | None = None) -> None:
        _check_batches(batches)
        self._model, self._step = model, step or default_step
        self._batches = batches if _starts_anew(batches) else list(batches)
        self._device = next((param.device for param in model.parameters()), torch.device("cpu"))

    def run(self) -> None:
        """Run all batches, without gradients."""
        with self._evaluating(), torch.no_grad():
            for batch in self._moved():
                self._step(self._model, batch)

    def run_once(self) -> None:
        """Run the first batch, without gradients."""
        with self._evaluating(), torch.no_grad():
            self._step(self._model, next(iter(self._moved())))

    def losses(self) -> Iterator[None]:
        """Yield after the backward pass of each batch; gradients are those of this batch alone."""
        with self._evaluating(), torch.enable_grad(), self._own_gradients():
            for batch in self._moved():
                self._model.zero_grad(set_to_none=True)
                loss = _loss_of(self._step(self._model, batch))
                if not loss.requires_grad:
                    raise FlowError(
                        "the loss of the batches has no gradient: the parameters are frozen, or step computes it "
                        "without gradients. Call requires_grad_(), or pass a criterion without gradients, such as "
                        "Wanda()"
                    )
                loss.backward()  # type: ignore[no-untyped-call]
                yield

    def _moved(self) -> Iterator[Any]:
        count = 0
        for batch in self._batches:
            count += 1
            yield move_data_to_device(batch, self._device)
        if not count:
            raise SparseLightningError("batches is empty: pass at least one batch, to observe the inputs of layers")

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        training = [module for module in self._model.modules() if module.training]
        self._model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True
            _reshard(self._model)

    @contextmanager
    def _own_gradients(self) -> Iterator[None]:
        """Put back the gradients that the model had."""
        before = [(param, param.grad) for param in self._model.parameters()]
        try:
            yield
        finally:
            for param, grad in before:
                param.grad = grad


def _check_batches(batches: Iterable[Any]) -> None:
    """Raise for a single batch, whose rows or keys would be taken for batches."""
    if isinstance(batches, Tensor):
        raise SparsityError(
            f"batches is a tensor of shape {tuple(batches.shape)}, whose rows would be taken for batches: pass a list "
            "of batches, such as [x] or x.split(32)"
        )
    if isinstance(batches, Mapping):
        raise SparsityError(
            f"batches is one mapping with the keys {[*batches]}, so a single batch: pass a list of batches, as in [x]"
        )


def _starts_anew(batches: Iterable[Any]) -> bool:
    """Whether each pass over batches is known to be a whole one: a second pass over a stream may continue the first."""
    if isinstance(batches, DataLoader):
        return not isinstance(batches.dataset, IterableDataset)
    return isinstance(batches, Sequence)


def _reshard(model: nn.Module) -> None:
    """Free the gathered parameters that FSDP2 keeps after a forward pass: they would not follow the shards."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()


def _loss_of(result: Any) -> Tensor:
    """Return the loss of a step: a scalar, or the entry or attribute `loss`."""
    found = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", result)
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise SparseLightningError(
            "the criterion reads gradients, and the model returns no loss for a batch: pass step, a function of the "
            "model and a batch that returns the loss, or a criterion without gradients such as Wanda()"
        )
    return found
