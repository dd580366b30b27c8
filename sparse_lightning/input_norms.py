"""InputNorms: how large the inputs are that each weight multiplies, collected by forward hooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparse_lightning.errors import FlowError


class InputNorms(Mapping[Tensor, Tensor]):
    """For each weight of a linear or convolutional layer the 2-norm of its input feature over all that was seen.

    Maps a weight parameter to a tensor that expands to its shape: `(1, in)` for a linear layer; for a
    convolution the norm of the input channel over all positions, `(out, in, 1, …)`. Between processes the sums
    of squares are added up when a norm is read, so that all ranks see the same.

    Args:
        module: the model; every `nn.Linear` and `nn.Conv*d` in it is watched until `close`.

    Example:
        >>> layer = nn.Linear(2, 3)
        >>> norms = InputNorms(layer)
        >>> _ = layer(torch.tensor([[3.0, 1.0], [4.0, 0.0]]))
        >>> norms[layer.weight]
        tensor([[5., 1.]])
        >>> norms.close()
    """

    def __init__(self, module: nn.Module) -> None:
        self._squares: dict[Tensor, Tensor] = {}
        kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
        layers = [layer for layer in module.modules() if isinstance(layer, kinds)]
        self._watched = {layer.weight: layer for layer in layers}
        self._handles = [layer.register_forward_pre_hook(self._collect, with_kwargs=True) for layer in layers]

    @property
    def watched(self) -> list[Tensor]:
        """The weights whose inputs are seen, whether or not a forward pass has been."""
        return list(self._watched)

    def _collect(self, layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        x = (inputs[0] if inputs else named["input"]).detach()
        x = x.float() if x.element_size() < 4 else x
        feature = x.ndim - 1 if isinstance(layer, nn.Linear) else x.ndim - (layer.weight.ndim - 1)  # type: ignore[operator]
        squares = x.square().sum([d for d in range(x.ndim) if d != feature])
        weight: Any = layer.weight
        seen = self._squares.get(weight)
        self._squares[weight] = squares if seen is None else seen + squares

    def __getitem__(self, weight: Tensor) -> Tensor:
        squares = self._squares[weight].clone()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(squares)
        return _spread(self._watched[weight], squares.sqrt())

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._squares)

    def __len__(self) -> int:
        return len(self._squares)

    def __contains__(self, weight: object) -> bool:
        return weight in self._squares

    def reset(self) -> None:
        """Forget what was seen, and go on watching."""
        self._squares.clear()

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _spread(layer: nn.Module, norms: Tensor) -> Tensor:
    """The norm of each input feature, where the weight of a layer meets it."""
    if isinstance(layer, nn.Linear):
        return norms.unsqueeze(0)
    if not isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        raise FlowError(f"no rule for where a {type(layer).__name__} meets its inputs")
    out, inner = layer.weight.shape[:2]
    by_group = norms.view(layer.groups, 1, inner).expand(layer.groups, out // layer.groups, inner)
    return by_group.reshape(out, inner, *(1,) * (layer.weight.ndim - 2))
