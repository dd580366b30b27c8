"""InputNorms: how large the inputs are that each weight multiplies, collected by forward hooks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparse_lightning.distributed import has_others, is_sharded, summed
from sparse_lightning.errors import FlowError


class InputNorms(Mapping[Tensor, Tensor]):
    """For each weight of a linear or convolutional layer the 2-norm of its input feature over all that was seen.

    Maps a weight parameter to a tensor that expands to its shape: `(1, in)` for a linear layer; for a
    convolution the norm of the input channel over all positions, `(out, in, 1, …)`. A bias multiplies ones, as many
    as there were positions: `(1,)`. Between processes the sums
    of squares are added up when a norm is read, so that all ranks see the same: all of them read the same norms in
    the same order, whether or not their own data came by. `in`, `len` and `iter` tell what this process has seen.
    The processes of a tensor-parallel group see the same data, which counts once.

    Args:
        module: the model; every `nn.Linear` and `nn.Conv*d` in it is watched until `close`.
        weights: only these weights and biases; None means all.

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
        """The sums of squares that this process has seen, by parameter; where inputs come in shards, theirs too."""
        self._before: dict[Tensor, Tensor] = {}
        self._copies = 1
        kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
        wanted = None if weights is None else {id(weight) for weight in weights}
        layers = [layer for layer in module.modules() if isinstance(layer, kinds)]
        # In a forward pass a sharded layer shows its gathered weight, which is another tensor.
        self._own: dict[nn.Module, list[Tensor]] = {
            layer: [p for p in (layer.weight, layer.bias) if p is not None and (wanted is None or id(p) in wanted)]
            for layer in layers
        }
        self._watched = {param: layer for layer, params in self._own.items() for param in params}
        watched = [layer for layer, params in self._own.items() if params]
        self._handles = [layer.register_forward_pre_hook(self._collect, with_kwargs=True) for layer in watched]

    @property
    def watched(self) -> list[Tensor]:
        """The parameters whose inputs are seen, whether or not a forward pass has been."""
        return list(self._watched)

    def _collect(self, layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        x = (inputs[0] if inputs else named["input"]).detach()
        x = x.float() if x.element_size() < 4 else x
        feature = x.ndim - 1 if isinstance(layer, nn.Linear) else x.ndim - (layer.weight.ndim - 1)  # type: ignore[operator]
        squares = x.square().sum([d for d in range(x.ndim) if d != feature])
        if is_sharded(x):
            self._copies = max(self._copies, x.device_mesh.size())
        ones = torch.full((1,), x.numel() // max(1, x.shape[feature]), dtype=squares.dtype, device=squares.device)
        for param in self._own[layer]:
            found = ones if param.ndim == 1 else squares
            seen = self.squares.get(param)
            self.squares[param] = found if seen is None else seen + found

    def __getitem__(self, weight: Tensor) -> Tensor:
        squares = self._total(weight)
        if squares is None:
            raise KeyError(weight)
        return squares.sqrt() if weight.ndim == 1 else _spread(self._watched[weight], squares.sqrt())

    def total_squares(self) -> dict[Tensor, Tensor]:
        """The sums of squares over all ranks, by weight; all ranks must ask."""
        totals = {param: self._total(param) for param in self._watched}
        return {param: total for param, total in totals.items() if total is not None}

    def _total(self, param: Tensor) -> Tensor | None:
        layer: Any = self._watched[param]
        features = 1 if param.ndim == 1 else layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
        total, before = _over_ranks(_whole(self.squares.get(param)), features, param), self._before.get(param)
        total = total if total is None or self._copies == 1 else total / self._copies
        return total if before is None else before if total is None else before + total

    def take_up(self, totals: Mapping[Tensor, Tensor]) -> None:
        """Go on from the sums of squares over all ranks of another run, the same on each of them."""
        self.squares, self._before = {}, dict(totals)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.squares)

    def __len__(self) -> int:
        return len(self.squares)

    def __contains__(self, weight: object) -> bool:
        return weight in self.squares

    def reset(self) -> None:
        """Forget what was seen, and go on watching."""
        self.squares, self._before = {}, {}

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


def _whole(squares: Tensor | None) -> Tensor | None:
    """Shards are brought together here, when norms are read: in a forward pass nothing is to travel."""
    placed: Any = squares
    return placed.full_tensor() if squares is not None and is_sharded(squares) else squares


def _over_ranks(squares: Tensor | None, features: int, param: Tensor) -> Tensor | None:
    """The sum over all ranks; a rank whose data did not come by adds nothing, and None comes where it was all."""
    if not has_others():
        return squares
    total = torch.zeros(features + 1, dtype=torch.promote_types(param.dtype, torch.float32), device=param.device)
    if squares is not None:
        total[:-1], total[-1] = squares, 1
    total = summed(total)
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
