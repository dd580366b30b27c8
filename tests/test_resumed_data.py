"""Runs that are resumed within an epoch see the batches, and draw the random numbers, that they had left."""

from __future__ import annotations

import random
from itertools import chain
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from law_examples import EXAMPLES, USUAL
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import TensorDataset

from sparse_lightning import Blocks, Cubic, SparsityCallback
from sparse_lightning.app.cli import answer
from sparse_lightning.callbacks.random_numbers import RandomNumbers
from sparse_lightning.data.loaders import TwoSets
from sparse_lightning.data.resumable import Shuffled

OWN = str(Path(__file__).parent / "own_conf")

# All runs that are resumed save to one folder, and read in few processes.
EXPECTED = "Checkpoint directory .* exists and is not empty", "The dirpath has changed", ".*does not have many workers"
pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in EXPECTED]


class Numbers(TwoSets):
    """Six batches of four, and two numbers that are left over; each is read with noise."""

    def sets(self):
        return Noisy(torch.arange(26.0).view(26, 1)), TensorDataset(torch.zeros(8, 1))


class Noisy(TensorDataset):
    def __getitem__(self, index):
        return (self.tensors[0][index] + torch.rand(()) / 2,)


class Notes(L.LightningModule):
    """Notes its batches and what it draws."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 8)
        self.seen = []

    def training_step(self, batch, i):
        drawn = float(torch.rand(())), random.random(), np.random.rand()
        self.seen.append((self.global_step, batch[0].flatten().tolist(), drawn))
        return self.linear(batch[0] / 26).square().mean()

    def validation_step(self, batch, i):
        """Reads a batch."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def train(folder, ckpt_path=None, workers=0, prunes=False, **settings):
    """Train, with a checkpoint after every step; return what was seen."""
    L.seed_everything(3, verbose=False)
    every = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    pruning = [SparsityCallback([Blocks("linear.weight", (1, 1))], Cubic(0.5, begin=1, end=8))] if prunes else []
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(accelerator="cpu", callbacks=[every, RandomNumbers(), *pruning], **quiet, **settings)
    net = Notes()
    trainer.fit(net, Numbers(4, workers), ckpt_path=ckpt_path)
    return net.seen


RUNS = {
    "epochs": {"max_epochs": 3},
    "pruned": {"max_epochs": 3, "prunes": True},
    "steps": {"max_steps": 16},
    "short epochs": {"max_epochs": 4, "limit_train_batches": 4},
    "short epochs by steps": {"max_steps": 13, "limit_train_batches": 4},
    "validation within epochs": {"max_epochs": 3, "val_check_interval": 2},
    "accumulated gradients": {"max_epochs": 3, "accumulate_grad_batches": 3},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_resumes_after_any_step(name, tmp_path):
    whole = train(tmp_path / "whole", **RUNS[name])
    steps = sorted({step for step, _, _ in whole} - {0})
    for step in steps if EXAMPLES > USUAL else steps[:: max(1, len(steps) // 7)]:
        found = train(tmp_path / "resumed", tmp_path / "whole" / f"step={step}.ckpt", **RUNS[name])
        assert found == [seen for seen in whole if seen[0] >= step], f"resumed after step {step}"


@pytest.mark.slow
def test_a_run_that_reads_in_another_process_resumes(tmp_path):
    whole = train(tmp_path / "whole", workers=1, max_epochs=2)
    for step in (4, 6, 9):
        found = train(tmp_path / "resumed", tmp_path / "whole" / f"step={step}.ckpt", workers=1, max_epochs=2)
        assert found == [seen for seen in whole if seen[0] >= step], f"resumed after step {step}"


def test_a_run_that_is_stopped_before_its_first_batch_is_where_it_was(tmp_path):
    L.seed_everything(3, verbose=False)
    whole = list(Numbers(4).train_dataloader())
    loader = Numbers(4).train_dataloader()
    loader.load_state_dict({"epoch": 0, "batches": 4})
    assert loader.state_dict() == {"epoch": 0, "batches": 4}
    torch.manual_seed(5)
    before = torch.get_rng_state()
    rest = iter(loader)
    first = next(rest)
    assert not torch.equal(before, torch.get_rng_state()), "this batch draws its noise, those before it do not"
    assert torch.equal(first[0].int(), whole[4][0].int())
    assert loader.state_dict() == {"epoch": 0, "batches": 5}
    assert len(list(rest)) == 1


@given(st.integers(1, 60), st.integers(0, 2**32), st.integers(0, 40))
def test_orders_are_permutations_of_the_seed_and_the_epoch(size, seed, epoch):
    orders = [Shuffled(range(size), seed) for _ in range(2)]
    for order in orders:
        order.set_epoch(epoch)
    first, second = map(list, orders)
    assert first == second
    assert sorted(first) == list(range(size))


def test_orders_of_epochs_and_seeds_differ():
    orders = [Shuffled(range(40), seed) for seed in range(6)]
    seen = set()
    for epoch, order in chain.from_iterable(((epoch, order) for order in orders) for epoch in range(6)):
        order.set_epoch(epoch)
        seen.add(tuple(order))
    assert len(seen) == 36


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the run ended at a target sparsity")
def test_the_command_line_resumes_within_an_epoch(tmp_path, monkeypatch):
    """From a checkpoint after the eighth step, the second of an epoch, it ends bit for bit as a run without a stop."""
    monkeypatch.chdir(tmp_path)
    schedule = ["schedule.begin=2", "schedule.end=14", "trainer.max_epochs=3", "compare_dense=false"]
    typed = ["--config-dir", OWN, "recipe=small", *schedule]
    assert answer([*typed, "folder=whole"]) == 0
    assert answer([*typed, "folder=stopped", "trainer.max_steps=8"]) == 0
    (tmp_path / "stopped/checkpoints/step=8.ckpt").rename("eighth.ckpt")
    assert answer([*typed, "folder=resumed", "ckpt_path=eighth.ckpt"]) == 0
    whole, resumed = (torch.load(tmp_path / name / "checkpoints" / "last.ckpt") for name in ("whole", "resumed"))
    assert whole["global_step"] == resumed["global_step"] == 18
    for name, weight in whole["state_dict"].items():
        assert torch.equal(weight, resumed["state_dict"][name]), name
