"""Runs of the command line that prune by one call of `prune`: what it prunes, resuming, and what is refused."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import lightning as L
import pytest
import torch
from small_nets import Net

from sparse_lightning import OBS, Neurons, OneShot, Refit, prune
from sparse_lightning.app.cli import answer
from sparse_lightning.app.compose import compose
from sparse_lightning.app.factory import Factory
from sparse_lightning.app.one_call import OneCall
from sparse_lightning.app.run import PreparedRun, run
from sparse_lightning.errors import ConfigError
from sparse_lightning.export import Compact

SMALL = ["recipe=prune_once", "data.size=20000", "data.batch_size=4", "data.context=16", "model.context=16"]
SMALL += ["model.width=32", "model.depth=2", "model.heads=4", "trainer.limit_val_batches=2", "logger=none"]
SHORT = [*SMALL, "trainer.limit_train_batches=5", "trainer.enable_progress_bar=false", "calibration_batches=2"]
"""Five steps, of which four are before the call."""


def trained(tmp_path, *overrides):
    """Run the recipe for a moment; return the results, and the last checkpoint."""
    folder = tmp_path / "run"
    run(compose([*SHORT, *overrides]).plain(str(folder)))
    saved = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    return json.loads((folder / "results.json").read_text("utf-8")), saved


def same(one, other):
    """Whether two checkpoints have the same weights and the same state of the optimizer."""
    states = [found["optimizer_states"][0]["state"] for found in (one, other)]
    pairs = [(one["state_dict"], other["state_dict"]), *((states[0][i], states[1][i]) for i in states[0])]
    return all(torch.equal(a[name], b[name]) for a, b in pairs for name in a)


def test_the_recipe_prunes_the_trained_model_as_prune_does(tmp_path):
    """Pruned after the last step, so that nothing is trained after it: the dense run, and a call by hand."""
    results, saved = trained(tmp_path, "schedule.at=5", "export=compact")
    assert results["sparse"].keys() == results["dense"].keys()
    config = compose([*SHORT, "schedule.at=5"]).plain(str(tmp_path / "by hand"))
    model, data = Factory(config).model_and_data()
    dense = torch.load(tmp_path / "run" / "dense" / "checkpoints" / "last.ckpt", weights_only=True)
    model.load_state_dict(dense["state_dict"])
    L.seed_everything(config["seed"], verbose=False)
    batches = list(islice(data.train_dataloader(), 2))
    patterns = Factory(config).sparsity().sparsifier.configuration.patterns
    prune(model, patterns, 0.5, batches, OBS(), Refit(), progress=False)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(saved["state_dict"][name], value, rtol=1e-5, atol=1e-6)
    assert {row["actual"] for row in results["parameters"]} == {0.5}
    for name in ("report.html", "table.txt", "masks.safetensors", "config.yaml"):
        assert (tmp_path / "run" / name).is_file()
    small = Compact.load(tmp_path / "run" / "compact.safetensors", into=Factory(config).model_and_data()[0])
    assert small.blocks[0].mlp.up.out_features == 64


def test_masks_are_held_after_the_call_and_nothing_is_observed_before_it(tmp_path):
    _, saved = trained(tmp_path, "schedule.at=2", "compare_dense=false")
    [state] = [state for key, state in saved["callbacks"].items() if key.startswith("SparsityCallback{")]
    assert (state["last_update"]["step"], state["last_update"]["target"], state["step"]) == (2, 0.5, 5)
    assert "gram_matrices" not in state
    pruned = (saved["state_dict"]["blocks.0.mlp.up.weight"] == 0).all(1)
    assert int(pruned.sum()) == 64
    assert not (saved["state_dict"]["blocks.0.mlp.down.weight"][:, pruned]).any()


def test_the_call_leaves_the_course_of_the_training_as_it_was(tmp_path):
    """At a sparsity of zero, and without compensation, it changes nothing: neither weights nor random numbers."""
    _, saved = trained(tmp_path, "schedule.final=0.0", "compensation=none", "schedule.at=2")
    dense = torch.load(tmp_path / "run" / "dense" / "checkpoints" / "last.ckpt", weights_only=True)
    assert same(saved, dense)


@pytest.mark.filterwarnings("ignore:The dirpath has changed", "ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_run_resumes_before_the_call_and_after_it(before, tmp_path, monkeypatch, capsys):
    """With batches in order, since the order of a shuffled epoch is not in checkpoints."""
    monkeypatch.setattr("sparse_lightning.data.loaders.TwoSets.train_dataloader", lambda self: self._loader(1))
    monkeypatch.chdir(tmp_path)
    options = [*SHORT, "trainer.max_epochs=2", "compare_dense=false", f"schedule.at={7 if before else 3}"]
    keep = "_target_:lightning.pytorch.callbacks.ModelCheckpoint,every_n_epochs:1,save_top_k:-1"
    options.append(f"+trainer.callbacks=[{{{keep},dirpath:'${{folder}}/kept'}}]")
    assert answer([*options, "hydra.run.dir=whole"]) == 0, capsys.readouterr()
    [early] = Path("whole/kept").glob("*step=5.ckpt")
    assert answer([*options, f"ckpt_path='{early}'", "hydra.run.dir=resumed"]) == 0, capsys.readouterr()
    ends = [torch.load(f"{name}/checkpoints/last.ckpt", weights_only=True) for name in ("whole", "resumed")]
    assert same(*ends)
    assert (ends[1]["state_dict"]["blocks.1.mlp.up.weight"] == 0).all(1).sum() == 64


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("schedule=cubic", r"schedule: Cubic has more than one update.*choose schedule=one_shot, or calibration_bat"),
        ("method=rigl", r"method: RigL would do nothing.*choose method=one_shot, or calibration_batches=null"),
        ("budget=global", r"budget: only budget=uniform"),
        ("budget.multiple_of=2", r"budget: only budget=uniform without other values"),
        ("update_every=3", r"update_every: 3 would do nothing"),
        ("observe_every=3", r"observe_every: 3 would do nothing"),
        ("criterion=adam_fisher", r"calibration_batches: optimizer\.exp_avg_sq of .* is missing"),
        ("calibration_batches=0", r"calibration_batches: 0 is too small"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused_before_anything_is_trained(override, said, tmp_path):
    config = compose([*SHORT, override]).plain(str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=said):
        run(config)
    assert not (tmp_path / "run").exists()


def test_without_calibration_batches_the_callback_prunes_in_the_course_of_training(tmp_path):
    config = compose([*SHORT, "calibration_batches=null", "update_every=3", "budget=erk"]).plain(str(tmp_path))
    assert not isinstance(Factory(config).sparsity(), OneCall)


def test_several_training_loaders_and_optimization_by_hand_are_refused():
    class Several(Net):
        def train_dataloader(self):
            return [super().train_dataloader()]

    callback = OneCall([Neurons("up", "down")], OneShot(0.5, at=0), batches=2)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "limit_val_batches": 0}
    trainer = L.Trainer(max_steps=2, callbacks=[callback], accelerator="cpu", enable_model_summary=False, **quiet)
    model = Several()
    model.training_step = lambda batch, i: Net.training_step(model, batch[0], i)
    with pytest.raises(ConfigError, match=r"calibration_batches: Several has several training loaders"):
        trainer.fit(model)
    model.automatic_optimization = False
    with pytest.raises(Exception, match=r"automatic_optimization=False.*: pass step"):
        callback.check(model, trainer)


def test_tensor_parallelism_is_refused_before_anything_is_trained(tmp_path):
    two = ["trainer=fsdp2_tp", "trainer.accelerator=cpu", "trainer.devices=2", "trainer.precision=32-true"]
    with pytest.raises(ConfigError, match=r"trainer\.strategy: tensor parallelism shards the inputs.*trainer=fsdp2"):
        PreparedRun(compose([*SHORT, *two]).plain(str(tmp_path / "run"))).build()
