"""prune on a model to which a Sparsifier is attached: its masks are taken up and held."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from small_nets import Net, batches, broken_blocks
from torch import nn

from sparse_lightning import (
    Blocks,
    Neurons,
    OneShot,
    PatternError,
    Random,
    Refit,
    Sparsifier,
    Taylor,
    Wanda,
    prune,
)


def attached(patterns, schedule, **options):
    """Return a network, its optimizer, and a Sparsifier that is attached to it."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    sparsifier = Sparsifier(patterns, schedule, "magnitude", **options)
    sparsifier.attach(model, optimizer, 20)
    return model, optimizer, sparsifier


def train(model, optimizer, sparsifier, steps):
    """Make some steps."""
    for x, y in itertools.islice(itertools.cycle(batches()), steps):
        nn.functional.mse_loss(model(x), y).backward()
        sparsifier.before_step()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("compensation", [None, Refit()], ids=["plain", "refit"])
@pytest.mark.parametrize("criterion", [Wanda(), Taylor(), Random()], ids=lambda c: type(c).__name__)
def test_an_attached_sparsifier_takes_up_the_masks_and_never_grows_what_it_has_pruned(criterion, compensation):
    patterns = [Neurons("up", "down")]
    model, optimizer, sparsifier = attached(patterns, OneShot(0.25, at=1))
    train(model, optimizer, sparsifier, 3)
    [before] = sparsifier.masks.values()
    [mask] = prune(model, patterns, 0.5, batches(3), criterion, compensation, progress=False).values()
    assert int(before.sum()) == 8
    assert int(mask.sum()) == 16
    assert (mask | ~before).all(), "a block that was pruned has grown"
    assert (optimizer.state[model.up.weight]["momentum_buffer"][mask.flatten()] == 0).all(), "state of pruned blocks"
    train(model, optimizer, sparsifier, 3)
    assert torch.equal(*sparsifier.masks.values(), mask)
    assert broken_blocks(sparsifier.scopes, sparsifier.masks) == []
    assert (sparsifier.last_update.step, sparsifier.last_update.target) == (3, 0.5)
    [again] = prune(model, patterns, 0.25, batches(3), criterion, compensation, progress=False).values()
    assert torch.equal(again, mask), "a lower level prunes nothing more, and grows nothing"
    sparsifier.detach()


def test_one_of_several_patterns_is_taken_up_and_the_schedule_goes_on():
    model, optimizer, sparsifier = attached(
        [Blocks("up.weight", (4, 4)), Blocks("down.weight", (4, 4))], OneShot(0.75, at=4)
    )
    [mask] = prune(model, [Blocks("down.weight", (4, 4))], 0.5, batches(2), progress=False).values()
    train(model, optimizer, sparsifier, 3)
    assert torch.equal(sparsifier.masks["down.weight"], mask)
    assert not sparsifier.masks["up.weight"].any()
    train(model, optimizer, sparsifier, 1)
    prune(model, [Blocks("up.weight", (4, 4))], 0.5, batches(2), progress=False)  # when an update to 75 % is due
    train(model, optimizer, sparsifier, 2)
    assert {name: float(m.double().mean()) for name, m in sparsifier.masks.items()} == {
        "up.weight": 0.75,
        "down.weight": 0.75,
    }
    sparsifier.detach()


def test_a_model_inside_of_an_attached_one_is_taken_up_under_the_names_of_the_whole():
    whole = nn.ModuleDict({"net": Net()})
    optimizer = torch.optim.SGD(whole.parameters(), 0.1)
    sparsifier = Sparsifier([Neurons("net.up", "net.down")], OneShot(0.5, at=9), "magnitude")
    sparsifier.attach(whole, optimizer)
    [mask] = prune(whole["net"], [Neurons("up", "down")], 0.5, batches(2), progress=False).values()
    assert torch.equal(*sparsifier.masks.values(), mask)
    sparsifier.detach()


def test_other_blocks_than_those_of_an_attached_sparsifier_are_refused_before_anything_is_pruned():
    model, _, sparsifier = attached([Blocks("up.weight", (4, 4))], OneShot(0.5, at=9))
    before = copy.deepcopy(model.state_dict())
    for patterns in ([Blocks("up.weight", (8, 8))], [Neurons("up", "down")]):
        with pytest.raises(PatternError, match=r"shares weights .* with up\.weight of an attached Sparsifier.*detach"):
            prune(model, patterns, 0.5, batches(2), progress=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    prune(model, [Blocks("down.weight", (8, 8))], 0.5, batches(2), progress=False)
    assert not sparsifier.masks["up.weight"].any(), "weights apart from its own are no concern of a Sparsifier"
    sparsifier.detach()
    prune(model, [Neurons("up", "down")], 0.5, batches(2), progress=False)


@pytest.mark.parametrize("is_attached", [True, False])
def test_what_an_interrupted_call_has_pruned_is_named_and_held(is_attached):
    patterns = [Blocks("up.weight", (4, 4)), Blocks("down.weight", (4, 4))]
    model, optimizer, sparsifier = attached(patterns, OneShot(0.25, at=12))
    if not is_attached:
        sparsifier.detach()
    calls = itertools.count()

    def step(module, batch):
        if (model.up.weight == 0).any() and next(calls):
            raise OSError("the disk is gone")
        return module(batch[0])

    with (
        pytest.warns(UserWarning, match=r"interrupted when up\.weight was already pruned: load"),
        pytest.raises(OSError, match="the disk is gone"),
    ):
        prune(model, patterns, 0.5, batches(3), Wanda(), step=step, progress=False)
    pruned = (model.up.weight == 0).float().mean()
    assert pruned == pytest.approx(0.5)
    assert not (model.down.weight == 0).any()
    if is_attached:
        train(model, optimizer, sparsifier, 3)
        assert (model.up.weight == 0).float().mean() == pruned
