"""Processes: which part of a parameter this one holds, how grids are completed, and how all come to one decision.

A DTensor's placements say what a process holds: a box of the whole parameter. A plain tensor is the case of one box.
Only grids travel, with one number for each block: partial ones are completed over the mesh dimensions that shard the
parameter, and the masks of rank 0 are sent to all, a bit for each block. Weights are never gathered.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from sparse_lightning.errors import LayoutError, SparseLightningError
from sparse_lightning.kernels.block_score.stage import FoldKind
from sparse_lightning.masks import pack, unpack
from sparse_lightning.patch import Box, whole

Part = tuple[Tensor, FoldKind, Tensor]
"""A grid of what one process holds, how it is folded, and the parameter that it belongs to."""

TOGETHER = 2**20
"""About how many numbers of grids travel at once."""

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor; where none has been made, their module need not be imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def held(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, live."""
    placed: Any = tensor
    # In this order no DTensor is made in between.
    return (placed.to_local() if is_sharded(tensor) else tensor).detach()


def local_part(tensor: Tensor) -> tuple[Tensor, Box]:
    """The part of a tensor that this process holds, live, and its box: start and stop along each dimension.

    Example:
        >>> local_part(torch.zeros(2, 3))[1]
        ((0, 2), (0, 3))
    """
    if not is_sharded(tensor):
        return tensor.detach(), whole(tensor.shape)
    placed: Any = tensor
    if any(placement.is_partial() for placement in placed.placements):
        raise LayoutError(
            f"a parameter of shape {tuple(tensor.shape)} is placed as {placed.placements}: a sum that is not finished "
            "has no weights to prune. Use Shard and Replicate"
        )
    mesh = placed.device_mesh
    return held(tensor), _box(tuple(placed.shape), mesh, placed.placements, tuple(mesh.get_coordinate()))


@lru_cache(maxsize=4096)
def _box(shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...], coordinate: tuple[int, ...]) -> Box:
    """The box of a tensor that the process at a coordinate of the mesh holds: this one."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple((o, o + n) for o, n in zip(offset, sizes, strict=True))


def local_like(tensor: Tensor, param: Tensor) -> Tensor:
    """The part of a tensor of a parameter's shape that goes with what this process holds of the parameter."""
    if is_sharded(tensor) and is_sharded(param):
        given, wanted = cast(Any, tensor), cast(Any, param).placements
        return held(given if given.placements == wanted else given.redistribute(placements=wanted))
    if not is_sharded(param):
        return held(tensor)
    return tensor.detach()[tuple(slice(lo, hi) for lo, hi in local_part(param)[1])]


def complete(parts: Sequence[Part]) -> list[Tensor]:
    """Grids of what this process holds of each block → of all of it, over the mesh dimensions that shard it.

    Those that go the same way travel together, up to `TOGETHER` numbers at once.
    """
    done = [grid for grid, _, _ in parts]
    for (mesh, dims, kind), members in _together(parts):
        wire = torch.cat([done[i].reshape(-1) for i in members])
        for dim in dims:
            dist.all_reduce(wire, _OPERATIONS[kind], group=mesh.get_group(dim))
        for i, values in zip(members, torch.split(wire, [done[i].numel() for i in members]), strict=True):
            done[i] = values.view(done[i].shape)
    return done


def _together(parts: Sequence[Part]) -> Iterator[tuple[tuple[Any, tuple[int, ...], FoldKind], list[int]]]:
    """The numbers of grids that are reduced in the same way, as many as may travel at once."""
    found: dict[Any, list[int]] = {}
    for i, (grid, kind, param) in enumerate(parts):
        dims = _sharding_dims(param)
        if dims:
            found.setdefault((cast(Any, param).device_mesh, dims, kind, grid.dtype), []).append(i)
    for (mesh, dims, kind, _), members in found.items():
        sizes = [parts[i][0].numel() for i in members]
        begun = [total // TOGETHER for total in accumulate(sizes)]
        for _, run in groupby(zip(begun, members, strict=True), key=itemgetter(0)):
            yield (mesh, dims, kind), [i for _, i in run]


def _sharding_dims(param: Tensor) -> tuple[int, ...]:
    """The dimensions of its mesh that a parameter is sharded over."""
    if not is_sharded(param):
        return ()
    placed: Any = param
    # A parameter under both FSDP2 and tensor parallelism has a strided shard, which is no `is_shard`.
    kept = (i for i, placement in enumerate(placed.placements) if not placement.is_replicate())
    return tuple(i for i in kept if placed.device_mesh.size(i) > 1)


def sharded_along(param: Tensor, dims: Sequence[int]) -> bool:
    """Whether a parameter is cut along one of some dimensions."""
    placements: Any = cast(Any, param).placements if is_sharded(param) else ()
    return any(not placement.is_replicate() and placement.dim in dims for placement in placements)


def united(mask: Tensor, param: Tensor) -> Tensor:
    """The mask of a whole parameter, one entry for each weight, of what each process has chosen for its part.

    Bits travel, over the mesh dimensions that shard the parameter. Each is set by one process, so that their sum is
    their union.
    """
    if not is_sharded(param):
        return mask
    all_of_it = mask.new_zeros(param.shape)
    all_of_it[tuple(slice(*bounds) for bounds in local_part(param)[1])] = mask
    wire = pack(all_of_it)
    for dim in _sharding_dims(param):
        dist.all_reduce(wire, group=cast(Any, param).device_mesh.get_group(dim))
    return unpack(wire, param.shape)


def has_others() -> bool:
    """Whether there are other processes to agree with."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def agreed(masks: Mapping[str, Tensor], here: bool) -> bool:
    """Whether something is so on any rank, where all hold the same masks; only checksums travel along.

    Raises:
        SparseLightningError: on all ranks, where one of them holds other masks than rank 0.
    """
    if not has_others() or not masks:
        return here
    mine = _checksums(masks)
    extremes = torch.cat([mine, -mine, mine.new_tensor([here])])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    *found, anywhere = extremes.tolist()
    if [-largest for largest in found[: len(masks)]] != found[len(masks) :]:
        _name_the_other(masks, mine)
    return bool(anywhere)


def _name_the_other(masks: Mapping[str, Tensor], mine: Tensor) -> None:
    """Raise: the checksums of some rank are not those of rank 0."""
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    for rank, theirs in enumerate(found):
        if not torch.equal(theirs, found[0]):
            names = [name for name, same in zip(masks, theirs == found[0], strict=True) if not same]
            raise SparseLightningError(
                f"rank {rank} holds another mask of {', '.join(names)} than rank 0: something has changed masks on one "
                "rank alone, or the ranks have loaded different checkpoints. Resume all of them from the same one"
            )


def _checksums(masks: Mapping[str, Tensor]) -> Tensor:
    """A number for each mask, with one copy to the host for all."""
    together = torch.cat([mask.reshape(-1) for mask in masks.values()]).cpu()
    parts = torch.split(together, [mask.numel() for mask in masks.values()])
    return torch.tensor([zlib.crc32(part.numpy().data) for part in parts], dtype=torch.int64, device=_device(masks))


def decided(masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The masks of rank 0, on all ranks, a bit for each block on the wire."""
    if not has_others() or not masks:
        return dict(masks)
    together = torch.cat([mask.reshape(-1) for mask in masks.values()])
    wire = pack(together)
    dist.broadcast(wire, src=0)
    parts = torch.split(unpack(wire, together.shape), [mask.numel() for mask in masks.values()])
    return {name: part.view(masks[name].shape) for name, part in zip(masks, parts, strict=True)}


def summed(tensor: Tensor) -> Tensor:
    """The sum of a tensor over all ranks, a new tensor."""
    total = tensor.clone()
    if has_others():
        dist.all_reduce(total)
    return total


def any_rank(here: bool, device: torch.device) -> bool:
    """Whether something is so on any rank: all get the same answer, and none goes on where others stop."""
    return bool(summed(torch.tensor(int(here), device=device))) if has_others() else here


def _device(masks: Mapping[str, Tensor]) -> torch.device:
    return next(iter(masks.values())).device
