"""Observation: a criterion with state sees gradients at its own rhythm; masks change at updates only."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sparse_lightning import (
    Blocks,
    Constant,
    Criterion,
    FlowError,
    Join,
    Linear,
    Load,
    RigL,
    Save,
    ScoreWarning,
    Sparsifier,
    SparsityCallback,
    SparsityError,
    State,
    Steps,
)
from sparse_lightning.app.compose import compose
from sparse_lightning.app.factory import Factory
from sparse_lightning.criteria import (
    EMA,
    AdamFisher,
    AverageTaylor,
    Fisher,
    Magnitude,
    Movement,
    Sensitivity,
    Taylor,
    Wanda,
)
from sparse_lightning.engine.configuration import ResolvedConfiguration
from sparse_lightning.engine.observation import Observation
from sparse_lightning.flow import Sum

STEPS = 12


class Loop:
    """A layer in blocks of 2×2, trained on fixed batches."""

    def __init__(self, criterion, schedule=None, update_every=4, **settings) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(8, 8)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        schedule = schedule or Linear(0.5, end=STEPS)
        settings["update_every"] = update_every
        self.sparsifier = Sparsifier([Blocks("weight", (2, 2))], schedule, criterion, **settings)
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
    ("criterion", "update_every", "observed"),
    [
        (Movement(), 25, range(1, 25)),
        (EMA(Movement()), 25, range(1, 25)),
        (Fisher(), 25, range(16, 25)),
        (Fisher(decay=0.5), 25, [24]),
        (Sensitivity(), 25, range(6, 25)),
        (EMA(Taylor()), 25, range(16, 25)),
        (EMA(Fisher(decay=0.75), decay=0.5), 25, [22, 23, 24]),
        (AverageTaylor(), 25, range(16, 25)),
        (AverageTaylor(), 9, range(1, 9)),
        (AverageTaylor(decay=0), 9, []),
        (EMA(Magnitude()), 9, []),
        (EMA(Wanda()), 9, []),
        (EMA(AdamFisher()), 9, []),
        (Magnitude(), 9, []),
        (Taylor(), 9, []),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Criterion) else None,
)
def test_sums_see_all_gradients_and_moving_averages_the_last_before_an_update(criterion, update_every, observed):
    loop = Loop(criterion, Constant(0.5, end=2 * update_every), update_every)
    loop.model(loop.batches[0]).sum().backward()
    loop.optimizer.step()  # state of Adam, and inputs
    seen = []
    runs = loop.sparsifier.state_dict()["scorer"]["runs"]
    for i in range(1, update_every):
        loop.step(i % STEPS)
        now = loop.sparsifier.state_dict()["scorer"]["runs"]
        seen += [i] * (now - runs)
        runs = now
    assert seen == list(observed)


def average(seen, decay=0.9):
    """The moving average of |Σ w·g| with its bias removed."""
    shares = [decay ** (len(seen) - 1 - i) for i in range(len(seen))]
    return sum(share * each.abs() for share, each in zip(shares, seen, strict=True)) / sum(shares)


def state_after(loop, last):
    """Train up to a step; return the average that the criterion has then."""
    for i in range(last + 1):
        loop.step(i % STEPS)
    return averaged(loop)


def averaged(loop):
    """The average that the criterion has."""
    found = loop.state()
    return (found["average"] / found["share of average"]).view(4, 4)


@pytest.mark.parametrize(
    ("update_every", "last", "first_of_window"), [(5, 10, 7), (5, 8, 7), (4, 8, 0), (3, 9, 0), (11, 11, 8)]
)
def test_an_average_is_that_of_the_window_and_of_no_earlier_step(update_every, last, first_of_window):
    """Windows of four steps; where they meet, nothing is forgotten."""
    loop = Loop(EMA(Taylor(), decay=0.75), Linear(0.5, end=99), update_every)
    found = state_after(loop, last)
    torch.testing.assert_close(found, average(loop.seen[first_of_window : last + 1], 0.75))


def test_an_update_that_is_postponed_keeps_the_window():
    loop = Loop(EMA(Taylor(), decay=0.75), Linear(0.5, end=99), update_every=5)
    for i in range(5):
        loop.step(i)
    with pytest.warns(ScoreWarning, match="the update is repeated at the next step"):
        loop.step(5, gradient=math.nan)
    with torch.no_grad():
        loop.model.weight.copy_(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))
    loop.step(6)
    torch.testing.assert_close(averaged(loop), average([*loop.seen[2:5], loop.seen[6]], 0.75))
    assert loop.sparsifier.last_update.step == 6


def test_an_update_between_windows_is_decided_by_its_own_gradients():
    loop = Loop(EMA(Taylor(), decay=0.75), Linear(0.5, end=99), update_every=10)
    for i in range(4):
        loop.step(i)
    loop.sparsifier.update_now()
    weight = loop.model.weight
    now = (weight.detach() * weight.grad).view(4, 2, 4, 2).sum((1, 3)).abs()
    torch.testing.assert_close(averaged(loop), now)


@pytest.mark.parametrize("steps", [0, -3, 2.5, True, "ten"])
def test_a_criterion_that_observes_no_number_of_steps_is_refused(steps):
    criterion = EMA(Taylor())
    criterion.observed_steps = steps
    with pytest.raises(FlowError, match=f"observed_steps={steps!r} of a criterion is not a number of steps"):
        Loop(criterion)


def observation_of(criterion, schedule, update_every):
    """The steps that are observed by default."""
    given = Sparsifier([], schedule, criterion, update_every=update_every).configuration
    return Observation(ResolvedConfiguration(**vars(given)), [criterion])


SCHEDULES = [
    Linear(0.5, begin=7, end=60),
    Steps({5: 0.2, 31: 0.4, 64: 0.6}),
    Join([Linear(0.5, begin=3, end=20), Linear(0.8, begin=4, end=30)], [25]),
]


@given(
    schedule=st.sampled_from(SCHEDULES),
    update_every=st.integers(1, 40),
    window=st.integers(1, 30),
    steps=st.one_of(st.just(list(range(70))), st.lists(st.integers(0, 70), max_size=70)),
)
def test_a_moving_average_observes_the_window_before_each_update_in_whatever_order_steps_come(
    schedule, update_every, window, steps
):
    observation = observation_of(EMA(Taylor(), decay=1 - 1 / window), schedule, update_every)
    for step in steps:
        later = [at for at in range(step + 1, step + window) if schedule.is_update(at, update_every)]
        assert observation.includes(step) == (bool(later) and step < schedule.span[1]), step


def test_few_steps_are_asked_for_whether_they_have_an_update_however_far_the_next_one_is(monkeypatch):
    asked = []
    plain = Constant.is_update
    monkeypatch.setattr(Constant, "is_update", lambda *arguments: asked.append(1) or plain(*arguments))
    observation = observation_of(AverageTaylor(), Constant(0.5, end=10**12), 10**12)
    assert not any(observation.includes(step) for step in range(100))
    assert len(asked) <= 200


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
