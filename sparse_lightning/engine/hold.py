"""Hold: the blocks of all parameters of a device, zeroed where they are pruned by one call.

Where blocks lie is put into a table when scopes are attached, and again where a parameter gets other strides. A call
passes the addresses of the parameters and the masks: neither a step nor an update does more than that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_lightning.blocks.shards import is_sharded, local_like
from sparse_lightning.blocks.spec import BlockSpec
from sparse_lightning.compat.torch import local_tensors
from sparse_lightning.engine.masked_scope import MaskedScope
from sparse_lightning.kernels.block_fill import BlockFill
from sparse_lightning.kernels.watch import are_same, watch
from sparse_lightning.layout import Layout
from sparse_lightning.layout.crossing import phases
from sparse_lightning.layout.permutation import inverse

Placed = tuple[BlockSpec, Layout]
"""A spec, and where the values of its grid are in the flat mask."""


class Hold:
    """The blocks of some scopes.

    Args:
        scopes: the scopes.
        layout: where the grid of a block, given by name, is in the flat mask.
    """

    def __init__(self, scopes: Sequence[MaskedScope], layout: Callable[[str], Layout]) -> None:
        named = [(layout(name), block) for scope in scopes for name, block in scope.live_blocks.items()]
        self._placed: list[Placed] = [
            (spec, grid.permute(inverse(block.order_of(spec)))) for grid, block in named for spec in block.blocks()
        ]
        self._parts = self._by_device()

    def _by_device(self) -> list[_DeviceHold]:
        devices: dict[tuple[torch.device, bool], list[Placed]] = {}
        for spec, mask in self._placed:
            devices.setdefault((spec.param.device, is_sharded(spec.param)), []).append((spec, mask))
        return [_DeviceHold(device, placed) for (device, _), placed in devices.items()]

    def fill(self, mask: Tensor) -> None:
        """Zero the blocks of the weights where the flat mask is True, wherever the weights are now."""
        self._follow()
        for part in self._parts:
            part.fill(mask)

    def _follow(self) -> None:
        """Make new tables where a parameter has another device, dtype or strides than at the last call."""
        if any(part.has_changed() for part in self._parts):
            self._parts = self._by_device()

    def fill_in(self, tensors: Mapping[int, Tensor], mask: Tensor) -> None:
        """Zero the blocks of another tensor for each parameter: its gradient, its optimizer state, a copy.

        Args:
            tensors: by the id of the parameter; those that are missing are passed over.
            mask: flat.
        """
        self._follow()
        for part in self._parts:
            part.fill_in([tensors.get(id(param)) for param in part.params], mask)

    def parameters(self) -> list[Tensor]:
        """Return all parameters, each once."""
        return [param for part in self._parts for param in part.params]


class _DeviceHold:
    """The blocks on one device."""

    def __init__(self, device: torch.device, placed: Sequence[Placed]) -> None:
        self._device, self._placed = device, list(placed)
        self.params = list({id(spec.param): spec.param for spec, _ in placed}.values())
        self._is_sharded = is_sharded(self.params[0])
        self._place = {id(param): i for i, param in enumerate(self.params)}
        self._masks = torch.empty(0), torch.empty(0)
        windows = [
            window._replace(phase=phase)
            for (spec, mask), phase in zip(self._placed, _phases(self._placed), strict=True)
            for window in spec.part().fill_windows(self._place[id(spec.param)], mask)
        ]
        tensors = self._tensors()
        self._watch = watch(tensors)
        self._shapes = _shapes(tensors)
        # Two tables: each caches what it was last called with, and weights are filled at every step.
        self._weights, self._others = (BlockFill(windows, tensors) for _ in range(2))

    def _tensors(self) -> list[Tensor]:
        """Return the live local part of each parameter."""
        return local_tensors(self.params) if self._is_sharded else self.params

    def has_changed(self) -> bool:
        """Whether the tables do not fit the parameters any more; that parameters have moved in memory is noted."""
        if self._is_sharded:
            tensors = self._tensors()
            if not are_same(tensors, self._watch.tensors):
                self._watch = watch(tensors)
                return _shapes(tensors) != self._shapes
        return not self._watch.look()

    def fill(self, mask: Tensor) -> None:
        """Fill the weights."""
        self._weights.fill_watched(self._watch, self._here(mask))

    def fill_in(self, tensors: Sequence[Tensor | None], mask: Tensor) -> None:
        """Fill tensors with the strides of their parameter by one call, and others one by one."""
        local = list(tensors)
        if self._is_sharded:
            pairs = zip(self.params, tensors, strict=True)
            local = [None if tensor is None else local_like(tensor, param) for param, tensor in pairs]
        like = zip(local, self._shapes, strict=True)
        alike = [
            t if t is not None and (t.shape, t.stride(), t.itemsize, t.device) == place else None for t, place in like
        ]
        mask = self._here(mask)
        self._others.fill_some(alike, mask)
        unlike = [tensor if own is None else None for tensor, own in zip(tensors, alike, strict=True)]
        for spec, layout in self._placed if any(tensor is not None for tensor in unlike) else []:
            tensor = unlike[self._place[id(spec.param)]]
            if tensor is not None:
                spec.apply_mask(layout.on(mask), values=tensor)

    def _here(self, mask: Tensor) -> Tensor:
        """Return the mask on this device; copied once while it stays the same."""
        if mask.device == self._device:
            return mask
        if self._masks[0] is not mask:
            self._masks = mask, mask.to(self._device)
        return self._masks[1]


def _shapes(tensors: Iterable[Tensor]) -> list[tuple[Any, ...]]:
    return [(tensor.shape, tensor.stride(), tensor.itemsize, tensor.device) for tensor in tensors]


def _phases(placed: Sequence[Placed]) -> list[int]:
    """Return a number for each spec such that those of one parameter with the same number share no weight."""
    found = [0] * len(placed)
    places: dict[int, list[int]] = {}
    for i, (spec, _) in enumerate(placed):
        places.setdefault(id(spec.param), []).append(i)
    for listed in places.values():
        for i, phase in zip(listed, phases([placed[i][0].view.layout for i in listed]), strict=True):
            found[i] = phase
    return found
