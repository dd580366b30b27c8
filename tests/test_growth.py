"""Optimizer state: pruned blocks do not affect kept ones, and a grown block starts as with a new optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
from small_nets import LAYERS, OPTIMIZERS, Net, batches
from torch import nn

from sparse_lightning import SET, Blocks, Constant, Gradual, Neurons, RigL, SparseLightningError, Sparsifier
from sparse_lightning.flow.optimizer_state import fresh, state_tensors


def element_mask(mask):
    """The mask of each weight, from the mask of 4×4 blocks."""
    return mask.repeat_interleave(4, 0).repeat_interleave(4, 1)


def loss_of(model, i=0):
    """The loss on one batch."""
    x, y = list(batches())[i % 8]
    return nn.functional.mse_loss(model(x), y)


def start(optimizer, method=None, sparsity=0.5, end=0):
    """A model after three optimizer steps, with a Sparsifier attached."""
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
    """Make one step; return the gradients that the optimizer read."""
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
        assert kept, f"{optimizer} has no state: the test shows nothing"
        for values in kept.values():
            assert not values[element_mask(sparsifier.masks[name])].any()
            assert values[~element_mask(sparsifier.masks[name])].any()


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "twist"])
def test_pruned_blocks_do_not_change_the_update_of_kept_ones(optimizer):
    """Kept weights are updated as in a copy of the model whose pruned gradients and weights are zeroed by hand."""
    model, made, sparsifier = start(optimizer)
    one_step(model, made, sparsifier)
    twin = copy.deepcopy(model)
    other = OPTIMIZERS[optimizer](twin.parameters())
    other.load_state_dict(copy.deepcopy(made.state_dict()))
    for i in range(4):
        one_step(model, made, sparsifier, i)
        other.zero_grad()
        loss_of(twin, i).backward()
        for name in LAYERS:
            twin.get_parameter(name).grad[element_mask(sparsifier.masks[name])] = 0
        other.step()
        with torch.no_grad():
            for name in LAYERS:
                twin.get_parameter(name)[element_mask(sparsifier.masks[name])] = 0
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(p, q), f"{name} differs at step {i}"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_grown_block_makes_the_first_step_of_a_new_optimizer(optimizer):
    model, made, sparsifier = start(optimizer, method=RigL(drop_fraction=0.5), end=50)
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
def test_growth_does_not_change_the_update_of_other_blocks(optimizer):
    """Blocks that are kept before and after the update are trained as without growth."""
    model, made, sparsifier = start(optimizer, method=RigL(drop_fraction=0.5), end=50)
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
    model, made, sparsifier = start("adamw", method=RigL(drop_fraction=0.5), end=50)
    one_step(model, made, sparsifier)
    before = sparsifier.masks
    made.zero_grad()
    loss_of(model, 1).backward()
    sparsifier.before_step()
    for name in LAYERS:
        grown = element_mask(before[name] & ~sparsifier.masks[name])
        assert grown.any()
        assert not model.get_parameter(name)[grown].any()


class Lookahead(torch.optim.Optimizer):
    """A wrapping optimizer: every third step goes back half of the way to where the weights were."""

    def __init__(self, base, shares_state):
        self.base, self.shares_state = base, shares_state
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups
        if shares_state:
            self.state = base.state
        self.steps = {"inner": 0}

    @torch.no_grad()
    def step(self, closure=None):
        """One step of the inner optimizer."""
        self.base.step()
        self.steps["inner"] += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.clone())
                if self.steps["inner"] % 3 == 0:
                    p.copy_(slow.lerp_(p, 0.5))


@pytest.mark.parametrize("shares_state", [False, True])
def test_growth_makes_no_extra_steps_of_a_wrapped_optimizer(shares_state):
    torch.manual_seed(0)
    model = Net()
    made = Lookahead(torch.optim.AdamW(model.parameters(), lr=0.01), shares_state)
    sparsifier = Sparsifier(
        [Blocks(LAYERS, (4, 4))], Constant(0.5, end=50), method=RigL(drop_fraction=0.5), update_every=1
    )
    sparsifier.attach(model, made, total_steps=100)
    for i in range(4):
        masks = {name: mask.clone() for name, mask in sparsifier.masks.items()}
        one_step(model, made, sparsifier, i)
        assert made.steps["inner"] == i + 1, "one step of the wrapping optimizer"
        assert float(made.base.state[model.up.weight]["step"]) == i + 1, "one step of the wrapped optimizer"
        grown = [element_mask(masks[name] & ~sparsifier.masks[name]) for name in LAYERS]
        assert i == 0 or all(each.any() for each in grown), "nothing has grown: the test shows nothing"


def test_what_is_tried_out_shares_nothing_with_the_optimizer():
    weight = nn.Parameter(torch.ones(4, 4))
    weight.grad = torch.ones(4, 4)
    made = Lookahead(torch.optim.AdamW([weight], lr=0.01), shares_state=False)
    made.step()
    kept = copy.deepcopy((weight.detach(), made.state_dict(), made.base.state_dict(), made.steps))
    trial = nn.Parameter(torch.zeros(3))
    trial.grad = torch.ones(3)
    other = fresh(made, made.param_groups[0], [trial])
    other.step()
    assert trial.any(), "the trial made a step"
    now = (weight.detach(), made.state_dict(), made.base.state_dict(), made.steps)
    assert torch.equal(kept[0], now[0])
    assert str(kept[1:]) == str(now[1:]), "the optimizer and the wrapped one are as before"
    assert other.base is not made.base
    assert other.param_groups is other.base.param_groups, "what was one group is one group"


def test_state_of_a_wrapped_optimizer_is_reset_with_its_blocks():
    weight = nn.Parameter(torch.ones(4, 4))
    weight.grad = torch.ones(4, 4)
    made = Lookahead(torch.optim.AdamW([weight], lr=0.01), shares_state=False)
    made.step()
    assert sorted(state_tensors(made, weight)) == ["base.exp_avg", "base.exp_avg_sq", "slow"]


def after_growth(make, method, pattern=None, steps=6, every=2):
    """Train without biases; return the model, its optimizer and its Sparsifier."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Tanh(), nn.Linear(32, 8, bias=False))
    made = make(model.parameters())
    patterns, schedule = [pattern or Blocks("*.weight", (4, 4))], Constant(0.5, end=500)
    sparsifier = Sparsifier(patterns, schedule, method=method, update_every=every)
    sparsifier.attach(model, made)
    for i in range(steps):
        one_step(model, made, sparsifier, i)
    return model, made, sparsifier


@pytest.mark.parametrize("pattern", [None, Neurons("0", "2")], ids=str)
@pytest.mark.parametrize("method", [RigL(0.5), SET(0.5)], ids=str)
def test_growth_with_an_optimizer_of_whole_matrices(method, pattern):
    """Muon takes matrices only: a grown block makes its part of the first step of the whole matrix."""
    model, made, sparsifier = after_growth(lambda params: torch.optim.Muon(params, lr=0.02), method, pattern)
    assert sparsifier.sparsity() == 0.5
    before = {name: mask.clone() for name, mask in sparsifier.masks.items()}
    grads = one_step(model, made, sparsifier, 6)
    if pattern is None:
        for name, mask in sparsifier.masks.items():
            grown = element_mask(before[name] & ~mask)
            assert grown.any(), "nothing has grown: the test shows nothing"
            param = model.get_parameter(name)
            alone = nn.Parameter(torch.zeros_like(param))
            alone.grad = grads[name]
            torch.optim.Muon([alone], lr=0.02).step()
            assert torch.allclose(param[grown], alone[grown], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", [RigL(), SET()], ids=str)
def test_growth_with_an_optimizer_that_needs_a_closure_is_refused_at_once(method):
    text = rf"{type(method).__name__} cannot be used with LBFGS.*closure.*such as Gradual"
    with pytest.raises(SparseLightningError, match=text):
        after_growth(torch.optim.LBFGS, method)
    after_growth(torch.optim.LBFGS, Gradual(), steps=0)


def test_the_first_step_of_a_grown_neuron_is_that_of_a_new_optimizer_when_it_has_a_gradient():
    """Its weights have none until the layer that reads it has made a step. Adam's steps are then those of lr=0.01."""
    model, made, sparsifier = after_growth(lambda p: torch.optim.Adam(p, lr=0.01), SET(0.5), Neurons("0", "2"), 40, 5)
    [before] = [mask.flatten().clone() for mask in sparsifier.masks.values()]
    first = {}
    for i in range(4):
        weights = {"computes": model[0].weight.detach().clone(), "reads": model[2].weight.detach().t().clone()}
        one_step(model, made, sparsifier, i)
        grown = before & ~next(iter(sparsifier.masks.values())).flatten()
        assert grown.any(), "nothing has grown: the test shows nothing"
        for role, now in {"computes": model[0].weight.detach(), "reads": model[2].weight.detach().t()}.items():
            moved = float((now - weights[role])[grown].abs().max())
            if i > 0 and moved and role not in first:
                first[role] = moved
    assert list(first) == ["reads", "computes"]
    assert max(first.values()) < 1.1 * 0.01
