"""Sharding: how the models of recipes are spread over a mesh of devices, by FSDP2 and by tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterable

import lightning as L
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from sparse_lightning.errors import SparseLightningError

Plan = dict[str, ParallelStyle]
"""How layers are split over the tensor-parallel dimension of a mesh, by their names; `*` stands for any name."""


class ShardingError(SparseLightningError, ValueError):
    """A model that cannot be spread over devices in the way that is asked for."""


class Shardable(L.LightningModule):
    """A module that spreads itself over the mesh of a `ModelParallelStrategy`, and stays as it is without one."""

    def shards(self) -> Iterable[nn.Module]:
        """The parts that FSDP2 gathers one after the other; the default gathers all at once."""
        return ()

    def tensor_plan(self, size: int) -> Plan:
        """How layers are split over `size` devices.

        Raises:
            ShardingError: where they cannot be.
        """
        raise ShardingError(
            f"{type(self).__name__} has no plan for tensor parallelism over {size} devices: choose trainer=fsdp2, or "
            "tensor_parallel_size=1"
        )

    def configure_model(self) -> None:
        """Called by Lightning when there are processes, and again for each fit."""
        # FSDP2 makes the module a subclass of itself, which tells that it is spread already.
        if self.device_mesh is None or isinstance(self, FSDPModule):
            return
        # FSDP2 knows no other order of elements: convolutions give channels_last up.
        self.to(memory_format=torch.contiguous_format)
        tensor, data = self.device_mesh["tensor_parallel"], self.device_mesh["data_parallel"]
        if tensor.size() > 1:
            parallelize_module(self, tensor, self.tensor_plan(tensor.size()))
        for part in (*self.shards(), self):
            fully_shard(part, mesh=data)


def block_plan(prefix: str) -> Plan:
    """The plan of transformer blocks: the first layer of a pair by its outputs, the second one by its inputs.

    The output of a fused QKV projection is gathered: a third of its rows are queries, so a split by rows does not
    fall on heads.

    Args:
        prefix: where the blocks are, such as "blocks.*".
    """
    return {
        f"{prefix}.attn.qkv": ColwiseParallel(output_layouts=Replicate()),
        f"{prefix}.attn.out": RowwiseParallel(input_layouts=Replicate()),
        f"{prefix}.mlp.up": ColwiseParallel(),
        f"{prefix}.mlp.down": RowwiseParallel(),
    }
