"""Ranks: how the processes of a run agree on masks. Masks are communicated with one bit per block."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from sparse_lightning.blocks.shards import has_others, is_sharded, local_part, sharding_dims
from sparse_lightning.engine.masks import pack, unpack
from sparse_lightning.errors import SparseLightningError


def agree(masks: Tensor) -> Tensor:
    """Return the masks of rank 0, on all ranks."""
    if not has_others() or not masks.numel():
        return masks
    bits = pack(masks)
    dist.broadcast(bits, src=0)
    return unpack(bits, masks.shape)


def check_masks(masks: Mapping[str, Tensor], flag: bool) -> bool:
    """Check that all ranks hold the same masks, by their checksums; return the logical OR of a flag over ranks.

    One collective operation does both.

    Raises:
        SparseLightningError: on all ranks, where one of them holds other masks than rank 0.
    """
    if not has_others() or not masks:
        return flag
    mine = _checksums(masks)
    extremes = torch.cat([mine, -mine, mine.new_tensor([flag])])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    *found, any_flag = extremes.tolist()
    if [-largest for largest in found[: len(masks)]] != found[len(masks) :]:
        _raise_for_rank(masks, mine)
    return bool(any_flag)


def _raise_for_rank(masks: Mapping[str, Tensor], mine: Tensor) -> None:
    """Raise an error that names the first rank with other checksums than rank 0."""
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    for rank, theirs in enumerate(found):
        if not torch.equal(theirs, found[0]):
            names = [name for name, same in zip(masks, theirs == found[0], strict=True) if not same]
            raise SparseLightningError(
                f"rank {rank} and rank 0 hold different masks of {', '.join(names)}: masks were changed on one rank "
                "only, or the ranks loaded different checkpoints. Resume all ranks from the same checkpoint"
            )


def _checksums(masks: Mapping[str, Tensor]) -> Tensor:
    """Return a checksum for each mask, with one copy to the host for all."""
    flat = torch.cat([mask.reshape(-1) for mask in masks.values()])
    parts = torch.split(flat.cpu(), [mask.numel() for mask in masks.values()])
    return torch.tensor([zlib.crc32(part.numpy().data) for part in parts], dtype=torch.int64, device=flat.device)


def united(masks: Tensor, param: Tensor) -> Tensor:
    """Return the masks of whole parameters that lie alike from the masks that each process chose for its shards.

    Args:
        masks: `(parameters, *shard)`, one entry for each weight that this process holds.
        param: the first of them. Bits are summed over the mesh dimensions that shard it; each is set by one process.
    """
    if not is_sharded(param):
        return masks
    whole = masks.new_zeros(len(masks), *param.shape)
    whole[(slice(None), *(slice(*bounds) for bounds in local_part(param)[1]))] = masks
    bits = pack(whole)
    for dim in sharding_dims(param):
        dist.all_reduce(bits, group=cast(Any, param).device_mesh.get_group(dim))
    return unpack(bits, whole.shape)
