"""Copies of a Sparsifier and of a model while attached, two fits, other models: with units, experts and refits too."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import sparse_lightning as sl

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


class Experts(nn.Module):
    """A few experts with their router."""

    def __init__(self, count=4):
        super().__init__()
        self.router = nn.Linear(8, count)
        self.experts = nn.ModuleList(mlp() for _ in range(count))

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        return sum(weights[:, i, None] * expert(x) for i, expert in enumerate(self.experts))


def mlp(hidden=16):
    return nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 8))


KINDS = {
    "blocks": (mlp, sl.Blocks("*.weight", (4, 4)), {}, 24),
    "coupled": (mlp, sl.Coupled(inputs=X[:2]), {}, 24),
    "experts": (Experts, sl.Experts("experts", "router"), {}, 6),
    "wanda": (mlp, sl.Blocks("*.weight", (4, 4)), {"criterion": sl.Wanda()}, 24),
    "refit": (mlp, sl.Neurons("0", "2"), {"compensation": sl.Refit()}, 24),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def made(kind, dtype=torch.float32):
    torch.manual_seed(0)
    build, pattern, parts, _ = KINDS[kind]
    net = build().to(dtype)
    return net, adam(net), sl.Sparsifier([pattern], sl.Linear(0.5, end=5), update_every=1, **parts)


def adam(net):
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def train(net, optimizer, ours, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        x = X.to(next(net.parameters()).dtype)
        nn.functional.mse_loss(net(x), x.sin()).backward()
        ours.before_step()
        optimizer.step()
    return ours.sparsity()


def observers(model):
    """The hooks of a model that are not functions of Python's own, those of a pickled copy too."""
    hooks = [h for m in model.modules() for h in [*m._forward_hooks.values(), *m._forward_pre_hooks.values()]]
    return [hook for hook in hooks if getattr(hook, "__module__", "").startswith("sparse_lightning")]


@each_kind
def test_copies_while_attached_are_detached_and_independent(kind):
    net, optimizer, ours = made(kind)
    ours.attach(net, optimizer)
    train(net, optimizer, ours, 4)
    other, pickled, model = copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), copy.deepcopy(net)
    assert not other.is_attached
    assert not pickled.is_attached
    assert bool(observers(net)) == (kind in ("wanda", "refit"))
    assert not observers(model), "a copy of the model observes nothing"
    assert not observers(pickle.loads(pickle.dumps(net)))
    before = copy.deepcopy(model.state_dict())
    assert train(net, optimizer, ours, 4) == 0.5
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for copied in (other, pickled):
        twin = copy.deepcopy(model)
        own = adam(twin)
        copied.attach(twin, own)
        assert copied.step == 4
        assert train(twin, own, copied, 4) == 0.5
        copied.detach()


@each_kind
def test_a_state_resumes_bit_for_bit_and_is_refused_by_a_model_of_other_sizes(kind):
    net, optimizer, ours = made(kind)
    ours.attach(net, optimizer)
    train(net, optimizer, ours, 4)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict(), ours.state_dict()))
    train(net, optimizer, ours, 4)
    again = made(kind)
    for part, state in zip(again, saved, strict=True):
        part.load_state_dict(state)
    again[2].attach(*again[:2])
    train(*again, 4)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again[0].parameters(), strict=True))
    wide, _, fresh = KINDS[kind][0](KINDS[kind][3]), None, made(kind)[2]
    fresh.load_state_dict(saved[2])
    with pytest.raises(sl.CheckpointError, match=r"resume with the (same )?model"):
        fresh.attach(wide, adam(wide))


@each_kind
def test_weights_in_bfloat16_reach_the_target(kind):
    net, optimizer, ours = made(kind, torch.bfloat16)
    ours.attach(net, optimizer)
    assert train(net, optimizer, ours, 7) == 0.5


@each_kind
def test_gradients_that_are_not_finite_postpone_the_update(kind):
    net, optimizer, ours = made(kind)
    ours.attach(net, optimizer)
    train(net, optimizer, ours, 4)
    before = ours.masks
    net(X * (torch.nan if kind == "wanda" else 1)).sum().backward()
    for param in net.parameters():
        param.grad.fill_(torch.nan)
    with pytest.warns(sl.ScoreWarning, match="not finite at step 4: the masks stay as they are"):
        ours.before_step()
    assert all(torch.equal(mask, before[name]) for name, mask in ours.masks.items())
