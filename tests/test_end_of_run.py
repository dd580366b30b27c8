"""The end of a run: a last update that is due is made, and a run that misses its target says so."""

from __future__ import annotations

import re
import warnings

import lightning as L
import pytest
import torch
from small_nets import LAYERS, Net, batches
from torch import nn

from sparse_lightning import Blocks, Constant, Linear, ShortRunWarning, Sparsifier, SparsityCallback, Taylor

PATTERNS = [Blocks(LAYERS, (4, 4))]


def zeros(state):
    found = torch.cat([state[name].flatten() for name in LAYERS])
    return float((found == 0).float().mean())


def fit(schedule, callbacks=(), criterion=None, update_every=10, **options):
    """Train; return the model, the callback and the warnings of this package."""
    net = Net()
    pruning = SparsityCallback(PATTERNS, schedule, criterion, update_every=update_every)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    quiet |= {"enable_checkpointing": any(isinstance(c, L.pytorch.callbacks.ModelCheckpoint) for c in callbacks)}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        L.Trainer(callbacks=[pruning, *callbacks], **quiet | options).fit(net, batches())
    return net, pruning, [str(w.message) for w in found if w.category is ShortRunWarning]


@pytest.mark.parametrize("criterion", [None, Taylor()], ids=["magnitude", "taylor"])
@pytest.mark.parametrize("length", [{"max_steps": 64}, {"max_epochs": 8}, {"max_epochs": 8, "max_steps": 99}], ids=str)
def test_an_update_that_is_due_at_the_end_is_made(length, criterion):
    net, pruning, warned = fit(Linear(0.75, end=64), criterion=criterion, **length)
    assert pruning.sparsifier.step == 64
    assert zeros(net.state_dict()) == 0.75
    assert not warned


@pytest.mark.parametrize("end", [60, 63, 1.0, 0.9])
def test_other_ends_reach_the_target_as_well(end):
    net, _, warned = fit(Linear(0.75, end=end), max_steps=60 if end == 60 else 64)
    assert zeros(net.state_dict()) == 0.75
    assert not warned


def test_the_last_checkpoint_holds_the_last_update(tmp_path):
    saving = L.pytorch.callbacks.ModelCheckpoint(tmp_path, save_last=True)
    _, _, warned = fit(Linear(0.75, end=16), [saving], max_epochs=2)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert zeros(saved["state_dict"]) == 0.75
    assert not warned


def test_accumulated_gradients_make_the_last_update_too():
    net, pruning, warned = fit(Linear(0.75, end=12), max_epochs=4, accumulate_grad_batches=3)
    assert pruning.sparsifier.step == 12, "three steps for eight batches"
    assert zeros(net.state_dict()) == 0.75
    assert not warned


class Stop(L.Callback):
    """Stops after some batches, as EarlyStopping does."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = trainer.global_step >= 20


@pytest.mark.parametrize(
    ("schedule", "callbacks", "options", "text"),
    [
        (Linear(0.75, end=80), [], {"max_steps": 40}, "Linear ends at step 80, beyond the run of 40 steps"),
        (
            Linear(0.75, end=40),
            [Stop()],
            {"max_steps": 40},
            "20 optimizer steps of the 40 that were planned.*early",
        ),
    ],
    ids=["end beyond the run", "stopped early"],
)
def test_a_run_that_misses_its_target_warns_by_how_much_and_why(schedule, callbacks, options, text):
    net, pruning, warned = fit(schedule, callbacks, update_every=4, **options)
    reached = pruning.sparsifier.state_dict()["last_update"]["target"]
    assert 0 < reached < 0.75
    assert abs(zeros(net.state_dict()) - reached) < 1 / 16, "up to a block of the smaller weight"
    [message] = warned
    assert f"target sparsity of {reached:.4g}, {0.75 - reached:.4g} below the 0.75" in message
    assert re.search(text, message)


def test_a_run_without_any_update_warns():
    _, _, [message] = fit(Linear(0.75, begin=50, end=80), max_steps=8)
    assert "target sparsity of 0, 0.75 below" in message


def test_a_trial_run_of_one_batch_and_a_constant_target_do_not_warn():
    assert not fit(Linear(0.75, end=80), fast_dev_run=True)[2]
    assert not fit(Constant(0.75, end=80), max_steps=8)[2]


def loop(sparsifier, model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier.attach(model, optimizer)
    data = list(batches())
    for i in range(steps):
        x, y = data[i % len(data)]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        sparsifier.before_step()
        optimizer.step()


def test_finish_makes_the_last_update_of_a_loop():
    model, sparsifier = Net(), Sparsifier(PATTERNS, Linear(0.75, end=60), update_every=10)
    loop(sparsifier, model, 60)
    assert zeros(model.state_dict()) == 0.625
    sparsifier.finish()
    assert zeros(model.state_dict()) == 0.75
    before = sparsifier.last_update
    sparsifier.finish()
    assert sparsifier.last_update is before, "a second call does nothing"
    sparsifier.detach()


def test_finish_says_what_a_loop_has_missed():
    model, sparsifier = Net(), Sparsifier(PATTERNS, Linear(0.75, end=60), update_every=10)
    loop(sparsifier, model, 30)
    with pytest.warns(ShortRunWarning, match=r"target sparsity of 0\.25, 0\.5 below the 0\.75.*ends at step 60"):
        sparsifier.finish()
    assert zeros(model.state_dict()) == 0.25, "an update before the end of the schedule is left to a resumed run"
    sparsifier.detach()


def test_a_run_that_is_resumed_with_a_shorter_length_reaches_its_target():
    def part(steps, total_steps, state):
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        sparsifier = Sparsifier(PATTERNS, Linear(0.75, begin=0.1, end=0.7), Taylor(), update_every=5)
        sparsifier.load_state_dict(state)
        sparsifier.attach(net, optimizer, total_steps)
        for _ in range(steps):
            optimizer.zero_grad()
            net(torch.randn(4, 16)).square().sum().backward()
            sparsifier.before_step()
            optimizer.step()
        sparsifier.finish()
        sparsifier.detach()
        return net, sparsifier.state_dict()

    with pytest.warns(ShortRunWarning):
        _, state = part(40, 2000, {})
    net, state = part(3, 43, state)  # the ramp of this schedule ended at step 29
    assert zeros(net.state_dict()) == 0.75
    assert state["last_update"]["step"] == 40, "at once, and not at the end of the run"
