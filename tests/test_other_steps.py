"""Optimizers that hold nothing of what is attached are refused; steps of those that are not attached are noticed."""

from __future__ import annotations

import copy

import lightning as L
import pytest
import torch
from small_nets import LAYERS, Net, Twist, batches
from torch import nn

from sparse_lightning import Blocks, Linear, Neurons, Sparsifier, SparsityCallback
from sparse_lightning.errors import SparseLightningError


def sparsifier(end=6):
    return Sparsifier([Blocks(LAYERS, (4, 4))], Linear(0.5, end=end), update_every=2)


def train_and_detach(made, *arguments):
    train(*arguments)
    made.detach()


def train(model, steps, optimizers, before=lambda: None):
    data = list(batches())
    for i in range(steps):
        x, y = data[i % len(data)]
        model.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        before()
        for optimizer in optimizers:
            optimizer.step()


def sgd(model, **changes):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9} | changes)


def test_an_optimizer_of_another_copy_of_the_model_is_refused():
    model = Net()
    stale = sgd(copy.deepcopy(model))
    hooks = len(stale._optimizer_step_post_hooks)
    with pytest.raises(
        SparseLightningError, match=rf"SGD holds none of the parameters of {LAYERS[0]}.*Create the optim"
    ):
        sparsifier().attach(model, stale)
    assert len(stale._optimizer_step_post_hooks) == hooks, "a refused optimizer keeps no hooks"


def test_one_of_several_optimizers_may_hold_nothing():
    model, other = Net(), Net()
    made = sparsifier()
    made.attach(model, [sgd(other), sgd(model)])
    made.detach()


def test_frozen_parameters_need_no_optimizer():
    """As with LoRA: the weights that are pruned do not train, and other parameters do."""
    model, adapter = Net(), nn.Linear(2, 2)
    for param in model.parameters():
        param.requires_grad_(False)
    made = sparsifier()
    made.attach(model, sgd(adapter))
    made.detach()


@pytest.mark.parametrize("calls_before_step", [True, False])
def test_steps_of_another_optimizer_after_those_of_the_attached_one_warn_once(calls_before_step):
    model = Net()
    made, attached, other = sparsifier(), sgd(model), sgd(model, lr=0.01)
    made.attach(model, attached)
    with pytest.warns(UserWarning, match=r"pruned blocks of .* are not zero.*optimizer that is not attached") as found:
        train(model, 12, [attached, other], made.before_step if calls_before_step else lambda: None)
    assert len(found) == 1, "once"


@pytest.mark.parametrize("calls_before_step", [True, False])
def test_steps_of_another_optimizer_alone_warn_once(calls_before_step):
    model = Net()
    made, attached, other = sparsifier(), sgd(model), sgd(model, lr=0.01)
    made.attach(model, attached)
    with pytest.warns(UserWarning, match=r"attached optimizer") as found:
        train_and_detach(made, model, 12, [other], made.before_step if calls_before_step else lambda: None)
    assert len(found) == 1, "once"


@pytest.mark.filterwarnings("ignore:.*configure_optimizers. returned .None.")  # Lightning's own, about the same thing
def test_an_optimizer_that_lightning_does_not_know_is_refused():
    class Manual(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.net = Net()
            self.own = sgd(self.net)

        def training_step(self, batch, index):
            self.own.zero_grad()
            nn.functional.mse_loss(self.net(batch[0]), batch[1]).backward()
            self.own.step()

        def configure_optimizers(self):
            return None

    callback = SparsityCallback([Blocks("net.up.weight", (4, 4))], Linear(0.5, end=6), update_every=2)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = L.Trainer(callbacks=[callback], max_epochs=2, enable_model_summary=False, **options)
    with pytest.raises(SparseLightningError, match=r"holds none of the parameters of net\.up\.weight"):
        trainer.fit(Manual(), list(batches()))


@pytest.mark.parametrize("calls_before_step", [True, False])
def test_steps_of_attached_optimizers_do_not_warn(calls_before_step):
    model = Net()
    made, first, second = sparsifier(), sgd(model, weight_decay=0.1), sgd(model, lr=0.01)
    made.attach(model, [first, second])
    train(model, 12, [first, second], made.before_step if calls_before_step else lambda: None)
    made.detach()


def test_skipped_steps_and_accumulation_do_not_warn():
    model = Net()
    made, attached = sparsifier(), sgd(model)
    made.attach(model, attached)
    for _ in range(4):
        train(model, 5, [], made.before_step)
        train(model, 1, [attached], made.before_step)
    made.detach()


def test_coupled_blocks_are_looked_at_too():
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8))
    made = Sparsifier([Neurons("0", "2")], Linear(0.5, end=4), update_every=1)
    attached, other = sgd(model), Twist(model.parameters())
    made.attach(model, attached)
    with pytest.warns(UserWarning, match="are not zero"):
        train(model, 6, [attached, other], made.before_step)


def test_a_step_of_an_optimizer_that_is_not_attached_is_refused_where_it_is_passed():
    model, other = Net(), Net()
    made = sparsifier()
    made.attach(model, sgd(model))
    for call in (made.before_step, made.update):
        with pytest.raises(SparseLightningError, match=rf"this Adam changes {LAYERS[0]} and is not attached: .*detach"):
            call(torch.optim.Adam(model.parameters()))
    made.before_step(sgd(other))
    made.detach()


class Replacing(L.Callback):
    """Makes new optimizers in the middle of a fit."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 4:
            trainer.strategy.setup_optimizers(trainer)


@pytest.mark.parametrize("end", [3, 7], ids=["after the last update", "before it"])
def test_an_optimizer_that_is_replaced_during_a_fit_is_refused(end, tmp_path):
    callback = SparsityCallback([Blocks(LAYERS, (4, 4))], Linear(0.5, end=end), update_every=1)
    trainer = L.Trainer(
        max_steps=8,
        callbacks=[Replacing(), callback],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    with pytest.raises(
        SparseLightningError, match="is not attached: pruned blocks would not stay zero after its steps"
    ):
        trainer.fit(Net(), batches())
