"""Norms of inputs over several processes: what all of them saw, on each of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from forked import on_ranks
from torch import nn

from sparse_lightning.flow.input_norms import InputNorms

RANKS = 2


class Branches(nn.Module):
    """A layer that all data goes through, one for every other batch, one that nothing reaches, a convolution."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.first, self.odd, self.never = nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(4, 3)
        self.conv = nn.Conv2d(4, 6, 2, groups=2).double()

    def forward(self, x, number):
        """`number` says which batch it is."""
        x = self.first(x)
        self.conv(x.double().view(-1, 4, 1, 1).expand(-1, -1, 3, 2))
        return self.odd(x) if number % 2 else x


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3 + i, 5, generator=generator) for i in range(6)]


def norms_of(numbers):
    """The norms of each layer after some of the batches; None where there is none."""
    model = Branches()
    norms = InputNorms(model)
    for number in numbers:
        model(batches()[number], number)
    return {name: norms.get(layer.weight) for name, layer in model.named_children()}


def work(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    try:
        torch.save(norms_of(range(rank, 6, RANKS)), f"{folder}/{rank}")
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_with_batches_of_their_own_see_the_norms_over_all(tmp_path):
    """Rank 0 has the even batches, so that only rank 1 reaches the layer for odd ones."""
    on_ranks(work, (str(tmp_path),), RANKS)
    wanted = norms_of(range(6))
    assert wanted["never"] is None
    assert wanted["odd"] is not None
    for rank in range(RANKS):
        got = torch.load(tmp_path / str(rank), weights_only=True)
        for name, norm in wanted.items():
            if norm is None:
                assert got[name] is None, f"{name} on rank {rank} was reached by nothing"
            else:
                torch.testing.assert_close(got[name], norm, msg=lambda m, name=name, rank=rank: f"{name}, {rank}: {m}")
