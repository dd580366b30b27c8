"""Coupled units that RigL and SET let grow restart where gradients can flow, without a jump of the output."""

from __future__ import annotations

import pytest
import torch
from forked import on_ranks
from many_grown import compare
from torch import nn

from sparse_lightning import SET, Constant, Filters, Gradual, Heads, Neurons, PatternError, RigL, Sparsifier


def data():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(256, 8, generator=generator)
    return x, torch.sin(2 * x) + x.roll(1, 1)


class MLP(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))


def run(method, steps=300):
    """Train at a target of one half; return the model, its Sparsifier, and the last loss."""
    model = MLP()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sparsifier = Sparsifier([Neurons("0", "2")], Constant(0.5, end=200), method=method, update_every=10)
    sparsifier.attach(model, optimizer)
    x, y = data()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        sparsifier.before_step()
        optimizer.step()
    return model, sparsifier, float(loss.detach())


def zero_fraction(model):
    weights = torch.cat([model[0].weight.flatten(), model[0].bias, model[2].weight.flatten()])
    return float((weights == 0).float().mean())


@pytest.mark.parametrize("method", [RigL(0.3), SET(0.3)], ids=str)
def test_grown_neurons_learn(method):
    model, sparsifier, loss = run(method)
    masked = float(torch.cat([mask.flatten() for mask in sparsifier.masks.values()]).float().mean())
    assert masked == 0.5
    assert zero_fraction(model) == masked, "a unit that grew is zero in some of its parameters"
    assert loss < 1.5 * run(Gradual())[2], "grown units do not learn"


def grow(model, pattern, inputs):
    """Train until some units grow; return the Sparsifier, and which units have grown in an update just now."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sparsifier = Sparsifier([pattern], Constant(0.5, end=50), method=SET(0.5), update_every=1)
    sparsifier.attach(model, optimizer)
    model(inputs).square().sum().backward()
    sparsifier.before_step()
    optimizer.step()
    [before] = [mask.clone() for mask in sparsifier.masks.values()]
    model(inputs).square().sum().backward()
    sparsifier.before_step()
    [after] = sparsifier.masks.values()
    return sparsifier, before & ~after


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x):
        return self.attn(x, x, x, need_weights=False)[0]


def cnn():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))


@pytest.mark.parametrize(
    ("make", "pattern", "inputs"),
    [
        (MLP, Neurons("0", "2"), (64, 8)),
        (Attention, Heads("attn"), (2, 5, 16)),
        (cnn, Filters("0", norm="1", into="3"), (2, 3, 9, 9)),
    ],
    ids=["neurons", "heads", "filters"],
)
def test_grown_units_contribute_nothing_at_first_and_have_gradients(make, pattern, inputs):
    torch.manual_seed(1)
    model, x = make(), torch.randn(inputs)
    sparsifier, grown = grow(model, pattern, x)
    assert grown.any(), "nothing has grown: the test shows nothing"
    [scope] = sparsifier.scopes.values()
    [block] = scope.blocks()
    readers = block.readers()
    for spec in block.blocks():
        weights = spec.norms()[block.grid_of(spec, grown)]
        if spec in readers:
            assert not weights.any(), f"{spec} reads the unit, so that the output jumps"
        else:
            assert weights.all(), f"{spec} of grown units is zero"
    model.zero_grad()
    (model(x) - 1).square().sum().backward()
    grads = torch.cat([spec.norms(spec.param.grad)[block.grid_of(spec, grown)] for spec in readers])
    assert grads.all(), "no gradient flows"
    sparsifier.detach()


@pytest.mark.parametrize("pattern", [Filters("0"), Filters("0", norm="1")], ids=str)
@pytest.mark.parametrize("method", [RigL(), SET()], ids=str)
def test_units_that_no_coupled_layer_reads_are_refused(method, pattern):
    """Behind ReLU, a filter whose weights and bias are all zero has no gradient."""
    model = cnn()
    sparsifier = Sparsifier([pattern], Constant(0.5, end=50), method=method)
    text = rf"{type(method).__name__} cannot grow the units of 0 \(filters\).*0\.weight, 0\.bias.*into= of Filters"
    with pytest.raises(PatternError, match=text):
        sparsifier.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    Sparsifier([pattern], Constant(0.5, end=50)).attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_growth_is_reproducible():
    (first, _, _), (again, _, _) = run(RigL(0.3), 100), run(RigL(0.3), 100)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))


def test_a_resumed_run_grows_the_same_units_at_the_same_weights():
    whole, _, _ = run(RigL(0.3), 61)
    model = MLP()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x, y = data()

    def part(model, optimizer, state, steps):
        sparsifier = Sparsifier([Neurons("0", "2")], Constant(0.5, end=200), method=RigL(0.3), update_every=10)
        sparsifier.load_state_dict(state)
        sparsifier.attach(model, optimizer)
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            sparsifier.before_step()
            optimizer.step()
        state = sparsifier.state_dict()
        sparsifier.detach()
        return state

    state = part(model, optimizer, {}, 31)
    other = MLP()
    other.load_state_dict(model.state_dict())
    resumed = torch.optim.Adam(other.parameters(), lr=0.01)
    resumed.load_state_dict(optimizer.state_dict())
    part(other, resumed, state, 30)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), other.parameters(), strict=True))


@pytest.mark.slow
def test_a_sharded_run_grows_the_same_units_at_the_same_weights(tmp_path):
    on_ranks(compare, (str(tmp_path / "meeting"),), 2)
