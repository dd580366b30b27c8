"""Compensation at the updates of a run: against one update by hand, with every pattern, and resumed bit for bit."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.distributed as dist
from forked import on_ranks
from small_nets import Net, batches, broken_blocks
from torch import nn
from torch.distributed.fsdp import fully_shard

from sparse_lightning import (
    NM,
    OBS,
    Blocks,
    Cubic,
    Heads,
    Magnitude,
    Neurons,
    OneShot,
    PatternError,
    Refit,
    Sparsifier,
    Wanda,
    prune,
)
from sparse_lightning.engine.scoring import OBSERVED

PATTERNS = {
    "units": [Neurons("up", "down")],
    "tiles": [Blocks(["up.weight", "down.weight"], (4, 4))],
    "groups": [NM("down.weight")],
}


def train(model, sparsifier, steps, start=0, optimizer=None):
    """Train for some steps on the same batches, in a plain loop."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    data = list(batches())
    sparsifier.attach(model, optimizer, 40)
    for step in range(start, start + steps):
        x, y = data[step % len(data)]
        nn.functional.mse_loss(model(x), y).backward()
        sparsifier.before_step()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("kind", PATTERNS)
def test_one_update_refits_on_the_inputs_of_the_steps_before_it(kind):
    """The steps have a learning rate of zero, so that prune sees the same inputs; tiles in one layer."""
    patterns = [Blocks("down.weight", (4, 4))] if kind == "tiles" else PATTERNS[kind]
    model, data = Net(), list(batches())
    plain = copy.deepcopy(model)
    sparsifier = Sparsifier(patterns, OneShot(0.5, at=7), Wanda(), update_every=1, compensation=Refit())
    train(model, sparsifier, 8, optimizer=torch.optim.SGD(model.parameters(), 0.0))
    masks = prune(plain, patterns, 0.5, data, Wanda(), Refit(), progress=False)
    for name, mask in masks.items():
        assert torch.equal(sparsifier.masks[name], mask)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-6)
    assert broken_blocks(sparsifier.scopes, sparsifier.masks) == []


def test_only_inputs_shortly_before_an_update_are_observed():
    model = Net()
    at = OBSERVED + 4
    sparsifier = Sparsifier([Neurons("up", "down")], OneShot(0.5, at=at), compensation=Refit())
    train(model, sparsifier, 4)
    assert "gram_matrices" in sparsifier.state_dict()
    assert sparsifier.state_dict()["gram_matrices"] == {}
    sparsifier.detach()
    train(model, sparsifier, 3, start=4)
    [gram] = sparsifier.state_dict()["gram_matrices"].values()
    assert float(gram[-1, -1]) == 16.0 * 2, "of steps 5 and 6: an update at 20 is within 16 steps"


@pytest.mark.filterwarnings("ignore:.* prunes much at each")
@pytest.mark.parametrize("kind", PATTERNS)
def test_a_run_with_compensation_resumes_bit_for_bit(kind):
    def made():
        return Sparsifier(PATTERNS[kind], Cubic(0.5, begin=2, end=12), OBS(), update_every=5, compensation=Refit())

    torch.manual_seed(0)
    whole = Net()
    through = made()
    train(whole, through, 16)
    torch.manual_seed(0)
    first, before = Net(), made()
    optimizer = train(first, before, 9)  # two updates are made, and two steps are observed for the next
    second, after = copy.deepcopy(first), made()
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    assert after.state_dict()["gram_matrices"]
    other = torch.optim.SGD(second.parameters(), 0.05, momentum=0.9)
    other.load_state_dict(optimizer.state_dict())
    train(second, after, 7, start=9, optimizer=other)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
    for name, mask in through.masks.items():
        assert torch.equal(mask, after.masks[name])
        assert mask.any()


def test_models_that_train_in_evaluation_mode_are_observed_and_validation_is_not():
    model = Net().eval()  # as from_pretrained returns it
    sparsifier = Sparsifier([Neurons("up", "down")], OneShot(0.5, at=4), Wanda(), compensation=Refit())
    train(model, sparsifier, 2)
    with torch.no_grad():
        model(torch.randn(9, 16))
    [gram] = sparsifier.state_dict()["gram_matrices"].values()
    assert float(gram[-1, -1]) == 16.0 * 2


def steps_on(model, sparsifier, data):
    """Make an optimizer step for each batch."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    sparsifier.attach(model, optimizer, len(data))
    for x, y in data:
        nn.functional.mse_loss(model(x), y).backward()
        sparsifier.before_step()
        optimizer.step()
        optimizer.zero_grad()


def refitting(kind):
    """Two updates that prune and refit."""
    return Sparsifier(PATTERNS[kind], Cubic(0.5, begin=2, end=6), OBS(), update_every=3, compensation=Refit())


def train_in_shards(rank, folder, wanted):
    """Train with each batch divided over two ranks."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.set_num_threads(1)
    for kind, (masks, weights) in wanted.items():
        torch.manual_seed(0)
        model = Net()
        fully_shard(model)
        sparsifier = refitting(kind)
        steps_on(model, sparsifier, [(x.chunk(2)[rank], y.chunk(2)[rank]) for x, y in batches(8)])
        for name, mask in masks.items():
            assert torch.equal(sparsifier.masks[name], mask), f"{name} of {kind}"
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value.full_tensor(), weights[name], rtol=1e-3, atol=1e-4)
    dist.barrier()
    os._exit(0)  # without destructors: those of gloo may wait for the threads of a process that has ended


@pytest.mark.slow
def test_a_sharded_run_is_compensated_as_one_process(tmp_path):
    """FSDP2: Gram matrices are summed over ranks, and each rank solves for the rows that it holds."""
    wanted = {}
    for kind in PATTERNS:
        torch.manual_seed(0)
        model, sparsifier = Net(), refitting(kind)
        steps_on(model, sparsifier, list(batches(8)))
        assert sparsifier.sparsity() == 0.5
        wanted[kind] = sparsifier.masks, model.state_dict()
    on_ranks(train_in_shards, (tmp_path, wanted), 2)


@pytest.mark.parametrize("parts", [{"compensation": Refit(), "criterion": Magnitude()}, {"criterion": OBS()}], ids=str)
def test_a_weight_that_attention_reads_without_its_layer_is_refused_before_training(parts):
    net = nn.ModuleDict({"layer": nn.TransformerEncoderLayer(16, 4, 32)})
    sparsifier = Sparsifier([Heads("layer.self_attn")], Cubic(0.5, begin=2, end=8), **parts)
    with pytest.raises(PatternError, match=r"out_proj\.weight .* reads it without calling its layer"):
        sparsifier.attach(net, torch.optim.SGD(net.parameters(), 0.1))
