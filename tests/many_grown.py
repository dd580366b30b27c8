"""Neurons that grow in two processes with FSDP2."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from sparse_lightning import Constant, Neurons, RigL, Sparsifier


def train(is_sharded: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the weights and the mask after some updates with growth."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 22), nn.Tanh(), nn.Linear(22, 8)).double()
    if is_sharded:
        fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sparsifier = Sparsifier([Neurons("0", "2")], Constant(0.5, end=40), method=RigL(0.5), update_every=5)
    sparsifier.attach(model, optimizer)
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1)).double()
    for _ in range(23):
        optimizer.zero_grad()
        (model(x) - x.sin()).square().mean().backward()
        sparsifier.before_step()
        optimizer.step()
    [mask] = sparsifier.masks.values()
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    return {name: weight.detach() for name, weight in whole.items()}, mask


def compare(rank: int, meeting: str) -> None:
    """Compare a sharded run with one of this process alone; the two processes find one another by a file."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    sharded, mask = train(is_sharded=True)
    plain, expected = train(is_sharded=False)
    dist.barrier()
    dist.destroy_process_group()
    assert torch.equal(mask, expected)
    for name, weight in plain.items():
        torch.testing.assert_close(sharded[name], weight, rtol=1e-6, atol=1e-8, msg=lambda text, n=name: f"{n}: {text}")
    grown = ~mask.flatten()
    assert sharded["2.weight"][:, grown].all(), "the columns of units that grew are not zero"
