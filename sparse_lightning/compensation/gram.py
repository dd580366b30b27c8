"""GramMatrices: the Gram matrices of layer inputs, collected by forward hooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparse_lightning.blocks.shards import has_others, is_sharded, summed
from sparse_lightning.compat.own_hook import OwnHook
from sparse_lightning.compat.torch import recompile
from sparse_lightning.compensation.reading_layer import ReadingLayer, reading_layers
from sparse_lightning.errors import PatternError, UnseenInputsError
from sparse_lightning.flow.finite import all_finite


class GramMatrices:
    """The Gram matrix `XᵀX` of the inputs X of each layer, over all observed forward passes, in fp32 or wider.

    The input of a layer with a bias ends with a constant one, so that the bias is one more column of weights. A matrix
    has `K²` numbers for K inputs: observe few layers at once if memory is short. With several processes, reading a
    matrix sums it over all ranks; all ranks must read the same ones in the same order.

    Args:
        model: where the layers are.
        weights: names and weights of the layers to observe until `close`.
        only_training: whether forward passes without gradients, as in validation, are ignored.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3, bias=False))
        >>> grams = GramMatrices(net, [("0.weight", net[0].weight)])
        >>> _ = net(torch.tensor([[3.0, 1.0], [4.0, 0.0]]))
        >>> grams[net[0].weight]
        tensor([[25.,  3.],
                [ 3.,  1.]])
        >>> grams.close()
    """

    def __init__(self, model: nn.Module, weights: Iterable[tuple[str, Tensor]], only_training: bool = False) -> None:
        self.layers = reading_layers(model, weights)
        self._only_training = only_training
        self.is_observing = True
        """Whether forward passes are observed now."""
        self._by_module = {layer.module: layer for layer in self.layers}
        self._of = {id(layer.weight): layer for layer in self.layers}
        self._sums: dict[int, Tensor] = {}
        self.is_ended = False
        """Whether the next input starts anew."""
        modules = self._by_module
        self._handles = [
            module.register_forward_pre_hook(OwnHook(self._collect), with_kwargs=True) for module in modules
        ]
        recompile()  # code that torch.compile has made before would not call the hooks

    def _collect(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not self.is_observing or (self._only_training and not torch.is_grad_enabled()):
            return
        if self.is_ended:
            self.reset()
        x = (inputs[0] if inputs else next(iter(named.values()))).detach()
        layer = self._by_module[module]
        if is_sharded(x):
            raise PatternError(
                f"the inputs of {layer.name} are sharded: compensation needs whole inputs, as with FSDP2. Prune before "
                "tensor parallelism"
            )
        # Autocast would multiply in half precision.
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            rows = layer.inputs(x)
            seen = self._sums.get(id(layer.weight))
            if seen is None:
                self._sums[id(layer.weight)] = rows.T @ rows
            else:
                seen.addmm_(rows.T, rows)

    def __contains__(self, weight: Tensor) -> bool:
        return id(weight) in self._of

    def layer_of(self, weight: Tensor) -> ReadingLayer:
        """Return the layer of a weight that is observed."""
        return self._of[id(weight)]

    def __getitem__(self, weight: Tensor) -> Tensor:
        total = self._total(self._of[id(weight)])
        if total is None:
            raise UnseenInputsError(
                f"{self._of[id(weight)].name} has had no inputs that were observed since the last update: run batches "
                "through this layer, or exclude it. A Sparsifier observes those shortly before scheduled updates"
            )
        return total

    def _total(self, layer: ReadingLayer) -> Tensor | None:
        """Return the sum over all ranks; None where no rank has observed an input."""
        seen = self._sums.get(id(layer.weight))
        if not has_others():
            return seen
        size, weight = layer.features + (layer.bias is not None), layer.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        own = torch.zeros(size, size, dtype=dtype, device=weight.device) if seen is None else seen
        total = summed(own)
        return total if total.any() else None

    def totals(self) -> dict[str, Tensor]:
        """Return the matrices by name of the weight, for a checkpoint; all ranks must call it.

        With several ranks, rank 0 continues from these totals and the others from zero, as in a run that is resumed.
        """
        found = {layer.name: self._total(layer) for layer in self.layers}
        kept = {name: total for name, total in found.items() if total is not None}
        if has_others():
            self.load(kept)
        return {name: total.clone() for name, total in kept.items()}

    def load(self, totals: Mapping[str, Tensor]) -> None:
        """Continue from the result of `totals`; all ranks must pass the same."""
        counts = not has_others() or torch.distributed.get_rank() == 0
        named = {layer.name: layer for layer in self.layers if layer.name in totals and counts}
        self._sums = {id(layer.weight): totals[n].to(layer.weight.device).clone() for n, layer in named.items()}

    def is_finite(self) -> bool:
        """Whether all that this process has observed is finite."""
        return bool(all_finite(self._sums.values()))

    def reset(self) -> None:
        """Set all matrices to zero observations, and continue to observe."""
        self._sums, self.is_ended = {}, False

    def end(self) -> None:
        """Let the next input start new matrices; these stay until then."""
        self.is_ended = True

    def close(self) -> None:
        """Remove the hooks."""
        if self._handles:
            recompile()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
