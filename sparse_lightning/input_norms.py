"""InputNorms: how large the inputs are that each weight multiplies, collected by forward hooks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparse_lightning.errors import FlowError


class InputNorms(Mapping[Tensor, Tensor]):
    """For each weight of a linear or convolutional layer the 2-norm of its input feature over all that was seen.

    Maps a weight parameter to a tensor that expands to its shape: `(1, in)` for a linear layer; for a
    convolution the norm of the input channel over all positions, `(out, in, 1, …)`. Between processes the sums
    of squares are added up when a norm is read, so that all ranks see the same: all of them read the same norms in
    the same order, whether or not their own data came by. `in`, `len` and `iter` tell what this process has seen.

    Args:
        module: the model; every `nn.Linear` and `nn.Conv*d` in it is watched until `close`.
        weights: only the layers that own one of these; None means all.

    Example:
        >>> layer = nn.Linear(2, 3)
        >>> norms = InputNorms(layer)
        >>> _ = layer(torch.tensor([[3.0, 1.0], [4.0, 0.0]]))
        >>> norms[layer.weight]
        tensor([[5., 1.]])
        >>> norms.close()
    """

    def __init__(self, module: nn.Module, weights: Iterable[Tensor] | None = None) -> None:
        self.squares: dict[Tensor, Tensor] = {}
        """The sums of squares that this process has seen, by weight."""
        kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
        wanted = None if weights is None else {id(weight) for weight in weights}
        layers = [layer for layer in module.modules() if isinstance(layer, kinds)]
        layers = [layer for layer in layers if wanted is None or id(layer.weight) in wanted]
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
        seen = self.squares.get(weight)
        self.squares[weight] = squares if seen is None else seen + squares

    def __getitem__(self, weight: Tensor) -> Tensor:
        layer, squares = self._watched[weight], self.squares.get(weight)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            squares = _over_ranks(layer, squares)
        if squares is None:
            raise KeyError(weight)
        return _spread(layer, squares.sqrt())

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.squares)

    def __len__(self) -> int:
        return len(self.squares)

    def __contains__(self, weight: object) -> bool:
        return weight in self.squares

    def reset(self) -> None:
        """Forget what was seen, and go on watching."""
        self.squares.clear()

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class TrainingInputNorms(InputNorms):
    """InputNorms that see only what a layer is trained on: not what it is evaluated on in between."""

    def _collect(self, layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if layer.training:
            super()._collect(layer, inputs, named)


def _over_ranks(layer: nn.Module, squares: Tensor | None) -> Tensor | None:
    """The sum over all ranks; a rank whose data did not come by adds nothing, and None comes where it was all."""
    weight: Any = layer.weight
    features: Any = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
    total = torch.zeros(features + 1, dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device)
    if squares is not None:
        total[:-1], total[-1] = squares, 1
    torch.distributed.all_reduce(total)
    return total[:-1] if total[-1] else None


def _spread(layer: nn.Module, norms: Tensor) -> Tensor:
    """The norm of each input feature, where the weight of a layer meets it."""
    if isinstance(layer, nn.Linear):
        return norms.unsqueeze(0)
    if not isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        raise FlowError(f"no rule for where a {type(layer).__name__} meets its inputs")
    out, inner = layer.weight.shape[:2]
    by_group = norms.view(layer.groups, 1, inner).expand(layer.groups, out // layer.groups, inner)
    return by_group.reshape(out, inner, *(1,) * (layer.weight.ndim - 2))
