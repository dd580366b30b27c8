"""The first scores of a run: criteria that read what is not there yet wait, or rank by what they have."""

from __future__ import annotations

import math

import pytest
import torch
from small_nets import Net, batches
from torch import nn

from sparse_lightning import (
    EMA,
    NM,
    AdamFisher,
    Blocks,
    Constant,
    ElementwiseTaylor,
    FlowError,
    Movement,
    ScoreWarning,
    Sensitivity,
    Sparsifier,
    Taylor,
    Wanda,
)
from sparse_lightning.criteria import Fisher
from sparse_lightning.flow import finite

TILES = [Blocks(["up.weight", "down.weight"], (4, 4))]


def steps(net, optimizer, ours, n, start=0, forward=None):
    for x, y in list(batches())[start : start + n]:
        optimizer.zero_grad()
        nn.functional.mse_loss((net if forward is None else forward)(x), y).backward()
        ours.before_step()
        optimizer.step()


@pytest.mark.parametrize("criterion", [AdamFisher(), EMA(AdamFisher())], ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("observe_every", [None, 1])
@pytest.mark.parametrize("calls_before_step", [True, False])
def test_scores_of_optimizer_state_wait_for_the_first_step(criterion, observe_every, calls_before_step):
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    ours = Sparsifier(TILES, Constant(0.5, end=50), criterion, update_every=10, observe_every=observe_every)
    ours.attach(net, optimizer)
    x, y = next(iter(batches()))
    nn.functional.mse_loss(net(x), y).backward()
    if calls_before_step:
        ours.before_step()
        assert ours.sparsity() == 0
        optimizer.step()
        ours.before_step()
        assert ours.last_update.step == 1
    else:
        optimizer.step()
    assert ours.sparsity() == 0.5


@pytest.mark.parametrize(
    "criterion", [Sensitivity(), Movement(), Fisher(), EMA(Taylor())], ids=lambda c: type(c).__name__
)
def test_the_first_run_of_a_criterion_with_state_ranks_by_what_it_has(criterion):
    """Not by rounding noise: scores are those of the same criterion without a past."""
    first = {
        "Sensitivity": lambda w, g: (w * g).abs().sum(-1),
        "Movement": lambda w, g: -(w * g).sum(-1),
        "Fisher": lambda w, g: (w * g).sum(-1).square(),
        "EMA": lambda w, g: (w * g).sum(-1).abs(),
    }[type(criterion).__name__]
    torch.manual_seed(0)
    net = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ours = Sparsifier(Blocks("weight", (1, 16)), Constant(0.5, end=50), criterion)
    ours.attach(net, optimizer)
    net(torch.randn(8, 16)).square().sum().backward()
    expected = first(net.weight.detach().clone(), net.weight.grad).argsort()[:8]
    ours.before_step()
    assert sorted(expected.tolist()) == ours.masks["weight"].flatten().nonzero().flatten().tolist()


def test_wanda_sees_layers_in_evaluation_mode_and_no_validation():
    """As from_pretrained leaves them; what counts is whether gradients are enabled."""
    net = Net().eval()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    ours = Sparsifier([NM("up.weight")], Constant(0.5, end=50), Wanda(), update_every=1)
    ours.attach(net, optimizer)
    with torch.no_grad():
        net.train()(torch.full((4, 16), torch.nan))
    steps(net.eval(), optimizer, ours, 2)
    assert ours.sparsity() == 0.5


def test_a_layer_that_is_not_called_says_what_to_do():
    net = Net()
    net.unused = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    ours = Sparsifier([NM(["up.weight", "unused.weight"])], Constant(0.5, end=50), Wanda(), update_every=1)
    ours.attach(net, optimizer)
    text = r"unused\.weight is missing: no forward pass with gradients enabled has called its layer.*such as Magnitude"
    with pytest.raises(FlowError, match=text):
        steps(net, optimizer, ours, 1)


@pytest.mark.slow
def test_wanda_on_a_model_that_was_compiled_and_run_before():
    net = Net()
    compiled = torch.compile(net, backend="eager")
    x, _ = next(iter(batches()))
    compiled(x).sum().backward()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    ours = Sparsifier([NM("up.weight")], Constant(0.5, end=50), Wanda(), update_every=1)
    ours.attach(net, optimizer)
    steps(net, optimizer, ours, 2, forward=compiled)
    assert ours.sparsity() == 0.5
    ours.detach()
    compiled(x).sum().backward()


class Pair(nn.Module):
    """A generator and a discriminator."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.discriminator = nn.Linear(8, 8), nn.Linear(8, 8)


def adversarial(pair, sparsifiers, n=4):
    """Train both in turn; each gets its gradients cleared before the other makes its step."""
    optimizers = [torch.optim.Adam(part.parameters(), lr=0.01) for part in (pair.generator, pair.discriminator)]
    for ours in sparsifiers:
        ours.attach(pair, optimizers)
    for i in range(n):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(i))
        for optimizer in optimizers:
            pair.zero_grad()
            out = pair.generator(x) if optimizer is optimizers[0] else pair.discriminator(x)
            (out - 1).square().sum().backward()
            for ours in sparsifiers:
                ours.before_step(optimizer)
            optimizer.step()


def test_gradients_that_are_never_there_together_raise_once_at_the_start():
    pair = Pair()
    ours = Sparsifier(Blocks("*.weight", (4, 4)), Constant(0.5, end=50), ElementwiseTaylor(), update_every=1)
    text = r"ElementwiseTaylor needs the gradients of all.*2 optimizers, with zero_grad in turn as in a GAN.*one Spars"
    with pytest.warns(ScoreWarning, match="have no gradient"), pytest.raises(FlowError, match=text):
        adversarial(pair, [ours])


def test_one_sparsifier_for_each_optimizer_works_in_a_gan():
    pair = Pair()
    names = ["generator", "discriminator"]
    made = [Sparsifier(Blocks(f"{name}.weight", (4, 4)), Constant(0.5, end=50), update_every=1) for name in names]
    adversarial(pair, made)
    assert [ours.sparsity() for ours in made] == [0.5, 0.5]
    assert [ours.step for ours in made] == [4, 4]


def test_a_criterion_of_weights_works_for_both_in_a_gan():
    pair = Pair()
    ours = Sparsifier(Blocks("*.weight", (4, 4)), Constant(0.5, end=50), "magnitude", update_every=1)
    adversarial(pair, [ours])
    assert ours.sparsity() == 0.5


@pytest.mark.parametrize("small", [0, finite.SMALL], ids=["large", "small"])
@pytest.mark.parametrize("odd", [None, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_are_not_finite_are_found_in_small_and_in_large_tensors(small, odd, dtype, monkeypatch):
    monkeypatch.setattr(finite, "SMALL", small)
    values = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min, 0.0], dtype=dtype).repeat(5)
    if odd is not None:
        values[7] = odd
    for shaped in (values, values.view(3, 5).t(), values[7].expand(4)):
        assert bool(finite.all_finite([shaped])) == (odd is None)
    assert bool(finite.all_finite([values, torch.ones(2)])) == (odd is None)
    assert bool(finite.all_finite([torch.empty(0)]))
