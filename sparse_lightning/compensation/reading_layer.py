"""ReadingLayer: a layer as a matrix of outputs × inputs, and its inputs as rows of numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from sparse_lightning.blocks.shards import held, is_sharded, local_part
from sparse_lightning.errors import PatternError


@dataclass(frozen=True)
class ReadingLayer:
    """A linear layer or a convolution whose outputs are linear in its inputs.

    Args:
        module: `nn.Linear`, Hugging Face's `Conv1D`, or an `nn.Conv2d` without groups.
        name: of its weight.
        weight: its weight, as patterns find it; in a forward pass it may be another tensor.
        bias: its bias, which reads a constant input of one; None without one.
    """

    module: nn.Module
    name: str
    weight: Tensor
    bias: Tensor | None

    @property
    def is_transposed(self) -> bool:
        """Whether the weight has its inputs first."""
        return is_transposed(self.module)

    @property
    def features(self) -> int:
        """The number of inputs of an output, without the constant."""
        return self.weight.shape[0] if self.is_transposed else self.weight.shape[1:].numel()

    def matrix(self, values: Tensor) -> Tensor:
        """Return a tensor of the shape of the weight, or of some of its outputs, as `(outputs, inputs)`."""
        return values.T if self.is_transposed else values.flatten(1)

    def inputs(self, x: Tensor) -> Tensor:
        """Return an input of the layer as `(rows, inputs)`, in fp32 or wider; with a constant one if it has a bias."""
        if isinstance(self.module, nn.Conv2d):
            sizes = (self.module.kernel_size, self.module.dilation, _padding(self.module), self.module.stride)
            x = unfold(x if x.ndim == 4 else x.unsqueeze(0), *sizes).transpose(1, 2)
        rows = x.reshape(-1, self.features)
        rows = rows if rows.element_size() >= 4 else rows.float()
        return rows if self.bias is None else torch.cat([rows, rows.new_ones(len(rows), 1)], 1)

    def outputs(self) -> slice:
        """Return the outputs whose weights this process holds.

        Raises:
            PatternError: if it does not hold all inputs of them.
        """
        sizes, box = self.weight.shape, local_part(self.weight)[1]
        own, *others = box[::-1] if self.is_transposed else box
        _, *wanted = sizes[::-1] if self.is_transposed else sizes
        if [stop - start for start, stop in others] != wanted:
            raise PatternError(
                f"{self.name} is sharded along its inputs, and compensation solves for whole rows: shard it along its "
                "outputs, as FSDP2 does, or prune before tensor parallelism"
            )
        if self.bias is not None and local_part(self.bias)[1][0] != own:
            raise PatternError(f"the shards of {self.name} and of its bias have different rows: shard them alike")
        return slice(*own)

    def rows(self) -> Tensor:
        """Return a copy of the weights that this process holds, in fp64; the bias is the last column."""
        matrix = self.matrix(held(self.weight)).double()
        return matrix if self.bias is None else torch.cat([matrix, held(self.bias).double()[:, None]], 1)

    def set_rows(self, chosen: Tensor, rows: Tensor) -> None:
        """Write some of the rows, in the form that `rows` returns.

        Args:
            chosen: which rows, of those that this process holds.
            rows: all rows.
        """
        local, values = held(self.weight), rows[chosen, : self.features].to(self.weight.dtype)
        if self.is_transposed:
            local[:, chosen] = values.T
        else:
            local[chosen] = values.view(-1, *local.shape[1:])
        if self.bias is not None:
            held(self.bias)[chosen] = rows[chosen, -1].to(self.bias.dtype)

    def whole(self) -> Tensor:
        """Return the weight as `(outputs, inputs)`, gathered if it is sharded; all ranks must call it."""
        placed: Any = self.weight.detach()
        return self.matrix(placed.full_tensor() if is_sharded(self.weight) else placed)


def reading_layers(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> list[ReadingLayer]:
    """Return the layers of named weights.

    Raises:
        PatternError: for a weight that is not that of a layer whose inputs can be observed.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
        >>> [layer] = reading_layers(net, [("0.weight", net[0].weight)])
        >>> layer.features, layer.inputs(torch.zeros(2, 5, 4)).shape  # the bias reads a constant
        (4, torch.Size([10, 5]))
    """
    owners = {id(m.weight): m for m in model.modules() if _is_linear(m)}
    found = []
    for name, weight in weights:
        module = owners.get(id(weight))
        if module is None:
            raise PatternError(
                f"{name} of shape {tuple(weight.shape)} is not the weight of a linear layer or of a Conv2d without "
                "groups, or belongs to nn.MultiheadAttention, which reads it without calling its layer. So its inputs "
                "are not observed: exclude it from the patterns, or prune without compensation"
            )
        bias: Any = getattr(module, "bias", None)
        found.append(ReadingLayer(module, name, weight, bias))
    return found


def _is_linear(module: nn.Module) -> bool:
    if isinstance(module, nn.Conv2d):
        return module.groups == 1 and module.padding_mode == "zeros" and module.padding != "same"
    # nn.MultiheadAttention reads the weight of its own layer without calling it.
    is_called = isinstance(module, nn.Linear) and not isinstance(module, NonDynamicallyQuantizableLinear)
    return is_called or is_transposed(module)


def is_transposed(module: nn.Module | None) -> bool:
    """Whether a module has the inputs of its weight first, as Hugging Face's Conv1D."""
    return type(module).__name__ == "Conv1D"


def _padding(module: nn.Conv2d) -> tuple[int, ...] | int:
    return 0 if isinstance(module.padding, str) else module.padding
