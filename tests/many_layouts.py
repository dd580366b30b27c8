"""A small model that has all kinds of blocks, and the ways in which several processes can share it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from sparse_lightning import NM, Blocks, Heads, Neurons


class Attention(nn.Module):
    """Four heads of size 6, with a fused QKV."""

    num_heads = 4

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x):
        """(batch, positions, 24)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 6)).permute(2, 0, 3, 1, 4)
        return self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """42 neurons: an odd number of rows for each of two processes."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(24, 42), nn.Linear(42, 24)

    def forward(self, x):
        """(batch, positions, 24)."""
        return self.down(gelu(self.up(x)))


class Thin(nn.Module):
    """Layers for N:M. A half or a quarter of 20 inputs cuts groups of 4, a third or a quarter of 12 groups of 6."""

    def __init__(self):
        super().__init__()
        self.rows, self.fours, self.sixes = nn.Linear(24, 20), nn.Linear(20, 12), nn.Linear(12, 24)

    def forward(self, x):
        """(batch, positions, 24)."""
        return self.sixes(gelu(self.fours(gelu(self.rows(x)))))


class Net(nn.Module):
    """Attention, MLPs, and layers of 100, 5 and 4 rows: shards of 3 and 4 cut their blocks, and some are empty."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attn, self.mlp, self.thin = Attention(), Mlp(), Thin()
        self.wide, self.mid, self.tail = nn.Linear(24, 100), nn.Linear(100, 5), nn.Linear(5, 4)

    def forward(self, x):
        """(batch, positions, 24) → (batch, positions, 4)."""
        for layer in (self.attn, self.mlp, self.thin):
            x = x + layer(x)
        return self.tail(self.mid(gelu(self.wide(x))))


LARGE = [
    Heads("attn", order="qkv"),
    Neurons("mlp.up", "mlp.down"),
    Blocks("wide.weight", (32, 8), edge="partial"),
    Blocks(["mid.weight", "tail.weight"], (2, 4), edge="partial"),
]
"""Blocks of several weights."""

PATTERNS = [*LARGE, NM(["thin.rows.weight", "thin.fours.weight"], 2, 4), NM("thin.sixes.weight", 3, 6)]


def device_of(net):
    """The type of the device that a model is on."""
    return next(net.parameters()).device.type


def alone(net):
    """One process: what is called, and which part of the data it gets."""
    return net, 0, 1


def ddp(net):
    """A copy on each process."""
    return DistributedDataParallel(net), dist.get_rank(), dist.get_world_size()


def shard(net, mesh):
    """FSDP2 on the last dimension of a mesh; of the layers of N:M two by columns, where these divide."""
    columns = {p for p in (net.thin.fours.weight, net.thin.sixes.weight) if p.shape[1] % mesh.shape[-1] == 0}
    fully_shard(net.mlp, mesh=mesh)
    fully_shard(net, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p in columns else None)


def fsdp(net):
    """Every parameter in shards."""
    shard(net, init_device_mesh(device_of(net), (dist.get_world_size(),)))
    return net, dist.get_rank(), dist.get_world_size()


def hsdp(net):
    """Two copies, each in shards on two processes."""
    shard(net, init_device_mesh(device_of(net), (2, 2), mesh_dim_names=("copies", "shards")))
    return net, dist.get_rank(), dist.get_world_size()


def split(net, mesh):
    """Tensor parallel in pairs, by rows and then by columns; only the MLP's two layers share what is between."""
    rows, columns = ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())
    pairs = [("attn.qkv", "attn.out"), ("thin.rows", "thin.fours"), ("wide", "mid")]
    plan = {name: how for pair in pairs for name, how in zip(pair, (rows, columns), strict=True)}
    parallelize_module(net, mesh, {**plan, "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()})


def tp(net):
    """All processes see the same data."""
    split(net, init_device_mesh(device_of(net), (dist.get_world_size(),)))
    return net, 0, 1


def fsdp_tp(net):
    """Both, 2 × 2."""
    mesh = init_device_mesh(device_of(net), (2, 2), mesh_dim_names=("data", "tensor"))
    split(net, mesh["tensor"])
    shard(net, mesh["data"])
    return net, mesh["data"].get_local_rank(), 2


LAYOUTS = {
    "DDP on 2": (2, ddp),
    "FSDP2 on 2": (2, fsdp),
    "tensor parallel on 2": (2, tp),
    "FSDP2 on 3": (3, fsdp),
    "FSDP2 on 4": (4, fsdp),
    "DDP on 4": (4, ddp),
    "FSDP2 × tensor parallel on 2 × 2": (4, fsdp_tp),
    "HSDP on 2 × 2": (4, hsdp),
}
