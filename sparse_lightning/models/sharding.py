"""Sharding: how the models of the recipes use a device mesh, by FSDP2 and by tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import lightning as L
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.modules.module import register_module_parameter_registration_hook

from sparse_lightning.blocks.shards import is_sharded
from sparse_lightning.errors import SparseLightningError

TensorPlan = dict[str, ParallelStyle]
"""Parallel styles of layers, by their names; `*` matches any name."""


class ShardingError(SparseLightningError, ValueError):
    """A model that cannot be sharded as requested."""


class Shardable(L.LightningModule):
    """A module that shards itself over the mesh of a `ModelParallelStrategy`; without one it does nothing."""

    def shards(self) -> Iterable[nn.Module]:
        """Return the modules that FSDP2 gathers one by one; the default gathers the whole model at once."""
        return ()

    def tensor_plan(self, size: int) -> TensorPlan:
        """Return how to split layers over `size` devices.

        Raises:
            ShardingError: where the model has no such plan.
        """
        raise ShardingError(
            f"{type(self).__name__} has no plan for tensor parallelism over {size} devices: choose trainer=fsdp2, or "
            "tensor_parallel_size=1"
        )

    def configure_model(self) -> None:
        """Shard the model, once; Lightning calls this when the processes run, and again for each fit."""
        # FSDP2 changes the class of the module, which shows that it is sharded already.
        if self.device_mesh is None or isinstance(self, FSDPModule):
            return
        # FSDP2 supports contiguous parameters only: convolutions lose channels_last.
        self.to(memory_format=torch.contiguous_format)
        tensor, data = self.device_mesh["tensor_parallel"], self.device_mesh["data_parallel"]
        if tensor.size() > 1:
            parallelize_module(self, tensor, self.tensor_plan(tensor.size()))
        for part in (*self.shards(), self):
            fully_shard(part, mesh=data)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put the parameters of modules that are created inside on the meta device; buffers get their values.

    A parameter is moved when it is registered, before it is initialized: its memory is never touched.
    """
    handle = register_module_parameter_registration_hook(_to_meta)  # type: ignore[arg-type] # torch takes what it returns
    try:
        yield
    finally:
        handle.remove()


def _to_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
    if param is None or param.is_meta:
        return None  # unchanged: a tied parameter stays the same object
    return nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)


def materialize(module: nn.Module, device: torch.device) -> None:
    """Allocate the parameters of a module that are on the meta device, uninitialized; of DTensors the local shard.

    Parameters stay the same objects, and buffers keep their values.
    """
    if any(is_sharded(param) for param in module.parameters()):
        kept = {name: buffer.clone() for name, buffer in module.named_buffers()}
        module.to_empty(device=device)  # FSDP2 notices that its parameters changed
        for name, buffer in module.named_buffers():
            buffer.copy_(kept[name])
        return
    for param in [param for param in module.parameters() if param.is_meta]:
        empty = nn.Parameter(torch.empty_like(param, device=device), param.requires_grad)
        torch.utils.swap_tensors(param, empty)  # type: ignore[no-untyped-call]


def block_plan(prefix: str) -> TensorPlan:
    """Return the plan of transformer blocks: the first layer of a pair is split by outputs, the second by inputs.

    The output of a fused QKV projection is gathered: a third of its rows are queries, so splitting rows would not
    split by heads.

    Args:
        prefix: the names of the blocks, such as "blocks.*".
    """
    return {
        f"{prefix}.attn.qkv": ColwiseParallel(output_layouts=Replicate()),
        f"{prefix}.attn.out": RowwiseParallel(input_layouts=Replicate()),
        f"{prefix}.mlp.up": ColwiseParallel(),
        f"{prefix}.mlp.down": RowwiseParallel(),
    }
