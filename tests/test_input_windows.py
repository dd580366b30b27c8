"""Inputs of layers are observed in the steps before an update, and now and then: what updates need, and little more."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sparse_lightning import (
    NM,
    OBS,
    AverageTaylor,
    Blocks,
    FlowError,
    Linear,
    Magnitude,
    Neurons,
    OneShot,
    Refit,
    ScoreWarning,
    Sparsifier,
    Wanda,
)
from sparse_lightning.engine.scoring import OBSERVED


class Net(nn.Module):
    """A layer for all batches, and one for some of them."""

    def __init__(self, rare=()):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.rare, self.down = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.steps = set(rare)

    def forward(self, x, step):
        x = self.up(x).relu()
        return self.down(self.rare(x) if step in self.steps else x)


def batch(step):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def train(model, sparsifier, steps, call=None, rate=0.0):
    """Attach, and make steps without momentum or noise, so that each is that of its number; return the optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), rate)
    sparsifier.attach(model, optimizer)
    go_on(model, optimizer, steps, call)
    return optimizer


def go_on(model, optimizer, steps, call=None):
    for step in steps:
        optimizer.zero_grad(set_to_none=False)
        (call or model)(batch(step), step).square().mean().backward()
        optimizer.step()


def squares(steps):
    return sum((batch(step).square().sum(0) for step in steps), torch.zeros(8))


@settings(max_examples=20)
@given(at=st.integers(0, 60), seen=st.integers(1, 60))
def test_norms_are_those_of_the_steps_before_an_update_and_of_every_sixteenth(at, seen):
    sparsifier = Sparsifier([Blocks("up.weight", (4, 4))], OneShot(0.5, at=at), Wanda())
    train(Net(), sparsifier, range(seen))
    found = sparsifier.state_dict()["input_norms"]
    since = at + 1 if at < seen else 0
    steps = [s for s in range(since, seen) if s <= at < s + OBSERVED or s % OBSERVED == 0 or s == since]
    if not steps:
        assert found == {}
    else:
        torch.testing.assert_close(found["up.weight"], squares(steps))


@pytest.mark.parametrize("only", [3, 20, 39])
def test_a_layer_that_is_called_once_long_before_an_update_has_norms(only):
    model = Net(rare=[only])
    sparsifier = Sparsifier([NM(["up.weight", "rare.weight"], 2, 4)], OneShot(0.5, at=40), Wanda())
    train(model, sparsifier, range(42))
    assert int((model.rare.weight == 0).sum()) == 32


@pytest.mark.parametrize("stop", [1, 17, 30, 41, 44])
@pytest.mark.parametrize("compensation", [None, Refit()])
def test_a_run_resumes_bit_for_bit_inside_and_outside_of_windows(stop, compensation):
    def made():
        patterns = [Neurons("up", "down")] if compensation else [NM("up.weight", 2, 4)]
        schedule = Linear(0.5, begin=40, end=60)
        return Sparsifier(patterns, schedule, Wanda(), update_every=20, compensation=compensation)

    whole, through = Net(), made()
    train(whole, through, range(64), rate=0.1)
    first, before = Net(), made()
    train(first, before, range(stop), rate=0.1)
    second, after = Net(), made()
    second.load_state_dict(first.state_dict())
    after.load_state_dict(before.state_dict())
    train(second, after, range(stop, 64), rate=0.1)
    for name, value in whole.state_dict().items():
        assert torch.equal(second.state_dict()[name], value), name


UPDATED_AT_THE_END = {
    "N:M": ([NM("up.weight", 2, 4)], Wanda(), None),
    "N:M, refitted": ([NM("up.weight", 2, 4)], Wanda(), Refit()),
    "refitted": ([Neurons("up", "down")], Magnitude(), Refit()),
    "removal errors": ([Neurons("up", "down")], OBS(), None),
}


@pytest.mark.parametrize("name", UPDATED_AT_THE_END)
@pytest.mark.parametrize("every", [1, 19])
def test_the_last_update_of_a_run_has_inputs_if_it_follows_another_one(name, every):
    """There is no forward pass between the two, so that it takes those of the one before, resumed or not."""

    def made():
        patterns, criterion, compensation = UPDATED_AT_THE_END[name]
        schedule = Linear(0.5, begin=0, end=20)
        return Sparsifier(patterns, schedule, criterion, update_every=every, compensation=compensation)

    first, before = Net(), made()
    train(first, before, range(20), rate=0.1)
    second, after = Net(), made()
    second.load_state_dict(first.state_dict())
    after.load_state_dict(before.state_dict())
    after.attach(second, torch.optim.SGD(second.parameters(), 0.1))
    for sparsifier in (before, after):
        sparsifier.finish()
        assert sparsifier.sparsity() == 0.5
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_inputs_of_an_update_are_not_those_of_the_next_one():
    model, sparsifier = Net(), Sparsifier([NM("up.weight", 2, 4)], Linear(0.5, begin=0, end=9), update_every=1)
    train(model, sparsifier, range(5))
    torch.testing.assert_close(sparsifier.state_dict()["input_norms"]["up.weight"], squares([4]))


def test_a_layer_without_inputs_since_the_last_update_postpones_the_next_one():
    model, sparsifier = (
        Net(rare=range(0, 40, 4)),
        Sparsifier([NM(["up.weight", "rare.weight"])], Linear(0.5, end=30), update_every=1),
    )
    with pytest.warns(ScoreWarning, match="rare.weight is missing.* the update is repeated"):
        train(model, sparsifier, range(40))
    assert sparsifier.sparsity() == 0.5
    assert [int((weight == 0).sum()) for weight in (model.up.weight, model.rare.weight)] == [32, 32]


def test_a_layer_that_is_never_called_is_an_error():
    model, sparsifier = Net(), Sparsifier([NM(["up.weight", "rare.weight"])], Linear(0.5, begin=0, end=30))
    with pytest.raises(FlowError, match="no forward pass"):
        train(model, sparsifier, range(40))


@pytest.mark.parametrize("criterion", [Wanda(), OBS()])
def test_an_update_that_is_owed_has_inputs_though_none_is_scheduled_soon(criterion):
    model = Net()
    sparsifier = Sparsifier([Neurons("up", "down")], OneShot(0.5, at=40), criterion)
    optimizer = train(model, sparsifier, range(1))
    sparsifier.seek(100)
    go_on(model, optimizer, range(1, 3))
    [mask] = sparsifier.masks.values()
    assert mask.double().mean() == 0.5


def test_an_update_by_hand_far_from_the_schedule_has_recent_norms():
    sparsifier = Sparsifier([NM("up.weight", 2, 4)], OneShot(0.5, at=500), Wanda())
    model = Net()
    train(model, sparsifier, range(40))
    torch.testing.assert_close(sparsifier.state_dict()["input_norms"]["up.weight"], squares([0, 16, 32]))
    sparsifier.update_now()


@pytest.mark.parametrize("criterion", [Wanda(), AverageTaylor()])
def test_updates_before_the_span_of_a_schedule_are_foreseen(criterion):
    @dataclass(frozen=True)
    class Early(Linear):
        def is_update(self, step, every=1):
            return step in (20, 50)

    model = Net()
    sparsifier = Sparsifier([Blocks("up.weight", (4, 4))], Early(0.5, begin=40, end=60), criterion)
    train(model, sparsifier, range(20))
    state = sparsifier.state_dict()
    if isinstance(criterion, Wanda):
        torch.testing.assert_close(state["input_norms"]["up.weight"], squares([0, *range(5, 20)]))
    else:
        [share] = state["scorer"]["fields"]["share of average"].values()
        torch.testing.assert_close(float(share.max()), 1 - 0.9**9, msg="nine steps are observed before the update")


@pytest.mark.parametrize("odd", [torch.inf, torch.nan])
@pytest.mark.parametrize(
    ("criterion", "compensation"),
    [(Wanda(), None), (OBS(), None), (Magnitude(), Refit())],
    ids=["Wanda", "OBS", "Refit"],
)
@pytest.mark.filterwarnings("ignore:.* the update is repeated at the next step")
def test_one_batch_that_is_not_finite_and_is_skipped_postpones_an_update_by_one_step(criterion, compensation, odd):
    model = Net()
    sparsifier = Sparsifier([Neurons("up", "down")], OneShot(0.5, at=20), criterion, compensation=compensation)
    optimizer = train(model, sparsifier, range(10))
    wrong = batch(10)
    wrong[0, 0] = odd
    model(wrong, 10).square().mean().backward()  # and no step, as a GradScaler does
    go_on(model, optimizer, range(10, 30))
    assert sparsifier.last_update.step == 21
    [mask] = sparsifier.masks.values()
    assert mask.double().mean() == 0.5
    assert all(param.isfinite().all() for param in model.parameters())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of torch's own, while it compiles
def test_blocks_that_are_compiled_one_by_one_stay_within_the_limit_of_dynamo():
    """Each is compiled for itself, and the limit is one of all of them: as many graphs as blocks, and few more."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return x + self.down(self.up(x).relu())

    model = nn.Sequential(*[Block() for _ in range(4)])
    for block in model:
        block.compile(backend="eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    sparsifier = Sparsifier([Blocks("*.weight", (4, 4))], Linear(0.5, begin=20, end=140), Wanda(), update_every=20)
    sparsifier.attach(model, optimizer)
    for step in range(145):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        sparsifier.before_step()
        optimizer.step()
    assert sparsifier.sparsity() == 0.5


def test_a_compiled_model_has_norms():
    def masks(is_compiled):
        model = Net()
        sparsifier = Sparsifier([NM("up.weight", 2, 4)], OneShot(0.5, at=12), Wanda())
        train(model, sparsifier, range(14), torch.compile(model.forward, backend="eager") if is_compiled else None)
        return sparsifier.masks["up.weight"]

    assert torch.equal(masks(True), masks(False))
