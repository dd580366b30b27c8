"""Families of a model in shards: those of the whole model, with the same norms of units."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from sparse_lightning import Coupled
from sparse_lightning.models import GPT
from sparse_lightning.patterns import resolve


def norms(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The norm of each unit, by family."""
    return {found.name: found.scope.blocks()[0].norms().flatten() for found in resolve([Coupled()], model)}


def work(rank: int, port: int) -> None:
    """What torchrun would start."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = GPT(width=16, depth=1, heads=4, context=16)
    whole = norms(model)
    mesh = init_device_mesh("cpu", (2,))
    for layer in (*model.blocks, model):
        fully_shard(layer, mesh=mesh)
    found = norms(model)
    assert list(found) == list(whole) == ["blocks.0.attn (heads)", "blocks.0.mlp (units)"], f"other families: {found}"
    for name, values in found.items():
        torch.testing.assert_close(values, whole[name])
    dist.destroy_process_group()


def check_families() -> None:
    """Two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(work, (port,), 2, start_method="fork")
    print("the same families")
