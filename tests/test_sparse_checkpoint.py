"""SparseModelCheckpoint: the best checkpoint is a sparse one; other callbacks that rank states get a warning."""

from __future__ import annotations

import warnings

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from small_nets import LAYERS, Net, batches

from sparse_lightning import Blocks, Constant, Linear, SparseModelCheckpoint, SparsityCallback


class Worse(Net):
    """Its metric gets worse with every epoch: the best state is the first, which is dense."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 1.0 + self.current_epoch)

    def val_dataloader(self):
        return batches(1)

    def train_dataloader(self):
        return batches()


def fit(folder, *callbacks, schedule=None, epochs=4):
    pruning = SparsityCallback([Blocks(LAYERS, (4, 4))], schedule or Linear(0.5, end=16), update_every=4)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = L.Trainer(callbacks=[pruning, *callbacks], max_epochs=epochs, default_root_dir=folder, **quiet)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer.fit(Worse())
    return [str(each.message) for each in found if "sparsity" in str(each.message)]


def zeros(path):
    state = torch.load(path, weights_only=True)["state_dict"]
    return float((state["up.weight"] == 0).float().mean())


def test_a_plain_checkpoint_keeps_a_dense_state_and_warns(tmp_path):
    """What `SparseModelCheckpoint` is for."""
    plain = ModelCheckpoint(tmp_path, monitor="val_loss")
    [message] = fit(tmp_path, plain)
    assert zeros(plain.best_model_path) < 0.5
    assert "ModelCheckpoint(monitor='val_loss') ranks states before and after pruning" in message
    assert "Use sparse_lightning.SparseModelCheckpoint" in message


@pytest.mark.parametrize("top", [1, 2, -1])
def test_only_states_at_the_final_sparsity_are_ranked(tmp_path, top):
    best = SparseModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=top)
    assert not fit(tmp_path, best)
    assert zeros(best.best_model_path) == 0.5
    assert all(zeros(path) == 0.5 for path in best.best_k_models)
    assert len(best.best_k_models) == (2 if top == -1 else top), "epochs 2 and 3"
    assert "epoch=2" in best.best_model_path, "the best of those that are sparse"


def test_a_last_update_at_the_end_of_the_run_is_ranked(tmp_path):
    best = SparseModelCheckpoint(tmp_path, monitor="val_loss")
    assert not fit(tmp_path, best, schedule=Linear(0.5, end=32))
    assert zeros(best.best_model_path) == 0.5


def test_a_run_that_does_not_get_there_warns(tmp_path):
    best = SparseModelCheckpoint(tmp_path, monitor="val_loss")
    found = fit(tmp_path, best, schedule=Linear(0.5, end=99))
    assert not best.best_model_path
    assert any("SparseModelCheckpoint(monitor='val_loss') saved no best checkpoint" in text for text in found)


def test_without_pruning_every_state_is_ranked(tmp_path):
    best = SparseModelCheckpoint(tmp_path, monitor="val_loss")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    L.Trainer(callbacks=[best], max_epochs=2, **quiet).fit(Worse())
    assert "epoch=0" in best.best_model_path


def test_early_stopping_warns_once(tmp_path):
    stopping = EarlyStopping("val_loss", patience=99)
    [message] = fit(tmp_path, stopping)
    assert "EarlyStopping(monitor='val_loss') may stop the run while pruning makes the metric worse" in message


@pytest.mark.parametrize(
    ("callbacks", "schedule"),
    [
        (lambda: [ModelCheckpoint()], None),
        (lambda: [ModelCheckpoint(monitor="sparsity/actual", mode="max")], None),
        (lambda: [ModelCheckpoint(monitor="val_loss")], Constant(0.5)),
    ],
    ids=["ranks nothing", "ranks by sparsity", "a constant target"],
)
def test_nothing_to_warn_of(tmp_path, callbacks, schedule):
    made = callbacks()
    for each in made:
        each.dirpath = str(tmp_path)
    assert not fit(tmp_path, *made, schedule=schedule)
