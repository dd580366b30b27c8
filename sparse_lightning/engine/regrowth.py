"""Growth of coupled units: a neuron or head that grows restarts where gradients can flow.

A pruned unit is zero in all of its parameters, so that all of its gradients are zero, and it would stay zero for ever.
When it grows, the weights that read it stay zero, so that the output does not change, and the others are drawn anew.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sparse_lightning.blocks.shards import is_sharded
from sparse_lightning.blocks.spec import BlockSpec
from sparse_lightning.blocks.union import crosses
from sparse_lightning.compat.torch import local_shape_and_offset
from sparse_lightning.engine.masked_scope import MaskedScope
from sparse_lightning.errors import PatternError
from sparse_lightning.methods import Method


def check_can_grow(method: Method, scopes: Iterable[MaskedScope]) -> None:
    """Raise a PatternError if a method lets units grow whose next layer is not coupled to them.

    Such a unit could only restart with an output of zero, where activations such as ReLU have no gradient.
    """
    growing = list(scopes) if method.growth is not None else []
    _check_apart(method, growing)
    for scope in growing:
        for block in scope.blocks.values():
            if len(block.blocks()) > 1 and all(spec.param.ndim < 2 for spec in block.readers()):
                names = ", ".join(dict.fromkeys(str(spec.name) for spec in block.blocks()))
                raise PatternError(
                    f"{type(method).__name__} cannot grow the units of {scope.name} again: all weights that compute "
                    f"them are pruned together ({names}), and no layer that reads them, so that a grown unit would "
                    "have no gradient. Couple the layer that reads them, as into= of Filters does; "
                    "or use Gradual"
                )


def _check_apart(method: Method, scopes: Iterable[MaskedScope]) -> None:
    """Raise a PatternError if units cross: a unit could grow only where the units that it crosses are kept."""
    found: dict[int, list[tuple[MaskedScope, BlockSpec]]] = {}
    for scope in scopes:
        for spec in [spec for block in scope.blocks.values() for spec in block.blocks()]:
            found.setdefault(id(spec.param), []).append((scope, spec))
    for listed in found.values():
        if crosses(spec for _, spec in listed):
            names = " and ".join(dict.fromkeys(scope.name for scope, _ in listed))
            raise PatternError(
                f"{type(method).__name__} cannot grow units that cross: {names} share weights of {listed[0][1].name}, "
                "and a unit that grows would stay zero where the others are pruned. Exclude one of them, or use Gradual"
            )


def restart_at_random(spec: BlockSpec, grown: Tensor, kept: Tensor, seed: int, step: int) -> None:
    """Draw the weights of grown blocks, at the root mean square of those that are kept; all ranks must call it.

    Args:
        spec: blocks of one parameter that compute units.
        grown: which of them have grown, a grid of the spec.
        kept: which of them were kept before and are kept now; without any, a weight gets the variance 1 / fan-in.
        seed: of the engine; with the step and the name of the parameter, it makes the numbers reproducible.
        step: the optimizer step.
    """
    count = int(kept.sum()) * spec.numel_per_block()
    squares = spec.norms().double().square().masked_fill(~kept.to(spec.param.device), 0).sum()
    rms = math.sqrt(float(squares) / count) if count else 0.0
    drawn = _placed(_noise(spec, seed, step) * (rms or spec.numel_per_block() ** -0.5), spec.param)
    for where, (weight, start) in spec.part(None, [drawn]).chosen(grown):
        weight[where] = start[where]


def _noise(spec: BlockSpec, seed: int, step: int) -> Tensor:
    """Return normal numbers for a whole parameter: the same on every rank, however it is sharded."""
    digest = hashlib.sha256(f"{seed}/{step}/{spec.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randn(tuple(spec.param.shape), generator=generator)


def _placed(values: Tensor, param: Tensor) -> Tensor:
    """Return values as a parameter is: its dtype, its device, its shard."""
    if not is_sharded(param):
        return values.to(param.device, param.dtype)
    assert isinstance(param, DTensor)
    shape, offset = local_shape_and_offset(tuple(param.shape), param.device_mesh, param.placements)
    local = values[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
    mine = local.to(param.device, param.dtype).contiguous()
    mesh, placements = param.device_mesh, param.placements
    return DTensor.from_local(mine, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())


def with_random_ties(
    growth: Mapping[str, Tensor], scopes: Iterable[MaskedScope], seed: int, step: int
) -> dict[str, Tensor]:
    """Return growth scores in which coupled units without a gradient are in random order, below all that have one.

    Their gradients are zero because the units are, so that RigL would grow the first ones again and again.
    """
    made = dict(growth)
    for scope in scopes:
        scores = made.get(scope.name)
        if scores is not None and any(block.readers() for block in scope.blocks.values()) and not (scores < 0).any():
            digest = hashlib.sha256(f"{seed}/{step}/{scope.name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            order = torch.rand(scores.shape, generator=generator).to(scores) - 1
            made[scope.name] = torch.where(scores == 0, order, scores)
    return made
