"""Momentum: pruned blocks change nothing for kept ones, and a grown block starts as with a fresh optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
from small_nets import LAYERS, OPTIMIZERS, Net, batches
from torch import nn

from sparse_lightning import Blocks, Constant, RigL, Sparsifier
from sparse_lightning.optimizer_state import state_tensors


def element_mask(mask):
    """A mask of 4×4 blocks as one of weights."""
    return mask.repeat_interleave(4, 0).repeat_interleave(4, 1)


def loss_of(model, i=0):
    """The loss on one batch."""
    x, y = list(batches())[i % 8]
    return nn.functional.mse_loss(model(x), y)


def start(optimizer, method=None, sparsity=0.5, end=0):
    """A model that has trained a little, and a sparsifier on it."""
    model = Net()
    made = OPTIMIZERS[optimizer](model.parameters())
    for i in range(3):
        made.zero_grad()
        loss_of(model, i).backward()
        made.step()
    sparsifier = Sparsifier([Blocks(LAYERS, (4, 4))], Constant(sparsity, end=end), method=method, update_every=1)
    sparsifier.attach(model, made, total_steps=100)
    return model, made, sparsifier


def one_step(model, optimizer, sparsifier, i=0):
    """One step; gives the gradients that the optimizer saw."""
    optimizer.zero_grad()
    loss_of(model, i).backward()
    sparsifier.before_step()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    return grads


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_of_pruned_blocks_is_zero_when_they_are_pruned(optimizer):
    model, made, sparsifier = start(optimizer)
    made.zero_grad()
    loss_of(model).backward()
    sparsifier.before_step()
    for name in LAYERS:
        param = model.get_parameter(name)
        kept = state_tensors(made, param)
        assert kept, f"{optimizer} keeps nothing: the test would show nothing"
        for values in kept.values():
            assert not values[element_mask(sparsifier.masks[name])].any()
            assert values[~element_mask(sparsifier.masks[name])].any()


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "twist"])
def test_no_pruned_block_changes_the_update_of_a_kept_one(optimizer):
    """Weights kept move as in a model of the same pruned weights whose pruned blocks are not there to be trained."""
    model, made, sparsifier = start(optimizer)
    one_step(model, made, sparsifier)
    twin = copy.deepcopy(model)
    other = OPTIMIZERS[optimizer](twin.parameters())
    other.load_state_dict(copy.deepcopy(made.state_dict()))
    for i in range(4):
        one_step(model, made, sparsifier, i)
        other.zero_grad()
        loss_of(twin, i).backward()
        for name in LAYERS:  # the twin's pruned blocks are cut out of its gradients and put back to zero by hand
            twin.get_parameter(name).grad[element_mask(sparsifier.masks[name])] = 0
        other.step()
        with torch.no_grad():
            for name in LAYERS:
                twin.get_parameter(name)[element_mask(sparsifier.masks[name])] = 0
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(p, q), f"{name} moved otherwise at step {i}"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_grown_block_makes_the_first_step_of_a_fresh_optimizer(optimizer):
    model, made, sparsifier = start(optimizer, method=RigL(share=0.5), end=50)
    one_step(model, made, sparsifier)
    before = sparsifier.masks
    grads = one_step(model, made, sparsifier, 1)
    after = sparsifier.masks
    for name in LAYERS:
        grown = element_mask(before[name] & ~after[name])
        assert grown.any()
        fresh = nn.Parameter(torch.zeros(int(grown.sum())))
        fresh.grad = grads[name][grown]
        alone = OPTIMIZERS[optimizer]([fresh])
        alone.step()
        param = model.get_parameter(name)
        assert torch.allclose(param[grown], fresh, rtol=1e-6, atol=0)
        for key, values in state_tensors(alone, fresh).items():
            assert torch.allclose(made.state[param][key][grown], values, rtol=1e-6, atol=0)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd momentum"])
def test_growth_leaves_other_blocks_to_the_optimizer(optimizer):
    """Blocks that were there before and stay move as they would without any growth."""
    model, made, sparsifier = start(optimizer, method=RigL(share=0.5), end=50)
    one_step(model, made, sparsifier)
    before = sparsifier.masks
    twin = copy.deepcopy(model)
    other = OPTIMIZERS[optimizer](twin.parameters())
    other.load_state_dict(copy.deepcopy(made.state_dict()))
    grads = one_step(model, made, sparsifier, 1)
    for name, p in twin.named_parameters():
        p.grad = grads[name]
    other.step()
    for name in LAYERS:
        stayed = element_mask(~before[name] & ~sparsifier.masks[name])
        assert stayed.any()
        assert torch.equal(model.get_parameter(name)[stayed], twin.get_parameter(name)[stayed])


def test_a_grown_block_starts_at_zero():
    model, made, sparsifier = start("adamw", method=RigL(share=0.5), end=50)
    one_step(model, made, sparsifier)
    before = sparsifier.masks
    made.zero_grad()
    loss_of(model, 1).backward()
    sparsifier.before_step()
    for name in LAYERS:
        grown = element_mask(before[name] & ~sparsifier.masks[name])
        assert grown.any()
        assert not model.get_parameter(name)[grown].any()
