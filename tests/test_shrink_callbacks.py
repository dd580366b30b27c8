"""Shrink beside what others do in a run: copies and averages of the weights, checkpoints in any hook, Accelerate."""

from __future__ import annotations

import copy

import lightning as L
import pytest
import torch
from hugging_face_runs import trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from test_shrink_runs import QUIET, Plain, callback, fit
from torch import nn
from torch.optim.swa_utils import AveragedModel
from transformers import TrainerCallback

from sparse_lightning import Coupled, Cubic, PatternError, Shrink
from sparse_lightning.callbacks import HuggingFaceCallback

SMALL = Shrink(at_least=0.0)


class Best(L.Callback):
    """Keeps a copy of the model at each validation."""

    def __init__(self):
        self.best, self.sizes = None, []

    def on_validation_end(self, trainer, pl_module):
        self.best = copy.deepcopy(pl_module)
        self.sizes.append(sum(p.numel() for p in self.best.parameters()))


def test_copies_of_the_smaller_model_are_left_alone():
    best, ours = Best(), callback(SMALL)
    net, _ = fit(ours, best)
    assert best.sizes[-1] < best.sizes[0], "no copy was made while units were removed"
    x = torch.randn(4, 16)
    assert torch.allclose(best.best(x), net(x), atol=1e-5), "the last copy is the model at the end of the run"


class First(L.Callback):
    """Keeps a copy of the model as it was when training started."""

    def on_fit_start(self, trainer, pl_module):
        self.first = copy.deepcopy(pl_module)


def test_without_shrink_copies_are_masked():
    first = First()
    net, _ = fit(callback(), first)
    pruned = (net.up.weight == 0).all(1)
    assert pruned.any()
    assert torch.equal((first.first.up.weight == 0).all(1), pruned)


def as_module(net):
    net.ema = AveragedModel(nn.Sequential(net.up, net.down))


def in_list(net):
    net.averages = [AveragedModel(net.up)]


def below(net):
    net.norm.average = {"all": AveragedModel(net.down)}


class Average(L.Callback):
    """Averages a part of the model."""

    def on_fit_start(self, trainer, pl_module):
        self.average = AveragedModel(pl_module.up)


@pytest.mark.parametrize("hold", [as_module, in_list, below])
def test_averages_that_the_model_holds_are_refused_before_training(hold):
    net = Plain()
    hold(net)
    with pytest.raises(PatternError, match="averages of the weights"):
        fit(callback(SMALL), net=net)


@pytest.mark.parametrize("other", [Average(), StochasticWeightAveraging(0.01, swa_epoch_start=1)], ids=["own", "swa"])
def test_averages_that_callbacks_hold_are_refused_before_training(other):
    """The `Average` of a part of the model has other names of parameters than the model."""
    run = L.Trainer(callbacks=[other, callback(SMALL)], max_epochs=2, **QUIET, enable_checkpointing=False)
    with pytest.raises(PatternError, match=f"averages of the weights .* {type(other).__name__} keeps"):
        run.fit(Plain())


class LateAverage(L.Callback):
    """Makes an average of the weights when training has started."""

    def on_train_start(self, trainer, pl_module):
        self.average = AveragedModel(pl_module)


def test_an_average_that_is_made_later_is_an_error_when_units_are_removed():
    with pytest.raises(PatternError, match="is a copy of the whole model"):
        fit(callback(SMALL), LateAverage())


class Saves(L.Callback):
    """Saves checkpoints between the forward and the backward pass, and wherever else a name says."""

    def __init__(self, hook, path):
        self.path, self.broken = path, 0
        setattr(self, hook, lambda trainer, net, *args: self._save(trainer, net))

    def _save(self, trainer, net):
        trainer.save_checkpoint(self.path)
        [ours] = [each for each in trainer.callbacks if hasattr(each, "sparsifier")]
        saved = torch.load(self.path, weights_only=True)["state_dict"]
        [pruned] = ours.sparsifier.masks.values()
        self.broken += int(saved["up.weight"][pruned.reshape(-1)].count_nonzero())


@pytest.mark.parametrize("shrink", [None, SMALL, Shrink(at_least=0.9)], ids=["no", "small", "late"])
@pytest.mark.parametrize("hook", ["on_before_zero_grad", "on_after_backward"])
def test_a_checkpoint_can_be_saved_between_forward_and_backward(hook, shrink, tmp_path):
    """Weights that are written to after the forward pass are an error of autograd, even if zeros stay zeros."""
    saves, ours = Saves(hook, tmp_path / "saved.ckpt"), callback(shrink)
    net, _ = fit(ours, saves)
    wanted, _ = fit(callback(shrink))
    assert saves.broken == 0
    assert (net.up.weight == 0).all(1).any()
    assert all(torch.equal(value, wanted.state_dict()[name]) for name, value in net.state_dict().items())


class Disturbs(Saves):
    """Changes pruned weights before it saves, as swapping in an average does."""

    def _save(self, trainer, net):
        with torch.no_grad():
            net.up.weight.add_(1e-30)
        super()._save(trainer, net)


def test_pruned_weights_that_are_not_zero_are_zeroed_when_they_are_saved(tmp_path):
    """Their squares vanish in fp32."""
    saves = Disturbs("on_train_batch_start", tmp_path / "saved.ckpt")
    fit(callback(), saves)
    assert saves.broken == 0


class Perceptron(nn.Module):
    """Returns its loss, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)
        self.dummy_inputs = {"x": torch.randn(2, 16), "y": torch.zeros(2, 8)}

    def forward(self, x, y):
        made = self.down(torch.relu(self.up(x)))
        return {"loss": nn.functional.mse_loss(made, y), "logits": made}


class Looks(TrainerCallback):
    """Where the forward of the model is from, and how many units it has, after each step."""

    def __init__(self):
        self.modules, self.sizes = [], []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.modules.append(model.forward.__module__)
        self.sizes.append(model.up.out_features)


@pytest.mark.usefixtures("own_precision")
@pytest.mark.parametrize("shrink", [None, SMALL], ids=["no", "small"])
def test_mixed_precision_of_a_trainer_of_transformers(shrink, tmp_path):
    """Accelerate wraps the `forward` of the model, and torch.export does not look into it."""
    looks, ours = Looks(), HuggingFaceCallback([Coupled()], Cubic(0.5, begin=2, end=8), update_every=2, shrink=shrink)
    run = trainer(tmp_path, ours, looks, model=Perceptron(), bf16=True)
    run.train()
    assert {name.partition(".")[0] for name in looks.modules} == {"accelerate"}, "it trains in mixed precision"
    assert int((run.model.up.weight == 0).all(1).sum()) == 16
    assert looks.sizes[-1] == (32 if shrink is None else 16)
