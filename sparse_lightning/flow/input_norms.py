"""InputNorms: the norms of layer inputs, collected by forward hooks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparse_lightning.blocks.shards import has_others, held, is_sharded, summed
from sparse_lightning.compat.own_hook import OwnHook
from sparse_lightning.compat.torch import recompile
from sparse_lightning.flow.finite import all_finite

Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
"""The layers whose inputs can be observed."""


class InputNorms(Mapping[Tensor, Tensor]):
    """The 2-norms of the input features of linear and convolutional layers, over all observed forward passes.

    Maps a weight to a tensor that expands to its shape: `(1, in)` for a linear layer; for a convolution the norm of
    the input channel over all positions, `(out, in, 1, …)`. The input of a bias is one at every position: `(1,)`.

    With several processes, reading a norm sums the squares over all ranks. All ranks must read the same norms in the
    same order, even if a layer has had no input on this rank. `in`, `len` and `iter` refer to the inputs of this
    process only. The processes of a tensor-parallel group have the same data, which is counted once.

    Args:
        module: the model; the inputs of every `nn.Linear` and `nn.Conv*d` in it are observed until `close`.
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
        """The sums of squares of this process, by parameter; sharded if the inputs are sharded."""
        self._before: dict[Tensor, Tensor] = {}
        self.is_ended = False
        """Whether the next input starts anew."""
        self._copies = 1
        wanted = None if weights is None else {id(weight) for weight in weights}
        layers = [layer for layer in module.modules() if isinstance(layer, Layer)]
        # Looked up now: in a forward pass, the weight of a sharded layer is the gathered one, which is another tensor.
        self._own: dict[nn.Module, list[Tensor]] = {
            layer: [p for p in (layer.weight, layer.bias) if p is not None and (wanted is None or id(p) in wanted)]
            for layer in layers
        }
        self._watched = {param: layer for layer in layers for param in self._own[layer]}
        watched = [layer for layer in layers if self._own[layer]]
        self._handles = [layer.register_forward_pre_hook(OwnHook(self._collect), with_kwargs=True) for layer in watched]

    @property
    def watched(self) -> list[Tensor]:
        """The parameters whose inputs are observed, whether or not there has been a forward pass."""
        return list(self._watched)

    def _collect(self, layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self.is_ended:
            self.reset()
        x = (inputs[0] if inputs else named["input"]).detach()
        x = x.float() if x.element_size() < 4 else x
        feature = x.ndim - 1 if isinstance(layer, nn.Linear) else x.ndim - (layer.weight.ndim - 1)  # type: ignore[operator]
        squares = x.square().sum([d for d in range(x.ndim) if d != feature])
        if is_sharded(x):
            self._copies = max(self._copies, x.device_mesh.size())
        for param in self._own[layer]:
            found = squares if param.ndim > 1 else _ones(x.numel() // max(1, x.shape[feature]), squares)
            seen = self.squares.get(param)
            self.squares[param] = found if seen is None else seen + found

    def __getitem__(self, weight: Tensor) -> Tensor:
        squares = self._total(weight)
        if squares is None:
            raise KeyError(weight)
        return squares.sqrt() if weight.ndim == 1 else _spread(self._watched[weight], squares.sqrt())

    def total_squares(self) -> dict[Tensor, Tensor]:
        """Return the sums of squares over all ranks, by weight. All ranks must call it.

        With several ranks, the sums go on from this total, as those of a run that is resumed from it do: sums of
        floating-point numbers depend on their order.
        """
        totals = {param: self._total(param) for param in self._watched}
        found = {param: total for param, total in totals.items() if total is not None}
        if has_others():
            self.load_squares(found)
        return found

    def _total(self, param: Tensor) -> Tensor | None:
        layer = self._watched[param]
        features = 1 if param.ndim == 1 else layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
        total, before = _over_ranks(_whole(self.squares.get(param)), features, param), self._before.get(param)
        total = total if total is None or self._copies == 1 else total / self._copies
        return total if before is None else before if total is None else before + total

    def load_squares(self, totals: Mapping[Tensor, Tensor]) -> None:
        """Resume from the result of `total_squares`. All ranks must pass the same."""
        self.squares, self._before = ({}, dict(totals)) if has_others() else (dict(totals), {})

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.squares)

    def __len__(self) -> int:
        return len(self.squares)

    def __contains__(self, weight: object) -> bool:
        return weight in self.squares

    def is_finite(self) -> bool:
        """Whether all that this process has observed is finite."""
        return bool(all_finite(map(held, (*self.squares.values(), *self._before.values()))))

    def reset(self) -> None:
        """Set all norms to zero observations, and continue to observe."""
        self.squares, self._before, self.is_ended = {}, {}, False

    def end(self) -> None:
        """Let the next input start new norms; these stay until then."""
        self.is_ended = True

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class TrainingInputNorms(InputNorms):
    """InputNorms of forward passes that train: those without gradients, as in validation, are ignored.

    While `is_observing` is False, only the first one of each layer after a reset is observed, so that no layer is
    without norms that is in use. Compiled code observes all of them: it would be compiled again for each change.

    The mode of the layers does not matter: models that `from_pretrained` returns are trained in evaluation mode too.
    Code that `torch.compile` has made before would not call the hooks, and later not stop to call them: it is
    compiled again.
    """

    def __init__(self, module: nn.Module, weights: Iterable[Tensor] | None = None) -> None:
        super().__init__(module, weights)
        self.is_observing = True
        """Whether all forward passes are observed now."""
        recompile()

    def _collect(self, layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        if torch.compiler.is_compiling() or self.is_observing or not self._has_seen(layer):
            super()._collect(layer, inputs, named)

    def _has_seen(self, layer: nn.Module) -> bool:
        """Whether the inputs of a layer were observed since the last reset, on any rank before a checkpoint."""
        return not self.is_ended and all(param in self.squares or param in self._before for param in self._own[layer])

    def close(self) -> None:
        """Remove the hooks."""
        if self._handles:
            recompile()
        super().close()


def _ones(number: int, like: Tensor) -> Tensor:
    """Return the sum of squares of the input of a bias."""
    return torch.full((1,), number, dtype=like.dtype, device=like.device)


def _whole(squares: Tensor | None) -> Tensor | None:
    """Gather shards. It is done when norms are read, so that a forward pass needs no communication."""
    placed: Any = squares
    return placed.full_tensor() if squares is not None and is_sharded(squares) else squares


def _over_ranks(squares: Tensor | None, features: int, param: Tensor) -> Tensor | None:
    """Return the sum over all ranks, None if no rank has observed an input. A rank without input adds nothing."""
    if not has_others():
        return squares
    total = torch.zeros(features + 1, dtype=torch.promote_types(param.dtype, torch.float32), device=param.device)
    if squares is not None:
        total[:-1], total[-1] = squares, 1
    total = summed(total)
    return total[:-1] if total[-1] else None


def _spread(layer: Layer, norms: Tensor) -> Tensor:
    """Return the norms of the input features in a shape that expands to that of the weight."""
    if isinstance(layer, nn.Linear):
        return norms.unsqueeze(0)
    out, inner = layer.weight.shape[:2]
    by_group = norms.view(layer.groups, 1, inner).expand(layer.groups, out // layer.groups, inner)
    return by_group.reshape(out, inner, *(1,) * (layer.weight.ndim - 2))
