"""Shrink in real Trainers, of Lightning and of transformers, and on the command line."""

from __future__ import annotations

import json
import os

import lightning as L
import pytest
import torch
from hugging_face_runs import Rows
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from small_nets import BATCH, Net
from test_resume import differences
from torch import nn
from transformers import Trainer as HuggingFaceTrainer
from transformers import TrainingArguments

from sparse_lightning import Coupled, Cubic, PatternError, Shrink, SparseLightningError, SparsityCallback
from sparse_lightning.app.launch import launch
from sparse_lightning.callbacks import HuggingFaceCallback

STEPS = 16
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


class Plain(Net):
    """Without the norm, which pins the units between its layers."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.norm = nn.Identity()
        self.example_input_array = torch.zeros(2, 16)


class Sizes(L.Callback):
    """The number of weights after each step, and in validation."""

    def __init__(self):
        self.found, self.validated = [], []

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.found.append(sum(p.numel() for p in pl_module.parameters()))

    def on_validation_end(self, trainer, pl_module):
        self.validated.append(sum(p.numel() for p in pl_module.parameters()))


def callback(shrink=None, **parts):
    return SparsityCallback([Coupled()], Cubic(0.75, begin=2, end=12), update_every=2, shrink=shrink, **parts)


def fit(ours, *callbacks, net=None, **options):
    torch.manual_seed(3)
    net = Plain() if net is None else net
    defaults = {"max_steps": STEPS, "limit_val_batches": 1, "val_check_interval": 4, "enable_checkpointing": False}
    trainer = L.Trainer(callbacks=[ours, *callbacks], **{**defaults, **QUIET, **options})
    trainer.fit(net)
    return net, trainer


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}], ids=str)
def test_a_fit_ends_with_the_model_of_a_fit_without_shrink(options):
    sizes, small, plain = Sizes(), callback(Shrink(at_least=0.0)), callback()
    found, _ = fit(small, sizes, **options)
    wanted, _ = fit(plain, **options)
    assert min(sizes.found) < max(sizes.found), "nothing was removed while the model was trained"
    assert min(sizes.validated) < max(sizes.found), "validation runs on the smaller model"
    assert str(found) == str(wanted)
    for name, value in found.state_dict().items():
        assert torch.allclose(value, wanted.state_dict()[name], rtol=1e-3, atol=1e-5), name
    masks = plain.sparsifier.masks
    assert all(mask.equal(masks[name]) for name, mask in small.sparsifier.masks.items())


@pytest.mark.parametrize("weights_only", [False, True])
def test_every_checkpoint_loads_into_the_plain_model(weights_only, tmp_path):
    saving = ModelCheckpoint(
        tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1, save_weights_only=weights_only
    )
    fit(callback(Shrink(at_least=0.0)), saving, enable_checkpointing=True)
    files = sorted(tmp_path.glob("step=*.ckpt"), key=lambda path: int(path.stem[5:]))
    assert len(files) == STEPS
    for file in files:
        saved = torch.load(file, weights_only=True)
        Plain().load_state_dict(saved["state_dict"])
        if not weights_only:
            net = Plain()
            optimizer = net.configure_optimizers()
            optimizer.load_state_dict(saved["optimizer_states"][0])
            shapes = [{tuple(v.shape) for v in optimizer.state[p].values() if v.ndim} for p in net.parameters()]
            assert shapes == [{tuple(p.shape)} for p in net.parameters()]


class LoadsAndSaves(L.Callback):
    """Loads dense weights in the middle of a run, and saves at once."""

    def __init__(self, path, step):
        self.path, self.step = path, step

    def on_train_batch_start(self, trainer, pl_module, *args):
        if trainer.global_step == self.step:
            dense = {key: torch.full_like(value, 0.3) for key, value in pl_module.state_dict().items()}
            pl_module.load_state_dict(dense)
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("at_least", [None, 0.0, 0.4])
def test_pruned_units_are_zero_in_a_checkpoint_whatever_was_loaded_before(at_least, tmp_path):
    saving = LoadsAndSaves(tmp_path / "saved.ckpt", 11)
    fit(callback(None if at_least is None else Shrink(at_least=at_least)), saving)
    weight = torch.load(tmp_path / "saved.ckpt", weights_only=True)["state_dict"]["up.weight"]
    assert int((weight == 0).all(1).sum()) == 23, "as many as in a run that does not shrink"
    assert weight.shape == (32, 16)


def test_a_second_fit_and_a_longer_one_start_small(tmp_path):
    ours, sizes = callback(Shrink(at_least=0.0)), Sizes()
    net, trainer = fit(ours)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    whole = sum(p.numel() for p in net.parameters())
    fit(ours, sizes, net=net)
    assert sizes.found[0] < whole, "masks of the first fit are held from the first step of the second"
    assert sum(p.numel() for p in net.parameters()) == whole
    again = Sizes()
    longer = L.Trainer(
        callbacks=[callback(Shrink(at_least=0.0)), again],
        max_steps=STEPS + 4,
        limit_val_batches=0,
        enable_checkpointing=False,
        **QUIET,
    )
    longer.fit(Plain(), ckpt_path=tmp_path / "end.ckpt")
    assert len(again.found) == 4
    assert again.found[0] < whole, "a run that is resumed after its end starts small"


def test_a_run_that_is_stopped_by_an_error_leaves_the_whole_model():
    class Fails(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            if trainer.global_step == 13:
                raise RuntimeError("out of something")

    net = Plain()
    whole = {name: p.shape for name, p in net.named_parameters()}
    with pytest.raises(RuntimeError, match="out of something"):
        fit(callback(Shrink(at_least=0.0)), Fails(), net=net)
    assert {name: p.shape for name, p in net.named_parameters()} == whole
    assert (net.up.weight == 0).all(1).any()


def test_averages_of_the_weights_are_refused():
    with pytest.raises(PatternError, match="shrink cannot be used with averages of the weights"):
        fit(callback(Shrink()), EMAWeightAveraging())


def test_a_loop_with_several_processes_that_does_not_wrap_again_is_refused(monkeypatch):
    from sparse_lightning import Sparsifier
    from sparse_lightning.engine import shrinkable

    monkeypatch.setattr(shrinkable, "has_others", lambda: True)
    net = Plain()
    with pytest.raises(SparseLightningError, match="needs something that wraps the model again"):
        Sparsifier([Coupled()], 0.5, shrink=Shrink()).attach(net, net.configure_optimizers())


@pytest.fixture
def own_group(monkeypatch):
    """Lightning starts a process group, and leaves it and its variables to the end of the process."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("own_group")
def test_ddp_in_one_process_is_wrapped_again():
    """As many devices as there are here; two are in test_distributed.py."""
    sizes = Sizes()
    strategy = DDPStrategy(process_group_backend="gloo")
    found, _ = fit(callback(Shrink(at_least=0.0)), sizes, strategy=strategy, devices=1, limit_val_batches=0)
    plain = DDPStrategy(process_group_backend="gloo")
    wanted, _ = fit(callback(), strategy=plain, devices=1, limit_val_batches=0)
    assert min(sizes.found) < max(sizes.found)
    for name, value in found.state_dict().items():
        assert torch.allclose(value, wanted.state_dict()[name], rtol=1e-3, atol=1e-5), name


class WithLoss(nn.Module):
    """Returns its loss, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.net = Plain()

    def forward(self, x, y):
        """The squared error."""
        return {"loss": nn.functional.mse_loss(self.net(x), y)}


def hugging_face(folder, shrink=None, resume=None, **options):
    torch.manual_seed(3)
    example = {"x": torch.zeros(2, 16), "y": torch.zeros(2, 8)}
    ours = HuggingFaceCallback([Coupled(inputs=example)], Cubic(0.75, begin=2, end=10), update_every=2, shrink=shrink)
    saving = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4, "report_to": []}
    fixed = {"max_steps": STEPS, "per_device_train_batch_size": BATCH, "use_cpu": True, "disable_tqdm": True}
    arguments = TrainingArguments(str(folder), label_names=["y"], **fixed, **saving, **options)
    data = Rows(128)
    model = WithLoss()
    HuggingFaceTrainer(model, arguments, train_dataset=data, eval_dataset=data, callbacks=[ours]).train(
        resume_from_checkpoint=resume
    )
    return model, ours.sparsifier


def test_a_trainer_of_transformers(tmp_path):
    """Checkpoints are whole, a resumed run ends bit for bit as the one that was not, and the best model is the best."""
    found, sparsifier = hugging_face(tmp_path / "small", Shrink(at_least=0.0), load_best_model_at_end=False)
    wanted, _ = hugging_face(tmp_path / "plain")
    for name, value in found.state_dict().items():
        assert torch.allclose(value, wanted.state_dict()[name], rtol=1e-3, atol=1e-5), name
    resumed, _ = hugging_face(tmp_path / "small", Shrink(at_least=0.0), str(tmp_path / "small" / "checkpoint-12"))
    assert not differences(dict(resumed.state_dict()), dict(found.state_dict()))
    assert sparsifier.masks


def test_a_model_that_the_trainer_of_transformers_compiles_is_refused(tmp_path):
    with pytest.raises(SparseLightningError, match="shrink cannot be used with torch_compile=True"):
        hugging_face(tmp_path, Shrink(), torch_compile=True)


@pytest.mark.filterwarnings("ignore:.*the best checkpoint, was saved before the final sparsity.*")
def test_the_best_model_of_a_trainer_has_the_units_that_were_removed_after_it(tmp_path):
    """A denser checkpoint is the best: its weights are loaded into a model that has got smaller since."""
    parts = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "learning_rate": 0.0}
    parts["greater_is_better"] = True  # of untrained weights, those of the densest model
    found, _ = hugging_face(tmp_path / "small", Shrink(at_least=0.0), **parts)
    wanted, _ = hugging_face(tmp_path / "plain", **parts)
    assert not differences(dict(found.state_dict()), dict(wanted.state_dict()))
    assert int((found.net.up.weight == 0).all(1).sum()) < 24, "the best state is not the last one"


@pytest.mark.slow
def test_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    typed = ["pattern=coupled", "shrink=units", "trainer.max_epochs=1", "compare_dense=false", "schedule.final=0.75"]
    launch([*typed, "export=compact", "hydra.run.dir=run"])
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["actual"] == pytest.approx(0.75, abs=0.01)
    saved = torch.load(next((tmp_path / "run" / "checkpoints").glob("*.ckpt")), weights_only=True)
    [state] = [value for key, value in saved["callbacks"].items() if key.startswith("SparsityCallback")]
    assert state["removed"], "units were removed while the model was trained"
