"""N:M groups: what `Gradual` and `PruneOnce` have pruned stays pruned, whatever scores are later."""

from __future__ import annotations

import itertools

import pytest
import torch
from pairwise import parametrize
from torch import nn

from sparse_lightning import (
    NM,
    Constant,
    ElementwiseTaylor,
    Gradual,
    Linear,
    Magnitude,
    PruneOnce,
    Sparsifier,
    Taylor,
    Wanda,
)


def masks_of(sparsifier, model, steps, prepares, silent=()):
    """The masks after each step; the inputs of some features are zero in some steps, so that their scores are equal."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sparsifier.attach(model, optimizer, total_steps=steps)
    found = []
    for step in range(steps):
        x = torch.randn(8, 16)
        x[:, list(silent) if step > 25 else []] = 0
        optimizer.zero_grad()
        (model(x) - x[:, :4].tanh()).square().mean().backward()
        if prepares:
            sparsifier.before_step()
        optimizer.step()
        found.append(sparsifier.masks)
    return found


@parametrize(
    criterion=[Wanda(), Taylor(), ElementwiseTaylor(), Magnitude()],
    how=[(Gradual(), Linear(0.5, begin=2, end=60)), (PruneOnce(), Constant(0.5, end=60))],
    prepares=[True, False],
)
def test_no_weight_grows_again(criterion, how, prepares):
    method, schedule = how
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    sparsifier = Sparsifier([NM("*.weight")], schedule, criterion, method, update_every=5)
    found = masks_of(sparsifier, model, 70, prepares, silent=range(8))
    for earlier, later in itertools.pairwise(found):
        for name in earlier:
            assert not (earlier[name] & ~later[name]).any(), name
    for name, mask in found[-1].items():
        assert torch.equal(mask.view(-1, 4).sum(-1), torch.full((mask.numel() // 4,), 2)), name
        assert int((model.get_parameter(name) == 0).sum()) == mask.numel() // 2, "a kept weight was lost"


def test_masks_from_weights_stay_as_they_are_at_constant_sparsity():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 4, bias=False))
    kept = torch.tensor([False, False, True, True]).repeat(4, 4)
    with torch.no_grad():
        model[0].weight.copy_(kept * torch.randn(4, 16))
    sparsifier = Sparsifier([NM("*.weight")], Constant(0.5, end=60), masks="from weights", update_every=20)
    for masks in masks_of(sparsifier, model, 50, True, silent=range(8)):
        assert torch.equal(masks["0.weight"], ~kept)


def test_groups_with_fewer_weights_than_are_kept_grow_none():
    model = nn.Sequential(nn.Linear(16, 4, bias=False))
    with torch.no_grad():
        model[0].weight[0, :3] = 0
        model[0].weight[1:, :] = model[0].weight[1:] * torch.tensor([0.0, 0, 1, 1]).repeat(4)
        model[0].weight[0, 4:] *= torch.tensor([0.0, 0, 1, 1]).repeat(3)
    sparsifier = Sparsifier([NM("*.weight")], Constant(0.5, end=60), Magnitude(), masks="from weights", update_every=5)
    for masks in masks_of(sparsifier, model, 20, False):
        assert masks["0.weight"][0, :4].tolist() == [True, True, True, False]
    assert torch.isfinite(model[0].weight).all()


@pytest.mark.parametrize("prepares", [True, False])
def test_two_ways_of_choosing_agree(prepares):
    """A subclass is asked for each decision, with scores in which pruned weights are −inf."""

    class Asked(Gradual):
        def choose(self, context):
            return super().choose(context)

    def run(method):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        sparsifier = Sparsifier([NM("*.weight")], Linear(0.5, begin=2, end=60), Wanda(), method, update_every=5)
        return masks_of(sparsifier, model, 70, prepares, silent=range(8))[-1]

    wanted, found = run(Asked()), run(Gradual())
    for name, mask in wanted.items():
        assert torch.equal(found[name], mask), name
