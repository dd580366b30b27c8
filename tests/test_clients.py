"""Loops as users write them: a plain one with an average of the weights, and one with two optimizers."""

from __future__ import annotations

import copy

import torch
from small_nets import Net, batches, broken_blocks
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from sparse_lightning import Blocks, Cubic, Neurons, RigL, Sparsifier

STEPS = 24


def data(i):
    """Return a batch by its number."""
    return list(batches())[i % 8]


class PlainLoop:
    """AdamW with clipping, a schedule of the learning rate, an average of the weights, and state of everything."""

    def __init__(self):
        torch.manual_seed(0)
        self.net = Net()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.rate = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        self.ours = Sparsifier(Neurons("up", "down"), Cubic(0.75, begin=0.1, end=0.7), update_every=2)
        self.parts = (self.net, self.optimizer, self.rate, self.average, self.ours)

    def run(self, steps):
        """Train some steps; the average is zero where the weights are."""
        self.ours.attach(self.net, self.optimizer, total_steps=STEPS)
        for i in steps:
            x, y = data(i)
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.net(x), y).backward()
            self.ours.before_step()
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.optimizer.step()
            self.rate.step()
            self.average.update_parameters(self.net)
            self.ours.mask_copy(self.average)
            assert not broken_blocks(self.ours.scopes, self.ours.masks)
        saved = [copy.deepcopy(part.state_dict()) for part in self.parts]
        self.ours.detach()
        return saved


def test_a_plain_loop_with_an_average_of_the_weights():
    loop = PlainLoop()
    loop.run(range(STEPS))
    pruned = (loop.net.down.weight == 0).all(0)
    assert int(pruned.sum()) == 24
    assert torch.equal((loop.average.module.down.weight == 0).all(0), pruned)
    assert torch.equal((loop.average.module.up.weight == 0).all(1), pruned)


def test_a_plain_loop_with_an_average_resumes_bit_for_bit():
    whole = PlainLoop().run(range(STEPS))
    saved = PlainLoop().run(range(11))
    again = PlainLoop()
    for part, state in zip(again.parts, saved, strict=True):
        part.load_state_dict(state)
    resumed = again.run(range(11, STEPS))
    for name, weight in whole[0].items():
        assert torch.equal(resumed[0][name], weight), name
    for name, weight in whole[3].items():
        assert torch.equal(resumed[3][name], weight), f"average of {name}"


def test_two_optimizers_that_share_a_model():
    """One for matrices, one for all else, in one step: masks hold in both, and a step counts once."""
    torch.manual_seed(0)
    net = Net()
    matrices = [p for p in net.parameters() if p.ndim == 2]
    others = [p for p in net.parameters() if p.ndim < 2]
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]
    patterns = [Neurons("up", "down"), Blocks("norm.weight", (4,))]
    ours = Sparsifier(patterns, Cubic(0.5, begin=0.1, end=0.7), method=RigL(0.3), update_every=2)
    ours.attach(net, optimizers, total_steps=STEPS)
    losses = []
    for i in range(STEPS):
        x, y = data(i)
        loss = nn.functional.mse_loss(net(x), y)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        ours.before_step()
        for optimizer in optimizers:
            optimizer.step()
        assert not broken_blocks(ours.scopes, ours.masks)
        losses.append(float(loss.detach()))
    assert ours.step == STEPS
    assert {name: round(float(mask.float().mean()), 3) for name, mask in ours.masks.items()} == dict.fromkeys(
        ours.masks, 0.5
    )
    assert losses[-1] < losses[0]
