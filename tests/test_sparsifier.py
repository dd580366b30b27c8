"""Sparsifier in a plain training loop: what it keeps, its summary, and errors."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from small_nets import LAYERS, Net
from torch import nn

from sparse_lightning import (
    AdamFisher,
    Blocks,
    CheckpointError,
    Constant,
    Cubic,
    FlowError,
    Global,
    Gradual,
    Neurons,
    PatternError,
    Proximal,
    PruneOnce,
    Soft,
    SparseLightningError,
    Sparsifier,
    SparsityError,
    Taylor,
    Uniform,
    Wanda,
)


def attach(net=None, optimizer=None, **changes):
    """A Sparsifier that is attached to a model."""
    net = net or Net()
    settings = {"patterns": [Blocks(LAYERS, (4, 4))], "schedule": Constant(0.5, end=9), "update_every": 2}
    made = Sparsifier(**{**settings, **changes})
    made.attach(net, optimizer or torch.optim.SGD(net.parameters(), lr=0.1))
    return made


def test_nothing_keeps_the_model_alive_after_detach():
    """Lightning's `log` makes a callback refer to the model; the Sparsifier in it must not."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    ours = Sparsifier([Blocks(LAYERS, (4, 4))], Constant(0.5, end=9), criterion=Wanda(), update_every=1)
    ours.attach(net, optimizer)
    for _ in range(2):
        net(torch.ones(2, 16)).sum().backward()
        ours.before_step()
        optimizer.step()
    watch = weakref.ref(net.up.weight)
    ours.detach()
    del net, optimizer
    gc.collect()
    assert watch() is None
    assert ours.state_dict()["step"] == 2


def test_the_summary_shows_the_final_sparsities_of_the_budget():
    for budget, texts in {
        Uniform(overrides={"up.*": 0.25}): ["0.25", "0.75"],
        Global(): ["0.75 shared", "0.75 shared"],
    }.items():
        ours = attach(schedule=Constant(0.75, end=9), budget=budget)
        assert [line.split("  ")[-1].strip() for line in ours.summary().splitlines()[3:]] == texts


def lazy():
    """A model with a lazy layer."""
    net = Net()
    net.up = nn.LazyLinear(32)
    return net


def frozen():
    """A model with a frozen layer."""
    net = Net()
    net.up.requires_grad_(False)
    return net


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: attach(schedule=Cubic(0.5)), SparsityError, "end=0.7 of Cubic .* total_steps is unknown"),
        (lambda: attach(update_every=0), SparsityError, "update_every=0 is out of range: pass 1 or more"),
        (lambda: attach(update_every=2.5), SparsityError, "update_every=2.5 is out of range: .* a whole number"),
        (lambda: attach(observe_every=True), SparsityError, "observe_every=True is out of range"),
        (lambda: attach(seed=None), SparsityError, "seed=None is not a whole number"),
        (lambda: attach(patterns=[Blocks("upp.weight", (4, 4))]), PatternError, "did you mean 'up.weight'"),
        (lambda: attach(patterns=[]), PatternError, "no patterns were passed"),
        (lambda: attach(patterns=[Blocks(LAYERS, (5, 4))]), PatternError, r"up.weight of shape \(32, 16\)"),
        (lambda: attach(patterns=[Neurons("up", "down"), Blocks(LAYERS, (4, 4))]), PatternError, "claimed"),
        (lambda: attach(criterion=AdamFisher()), FlowError, "exp_avg_sq of up.weight is missing"),
        (lambda: attach(frozen(), criterion=Taylor()), FlowError, "needs gradients, but up.weight is frozen"),
        (lambda: attach(lazy()), PatternError, "up.weight is lazy and has no shape yet"),
        (lambda: attach(lazy(), patterns=[Neurons("up", "down")]), PatternError, "up is lazy and has no shape yet"),
        (lambda: Constant(1.5), SparsityError, "1.5"),
        (lambda: attach().attach(Net(), []), SparseLightningError, "already attached to a model"),
        (lambda: Sparsifier([], Constant(0.5), method=Gradual()).target, SparseLightningError, "not attached"),
    ],
)
def test_errors_name_what_is_wrong(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_a_lazy_layer_that_no_pattern_matches_is_ignored():
    net = lazy()
    made = attach(net, torch.optim.SGD(net.down.parameters(), lr=0.1), patterns=[Blocks("down.weight", (4, 4))])
    assert list(made.masks) == ["down.weight"]


class Counted(torch.optim.SGD):
    """Counts the steps of all instances."""

    steps = 0

    def step(self, closure=None):
        """Count, and make the step."""
        Counted.steps += 1
        return super().step(closure)


def test_a_copy_of_the_optimizer_makes_a_step_only_if_scores_read_its_state(monkeypatch):
    monkeypatch.setattr(Counted, "steps", 0)
    net = Net()
    attach(net, Counted(net.parameters(), lr=0.1))
    assert Counted.steps == 0
    with pytest.raises(FlowError, match=r"exp_avg_sq of up\.weight is missing"):
        attach(net, Counted(net.parameters(), lr=0.1), criterion=AdamFisher())
    assert Counted.steps > 0


def test_a_failed_attach_leaves_the_optimizer_without_hooks():
    """With a hook, the first optimizer step would make the first update."""
    for wrong, criterion in {"criterion": AdamFisher(), "checkpoint": Taylor()}.items():
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        made = Sparsifier([Blocks(LAYERS, (4, 4))], Constant(0.5, end=9), criterion)
        if wrong == "checkpoint":
            made.load_state_dict(attach(patterns=[Blocks(LAYERS, (8, 8))], criterion=criterion).state_dict())
        with pytest.raises(FlowError if wrong == "criterion" else CheckpointError):
            made.attach(net, optimizer)
        assert not made.is_attached
        nn.functional.mse_loss(net(torch.ones(1, 16)), torch.ones(1, 8)).backward()
        optimizer.step()
        assert net.up.weight.all(), f"blocks are pruned after an error in the {wrong}"


def methods_in_turn():
    """Pairs of methods of which the second reads something else of a block than the first."""
    remembering = [Soft(3), Proximal(), PruneOnce()]
    return [(one, other) for one in remembering for other in remembering if one is not other]


@pytest.mark.parametrize(("saved", "other"), methods_in_turn(), ids=lambda method: type(method).__name__)
def test_what_one_method_remembers_is_not_read_by_another(saved, other):
    """Proximal would take the fractions of Soft for thresholds, and shrink the whole model to zero."""
    first = attach(criterion="magnitude", method=saved)
    first.update_now()
    state = copy.deepcopy(first.state_dict())
    second = attach(criterion="magnitude", method=other)
    before = second.masks["up.weight"].clone()
    with pytest.raises(
        CheckpointError, match=f"saved with the method {type(saved).__name__}, and {type(other).__name__}"
    ):
        second.load_state_dict(state)
    assert second.masks["up.weight"].equal(before)
    attach(criterion="magnitude", method=Gradual()).load_state_dict(state)
    attach(criterion="magnitude", method=saved).load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda state: {"state_dict": {}, "callbacks": {}},
            "has no masks, .*, but state_dict, callbacks: pass",
        ),
        (lambda state: {k: v for k, v in state.items() if k != "last_update"}, "has no last_update, but criterion, "),
        (
            lambda state: {**state, "masks": cut(state["masks"])},
            r"1 bytes of .* up\.weight, .*\(8, 4\) needs 4",
        ),
    ],
    ids=["a whole checkpoint", "an entry is missing", "a mask is cut short"],
)
def test_a_state_that_is_none_is_refused_before_it_is_loaded(change, text):
    ours = attach(criterion="magnitude")
    ours.update_now()
    before = copy.deepcopy(ours.masks)
    with pytest.raises(CheckpointError, match=text):
        ours.load_state_dict(change(ours.state_dict()))
    assert all(ours.masks[name].equal(mask) for name, mask in before.items())


def cut(masks):
    """Saved masks, of which that of `up.weight` has lost all bytes but one."""
    return {**masks, "up.weight": {**masks["up.weight"], "bits": masks["up.weight"]["bits"][:1]}}


def test_a_run_that_is_resumed_past_the_end_of_a_shorter_schedule_reaches_its_target():
    """Its last update, at step 9, is later than the end of the new schedule, so that none is left in it."""
    long = attach(schedule=Cubic(0.5, end=40), criterion="magnitude", update_every=3)
    long.seek(9)
    long.update_now()
    state = {**long.state_dict(), "step": 10}
    assert state["last_update"]["step"] == 9
    short = attach(schedule=Cubic(0.5, end=8), criterion="magnitude", update_every=3)
    short.load_state_dict(state)
    short.update()
    assert short.sparsity() == 0.5
