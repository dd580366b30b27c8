"""Observation: a criterion with state sees gradients at its own rhythm; masks change at updates only."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from sparse_lightning import (
    Blocks,
    Constant,
    Criterion,
    Linear,
    Load,
    RigL,
    Save,
    Sparsifier,
    SparsityCallback,
    SparsityError,
    State,
)
from sparse_lightning.app.compose import compose
from sparse_lightning.app.factory import Factory
from sparse_lightning.criteria import EMA, AdamFisher, Fisher, Magnitude, Movement, Sensitivity, Taylor, Wanda
from sparse_lightning.flow import Sum

STEPS = 12


class Loop:
    """A layer in blocks of 2×2, trained on fixed batches."""

    def __init__(self, criterion, schedule=None, **settings) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(8, 8)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        schedule = schedule or Linear(0.5, end=STEPS)
        self.sparsifier = Sparsifier([Blocks("weight", (2, 2))], schedule, criterion, update_every=4, **settings)
        self.sparsifier.attach(self.model, self.optimizer)
        self.batches = torch.randn(STEPS, 4, 8)
        self.seen, self.masks = [], []

    def step(self, i, gradient=None) -> None:
        """Make one step; `seen` gets −Σ w·g of each block."""
        self.optimizer.zero_grad()
        self.model(self.batches[i]).square().mean().backward()
        weight = self.model.weight
        if gradient is not None:
            weight.grad.fill_(gradient)
        products = -(weight.detach() * weight.grad).view(4, 2, 4, 2)
        self.seen.append(products.sum((1, 3)))
        self.sparsifier.before_step()
        self.optimizer.step()
        self.masks.append(self.sparsifier.masks["weight"])

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state of the criterion."""
        return {n: field["weight"].flatten() for n, field in self.sparsifier.state_dict()["scorer"]["fields"].items()}


@pytest.mark.parametrize(
    ("every", "observed"), [(None, range(12)), (1, range(12)), (3, [0, 3, 4, 6, 8, 9]), (99, [0, 4, 8])]
)
def test_state_is_that_of_the_steps_observed_and_of_the_updates(every, observed):
    loop = Loop(Movement(), observe_every=every)
    for i in range(STEPS):
        loop.step(i)
    wanted = sum(loop.seen[i] for i in observed)
    torch.testing.assert_close(loop.state()["saliency"], wanted.flatten())
    changes = [i for i in range(1, STEPS) if not torch.equal(loop.masks[i], loop.masks[i - 1])]
    assert changes == [4, 8], "masks change at updates only"


@pytest.mark.parametrize(
    ("criterion", "rhythm"),
    [
        (Movement(), 1),
        (Fisher(), 1),
        (Sensitivity(), 1),
        (EMA(Taylor()), 1),
        (EMA(Magnitude()), None),
        (EMA(Wanda()), None),
        (EMA(AdamFisher()), None),
        (Magnitude(), None),
        (Taylor(), None),
    ],
    ids=lambda x: type(x).__name__,
)
def test_criteria_with_state_of_gradients_observe_every_step(criterion, rhythm):
    loop = Loop(criterion)
    loop.model(loop.batches[0]).sum().backward()
    loop.optimizer.step()  # state of Adam, and inputs
    observed = []
    runs = loop.sparsifier.state_dict()["scorer"]["runs"]
    for i in range(1, 4):
        loop.step(i)
        now = loop.sparsifier.state_dict()["scorer"]["runs"]
        observed.append(now - runs)
        runs = now
    assert observed == ([1, 1, 1] if rhythm == 1 else [0, 0, 0])


def test_state_is_forgotten_after_the_last_update_and_not_before():
    loop = Loop(Movement(), Linear(0.5, end=6))
    sizes = []
    for i in range(9):
        sizes.append(loop.state()["saliency"].numel())
        loop.step(i)
    assert sizes == [1, *[16] * 6, 1, 1], "the last update is at step 6"


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("criterion", [Movement(), EMA(Taylor()), Sensitivity()], ids=lambda c: type(c).__name__)
def test_gradients_that_are_not_finite_leave_the_state_as_it_was(criterion, value):
    loop = Loop(criterion)
    for i in range(2):
        loop.step(i)
    before = loop.state()
    loop.model.weight.grad.fill_(value)
    loop.sparsifier.update(loop.optimizer)
    after = loop.state()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_step_without_gradients_is_not_observed():
    loop = Loop(Movement())
    loop.step(0)
    before = loop.state()["saliency"]
    loop.optimizer.zero_grad()
    loop.sparsifier.update(loop.optimizer)
    loop.optimizer.step()
    assert torch.equal(before, loop.state()["saliency"])


def test_a_step_that_is_repeated_is_not_observed_twice():
    loop = Loop(Movement())
    loop.step(0)
    once = loop.state()["saliency"]
    torch.testing.assert_close(once, loop.seen[0].flatten())
    loop.sparsifier.seek(4)
    loop.sparsifier.update(loop.optimizer)
    updated = loop.state()["saliency"]
    loop.sparsifier.update(loop.optimizer)  # as after a step that a GradScaler has skipped
    assert torch.equal(updated, loop.state()["saliency"])


def test_nothing_is_observed_after_the_last_update():
    loop = Loop(Movement(), Linear(0.5, end=4))
    for i in range(5):
        loop.step(i)
    at_the_end = loop.state()["saliency"]
    loop.step(5)
    assert torch.equal(at_the_end, loop.state()["saliency"])


@pytest.mark.parametrize("method", [None, RigL()])
@pytest.mark.parametrize("cut", [1, 2, 5, 7])
def test_a_run_that_is_resumed_between_updates_is_the_same(cut, method):
    through = Loop(EMA(Taylor()), method=method)
    for i in range(STEPS):
        through.step(i)
    first = Loop(EMA(Taylor()), method=method)
    for i in range(cut):
        first.step(i)
    saved = copy.deepcopy([first.model.state_dict(), first.optimizer.state_dict(), first.sparsifier.state_dict()])
    second = Loop(EMA(Taylor()), method=method)
    second.model.load_state_dict(saved[0])
    second.optimizer.load_state_dict(saved[1])
    second.sparsifier.load_state_dict(saved[2])
    for i in range(cut, STEPS):
        second.step(i)
    assert torch.equal(through.model.weight, second.model.weight)
    assert all(torch.equal(a, b) for a, b in zip(through.state().values(), second.state().values(), strict=True))


class Count(Criterion):
    """A criterion of a user's: how often it ran."""

    states = {"runs": State()}  # noqa: RUF012 - read only

    def flow(self, x):
        runs = Load()(x.state["runs"]) + 1
        Save()(runs, x.state["runs"])
        return Sum()(x.weight) + runs


def test_a_rhythm_can_be_set_for_any_criterion_with_state():
    loop = Loop(Count(), Constant(0.5, end=100), observe_every=2)
    for i in range(STEPS):
        loop.step(i)
    assert set(loop.state()["runs"].tolist()) == {6.0}


@pytest.mark.parametrize("make", [Sparsifier, SparsityCallback])
def test_a_rhythm_below_one_step_raises_an_error(make):
    with pytest.raises(SparsityError, match=r"observe_every=0 is out of range: pass 1 or more"):
        make([Blocks("weight", (2, 2))], Constant(0.5), observe_every=0)


def test_the_command_line_passes_the_rhythm_on(tmp_path):
    config = compose(["observe_every=3", "criterion=movement"]).plain(str(tmp_path))
    assert Factory(config).sparsity().sparsifier.configuration.observe_every == 3
