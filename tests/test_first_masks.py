"""The masks that a run starts with: the zeros of a pruned model are held, or a warning says that they are not."""

from __future__ import annotations

import copy
import warnings

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law_examples import examples
from small_nets import LAYERS, Net, batches
from torch import nn

from sparse_lightning import (
    NM,
    SET,
    Blocks,
    Constant,
    Cubic,
    Gradual,
    Neurons,
    PatternError,
    RigL,
    Sparsifier,
    SparsityCallback,
)
from sparse_lightning.app.check import check
from sparse_lightning.app.compose import compose
from sparse_lightning.app.factory import Factory
from sparse_lightning.errors import ConfigError

TILES = [Blocks(LAYERS, (4, 4))]
NOT_HELD = "zero, and training will change them, since no mask holds them: pass masks='from weights'"


def pruned(patterns, sparsity=0.5):
    """Return a model that was pruned by another program, and its masks."""
    torch.manual_seed(0)
    net = Net()
    other = Sparsifier(patterns, sparsity, criterion="magnitude")
    other.attach(net, torch.optim.SGD(net.parameters(), lr=0.1))
    other.update_now()
    masks = {name: mask.clone() for name, mask in other.masks.items()}
    other.detach()
    return net, masks


def train(net, ours, steps=4):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    ours.attach(net, optimizer, total_steps=steps)
    for x, y in list(batches())[:steps]:
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        ours.before_step()
        optimizer.step()


@pytest.mark.parametrize("pattern", [TILES[0], NM(LAYERS), Neurons("up", "down")], ids=lambda p: p.label)
@pytest.mark.parametrize("criterion", ["magnitude", "random"])
def test_the_zeros_of_a_pruned_model_are_held(pattern, criterion):
    net, masks = pruned([pattern])
    ours = Sparsifier(pattern, 0.5, criterion, masks="from weights")
    train(net, ours)
    assert all(torch.equal(ours.masks[name], mask) for name, mask in masks.items())
    assert ours.sparsity() == 0.5


@settings(max_examples=examples(10), deadline=None)
@given(st.floats(0, 1), st.sampled_from([Gradual(), RigL(), SET()]))
def test_masks_of_another_sparsifier_are_taken_up(sparsity, method):
    """Whatever was pruned before, the masks are those that were passed until the first update, and weights are zero."""
    _, masks = pruned(TILES, sparsity)
    fresh = Net()
    ours = Sparsifier(TILES, Constant(0.5, begin=2, end=9), method=method, masks=masks)
    ours.attach(fresh, torch.optim.SGD(fresh.parameters(), lr=0.1))
    assert all(torch.equal(ours.masks[name], mask) for name, mask in masks.items())
    assert ours.sparsity() == pytest.approx(sum(int(m.sum()) for m in masks.values()) / 48)


def test_a_callback_takes_up_the_zeros():
    net, masks = pruned(TILES)
    callback = SparsityCallback(TILES, 0.5, "random", masks="from weights")
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    L.Trainer(max_steps=3, callbacks=[callback], enable_model_summary=False, **options).fit(net)
    assert all(torch.equal(callback.sparsifier.masks[name], mask) for name, mask in masks.items())


def test_a_loaded_state_comes_before_first_masks():
    net, masks = pruned(TILES)
    ours = Sparsifier(TILES, 0.5)
    train(copy.deepcopy(Net()), ours)
    state = copy.deepcopy(ours.state_dict())
    again = Sparsifier(TILES, 0.5, masks=masks)
    again.load_state_dict(state)
    again.attach(net, torch.optim.AdamW(net.parameters()))
    assert all(torch.equal(again.masks[name], mask) for name, mask in ours.masks.items())


def with_gradients(net):
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    return net


def test_zeros_that_are_not_held_are_warned_about():
    net = with_gradients(pruned(TILES)[0])
    ours, optimizer = Sparsifier(TILES, Cubic(0.75)), torch.optim.SGD(net.parameters(), lr=0.1)
    ours.attach(net, optimizer, total_steps=9)
    with pytest.warns(
        UserWarning, match=rf"16 of 32 blocks of up\.weight, 8 of 16 blocks of down\.weight are {NOT_HELD}"
    ):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_zeros_are_held_by_a_state_that_is_loaded_after_attaching():
    """As in Lightning with FSDP2."""
    net, ours = Net(), Sparsifier(TILES, 0.5)
    train(net, ours)
    with_gradients(net)
    state = ours.state_dict()
    again, optimizer = Sparsifier(TILES, 0.5), torch.optim.SGD(net.parameters(), lr=0.1)
    again.attach(net, optimizer)
    again.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_zeros_that_no_pruning_made_are_not_warned_about():
    """A padding row of an embedding, a layer that is initialised to zero, and an identity."""
    net = nn.Sequential(nn.Embedding(8, 4, padding_idx=0), nn.Linear(4, 8), nn.Linear(8, 8))
    nn.init.eye_(net[2].weight)
    nn.init.zeros_(with_gradients(net)[1].weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = Sparsifier([Blocks("0.weight", (1, -1)), Blocks(["1.weight", "2.weight"], (2, 2))], 0.5)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        ours.attach(net, optimizer)
        optimizer.step()


@pytest.mark.parametrize(
    ("masks", "text"),
    [
        ("zeros", r"masks='zeros' are not masks: pass a mapping.*'from weights'"),
        (torch.ones(2), r"masks=tensor.* are not masks"),
    ],
)
def test_what_is_not_a_mapping_of_masks_raises_at_once(masks, text):
    with pytest.raises(PatternError, match=text):
        Sparsifier(TILES, 0.5, masks=masks)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda masks: {**masks, "ip.weight": masks["up.weight"]},
            r"masks has 'ip\.weight', .*did you mean 'up\.weight'",
        ),
        (lambda masks: {"up.weight": masks["up.weight"]}, r"masks has no mask for down\.weight"),
        (
            lambda masks: {**masks, "up.weight": masks["up.weight"].T},
            r"torch\.bool and shape \(4, 8\) for up\.weight, whose grid of blocks has the shape \(8, 4\)",
        ),
        (lambda masks: {**masks, "up.weight": masks["up.weight"].float()}, r"torch\.float32.*pass a boolean tensor"),
        (
            lambda masks: {**masks, "up.weight": masks["up.weight"].tolist()},
            r"masks has a list for up\.weight: pass a boolean tensor",
        ),
    ],
)
def test_masks_that_do_not_fit_raise(change, text):
    net, masks = pruned(TILES)
    ours = Sparsifier(TILES, 0.5, masks=change(masks))
    with pytest.raises(PatternError, match=text):
        ours.attach(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert not ours.is_attached


def test_a_configuration_takes_up_the_zeros(tmp_path):
    config = compose(["masks=from weights"]).plain(str(tmp_path))
    check(config)
    net, masks = pruned(TILES)
    ours = Sparsifier(TILES, 0.5, masks=config["masks"])
    ours.attach(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert all(torch.equal(ours.masks[name], mask) for name, mask in masks.items())
    with pytest.raises(ConfigError, match=r"masks: masks='zeros' are not masks: .*'from weights'"):
        Factory(compose(["masks=zeros"]).plain(str(tmp_path))).sparsity()
