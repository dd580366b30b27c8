"""A parameter that is replaced while attached is noticed at the next step, and where the sparsity is read."""

from __future__ import annotations

import collections
import copy

import pytest
import torch
from small_nets import LAYERS, Net, batches
from torch import nn

from sparse_lightning import Blocks, Constant, SparseLightningError, Sparsifier
from sparse_lightning.engine.replaced import PER_STEP, Replaced

TEXT = r"up\.weight.* was replaced by another tensor.*load_state_dict\(assign=True\).*call detach\(\)"


def attached():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ours = Sparsifier(Blocks(LAYERS, (4, 4)), Constant(0.75, end=9), "magnitude", update_every=1)
    ours.attach(net, optimizer)
    step(net, optimizer, ours)
    assert ours.sparsity() == 0.75
    return net, optimizer, ours


def step(net, optimizer, ours):
    x, y = next(iter(batches()))
    optimizer.zero_grad()
    nn.functional.mse_loss(net(x), y).backward()
    optimizer.step()


def assign(net):
    net.load_state_dict(copy.deepcopy(Net().state_dict()), assign=True)


def replace_parameter(net):
    net.up.weight = nn.Parameter(torch.randn_like(net.up.weight))


def replace_module(net):
    net.up = nn.Linear(16, 32)


CHANGES = [assign, replace_parameter, replace_module]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_replaced_parameter_is_noticed_at_the_next_step(change):
    net, optimizer, ours = attached()
    change(net)
    with pytest.raises(SparseLightningError, match=TEXT):
        step(net, optimizer, ours)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_the_sparsity_of_what_is_not_in_the_model_is_not_reported(change):
    net, _, ours = attached()
    change(net)
    for read in (ours.sparsity, ours.sparsities):
        with pytest.raises(SparseLightningError, match=TEXT):
            read()


def test_attaching_again_takes_the_new_parameters():
    net, _, ours = attached()
    assign(net)
    ours.detach()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="they are zeroed now"):
        ours.attach(net, optimizer)
    step(net, optimizer, ours)
    assert ours.sparsity() == 0.75
    assert float((net.up.weight == 0).float().mean()) == 0.75


def test_what_keeps_the_parameters_is_not_an_error():
    """Weights that are loaded in place, other layers, and a module that is wrapped, as torch.compile does."""
    net, optimizer, ours = attached()
    net.load_state_dict(Net().state_dict())
    ours.hold()
    net.norm = nn.LayerNorm(32)
    step(net, optimizer, ours)
    net.up = torch.compile(net.up, backend="eager")
    ours.sparsity()
    ours.sparsity()
    assert ours.sparsity() == 0.75


def test_a_large_model_is_looked_at_in_turn():
    """All parameters that are replaced are noticed at the next step, a single one within a few."""

    def made():
        net = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(2 * PER_STEP)])
        watch = Replaced(net, dict(net.named_parameters()))
        watch.check_some()
        return net, watch

    net, watch = made()
    net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)
    with pytest.raises(SparseLightningError, match="was replaced"):
        watch.check_some()
    for place in (0, PER_STEP, 2 * PER_STEP - 1):
        net, watch = made()
        net[place].weight = nn.Parameter(torch.ones(2, 2))
        with pytest.raises(SparseLightningError, match=rf"{place}\.weight was replaced"):
            collections.deque((watch.check_some() for _ in range(4)), maxlen=0)
