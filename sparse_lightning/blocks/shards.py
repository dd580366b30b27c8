"""Shards: the box of a parameter that this process holds, and reductions of grids over processes.

The placements of a DTensor determine the box. A plain tensor is the case of one box. Only grids are communicated, with
one number for each block: partial grids are all-reduced over the mesh dimensions that shard the parameter. Weights are
never gathered.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from sparse_lightning.compat.torch import local_shape_and_offset
from sparse_lightning.errors import LayoutError
from sparse_lightning.kernels.stage import FoldKind
from sparse_lightning.layout.regions import Box, whole

Part = tuple[Tensor, FoldKind, Tensor]
"""A partial grid of one process, the kind of its fold, and its parameter."""

BUCKET = 2**20
"""About how many numbers of grids are communicated at once."""

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor; the module of DTensor is not imported for that."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def held(tensor: Tensor) -> Tensor:
    """Return the local part of a tensor, live."""
    placed: Any = tensor
    # In this order no DTensor is created in between.
    return (placed.to_local() if is_sharded(tensor) else tensor).detach()


def local_part(tensor: Tensor) -> tuple[Tensor, Box]:
    """Return the local part of a tensor, live, and its box: start and stop along each dimension.

    Example:
        >>> local_part(torch.zeros(2, 3))[1]
        ((0, 2), (0, 3))
    """
    if not is_sharded(tensor):
        return tensor.detach(), whole(tensor.shape)
    placed: Any = tensor
    if any(placement.is_partial() for placement in placed.placements):
        raise LayoutError(
            f"a parameter of shape {tuple(tensor.shape)} has the placements {placed.placements}: a Partial placement "
            "has no weights to prune. Use Shard and Replicate"
        )
    mesh = placed.device_mesh
    return held(tensor), _box(tuple(placed.shape), mesh, placed.placements, tuple(mesh.get_coordinate()))


@lru_cache(maxsize=4096)
def _box(shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...], coordinate: tuple[int, ...]) -> Box:
    """Return the box of a tensor on this process; its coordinate in the mesh is part of the cache key."""
    sizes, offset = local_shape_and_offset(shape, mesh, placements)
    return tuple((o, o + n) for o, n in zip(offset, sizes, strict=True))


def local_like(tensor: Tensor, param: Tensor) -> Tensor:
    """Return the part of a tensor of a parameter's shape that matches the local part of the parameter."""
    if is_sharded(tensor) and is_sharded(param):
        given, wanted = cast(Any, tensor), cast(Any, param).placements
        return held(given if given.placements == wanted else given.redistribute(placements=wanted))
    if not is_sharded(param):
        return held(tensor)
    return tensor.detach()[tuple(slice(lo, hi) for lo, hi in local_part(param)[1])]


def complete(parts: Sequence[Part]) -> list[Tensor]:
    """All-reduce partial grids over the mesh dimensions that shard their parameters; return the complete grids.

    Grids that are reduced in the same way are communicated together, about `BUCKET` numbers at once.
    """
    done = [grid for grid, _, _ in parts]
    for (mesh, dims, kind), members in _buckets(parts):
        wire = torch.cat([done[i].reshape(-1) for i in members])
        for dim in dims:
            dist.all_reduce(wire, _OPERATIONS[kind], group=mesh.get_group(dim))
        for i, values in zip(members, torch.split(wire, [done[i].numel() for i in members]), strict=True):
            done[i] = values.view(done[i].shape)
    return done


def _buckets(parts: Sequence[Part]) -> Iterator[tuple[tuple[Any, tuple[int, ...], FoldKind], list[int]]]:
    """Yield the indices of grids that are communicated together: same mesh, dimensions, fold and dtype."""
    found: dict[Any, list[int]] = {}
    for i, (grid, kind, param) in enumerate(parts):
        dims = sharding_dims(param)
        if dims:
            found.setdefault((cast(Any, param).device_mesh, dims, kind, grid.dtype), []).append(i)
    for (mesh, dims, kind, _), members in found.items():
        sizes = [parts[i][0].numel() for i in members]
        begun = [total // BUCKET for total in accumulate(sizes)]
        for _, run in groupby(zip(begun, members, strict=True), key=itemgetter(0)):
            yield (mesh, dims, kind), [i for _, i in run]


def sharding_dims(param: Tensor) -> tuple[int, ...]:
    """Return the mesh dimensions that a parameter is sharded over."""
    if not is_sharded(param):
        return ()
    placed: Any = param
    # Under FSDP2 with tensor parallelism the placement is a strided shard, for which `is_shard` is False.
    kept = (i for i, placement in enumerate(placed.placements) if not placement.is_replicate())
    return tuple(i for i in kept if placed.device_mesh.size(i) > 1)


def sharded_along(param: Tensor, dims: Sequence[int]) -> bool:
    """Whether a parameter is sharded along one of the given dimensions."""
    placements: Any = cast(Any, param).placements if is_sharded(param) else ()
    return any(not placement.is_replicate() and placement.dim in dims for placement in placements)


def has_others() -> bool:
    """Whether there are other processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_rank_zero() -> bool:
    """Whether this process is rank 0, or the only one."""
    return not has_others() or dist.get_rank() == 0


def summed(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks, a new tensor."""
    total = tensor.clone()
    if has_others():
        dist.all_reduce(total)
    return total


def any_rank(here: bool, device: torch.device) -> bool:
    """Return the logical OR over ranks: all ranks get the same result."""
    return bool(summed(torch.tensor(int(here), device=device))) if has_others() else here
