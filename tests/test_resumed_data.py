"""Runs that are resumed within an epoch see the batches, make the validations, and draw the random numbers, that they
had left."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked import FORKED, on_ranks
from hypothesis import given
from hypothesis import strategies as st
from law_examples import EXAMPLES, USUAL
from many_jobs import group
from torch import nn
from torch.utils.data import TensorDataset

from sparse_lightning import Blocks, Cubic, SparsityCallback
from sparse_lightning.app.cli import answer
from sparse_lightning.callbacks.checkpoint import StepCheckpoint
from sparse_lightning.callbacks.interruption import Interruption
from sparse_lightning.callbacks.random_numbers import KEY, RandomNumbers
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


class BothNoisy(TwoSets):
    """Two sets of the same numbers, read with noise."""

    def sets(self):
        return Noisy(torch.zeros(4, 1)), Noisy(torch.zeros(4, 1))


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
        self.seen.append((self.global_step, "trained", batch[0].flatten().tolist(), drawn))
        return self.linear(batch[0] / 26).square().mean()

    def validation_step(self, batch, i):
        if not self.trainer.sanity_checking:
            self.seen.append((self.global_step, "validated", i, float(torch.rand(()))))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def train(folder, ckpt_path=None, workers=0, prunes=False, stops=None, **settings):
    """Train, with a checkpoint after every step; return what was seen."""
    L.seed_everything(3, verbose=False)
    every = StepCheckpoint(1)
    every.dirpath, every.save_top_k = str(folder), -1
    pruning = [SparsityCallback([Blocks("linear.weight", (1, 1))], Cubic(0.5, begin=1, end=8))] if prunes else []
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    others = [RandomNumbers(), *pruning, *([] if stops is None else [stops])]
    trainer = L.Trainer(accelerator="cpu", callbacks=[every, *others], **quiet, **settings)
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
    "validation within a step": {"max_epochs": 3, "accumulate_grad_batches": 4, "val_check_interval": 3},
}


def left(whole, step):
    """Return what a run that resumes after a step has to do: a validation that followed it was made."""
    return whole[next((i for i, seen in enumerate(whole) if seen[0] >= step and seen[1] == "trained"), len(whole)) :]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_resumes_after_any_step(name, tmp_path):
    whole = train(tmp_path / "whole", **RUNS[name])
    steps = sorted({seen[0] for seen in whole if seen[1] == "trained"} - {0})
    assert {"trained", "validated"} == {seen[1] for seen in whole}
    for step in steps if EXAMPLES > USUAL else steps[:: max(1, len(steps) // 7)]:
        found = train(tmp_path / "resumed", tmp_path / "whole" / f"step={step}.ckpt", **RUNS[name])
        assert found == left(whole, step), f"resumed after step {step}"


class StopsAfter(L.Callback):
    """Raises an error after some batches."""

    def __init__(self, batches):
        self.batches = batches

    def on_train_batch_end(self, *args):
        self.batches -= 1
        if not self.batches:
            raise RuntimeError("stopped")


@pytest.mark.parametrize("batches", [1, 2])
def test_a_resumed_run_saves_no_accumulated_gradients(batches, tmp_path):
    """Checkpoints do not have them: one between the batches of a step would resume another run."""
    settings = RUNS["accumulated gradients"]
    whole = train(tmp_path / "whole", **settings)
    third = tmp_path / "whole" / "step=3.ckpt"
    with pytest.raises(RuntimeError, match="stopped"):
        train(tmp_path / "resumed", third, stops=StopsAfter(batches), **settings)
    assert not list((tmp_path / "resumed").glob("*.ckpt"))
    assert train(tmp_path / "again", third, **settings) == left(whole, 3)


def test_noise_of_workers_depends_on_the_seed_the_epoch_and_the_set():
    noise = {}
    for seed in (0, 1):
        torch.manual_seed(seed)
        data = BothNoisy(4, num_workers=1)
        for epoch in (0, 1):
            loader = data.train_dataloader()
            loader.sampler.set_epoch(epoch)
            noise[seed, epoch] = next(iter(loader))[0]
        noise[seed, "validation"] = next(iter(data.val_dataloader()))[0]
    seen = [tuple((each % 1).flatten().tolist()) for each in noise.values()]
    assert len(set(seen)) == len(seen) == 6


def draw_unevenly(rank, folder):
    """Ranks whose random numbers are at other places; each continues with its own."""
    with group(rank, 2, folder, "numbers"):
        trainer, saved = SimpleNamespace(world_size=2, global_rank=rank), {}
        torch.rand(rank + 1)
        RandomNumbers().on_save_checkpoint(trainer, None, saved)
        wanted = float(torch.rand(())), random.random(), np.random.rand()
        written = [saved]
        dist.broadcast_object_list(written)  # the file is that of rank 0
        [saved] = written
        assert len(saved[KEY]) == 2
        torch.rand(5)
        resumed = RandomNumbers()
        resumed.on_load_checkpoint(trainer, None, saved)
        resumed.on_train_start(trainer, None)
        assert (float(torch.rand(())), random.random(), np.random.rand()) == wanted
        other, alone = RandomNumbers(), SimpleNamespace(world_size=3, global_rank=2)
        other.on_load_checkpoint(alone, None, saved)
        other.on_train_start(alone, None)
        assert torch.equal(torch.get_rng_state(), saved[KEY][0]["torch"])


@pytest.mark.slow
def test_each_process_continues_with_its_own_random_numbers(tmp_path):
    on_ranks(draw_unevenly, (str(tmp_path),), 2)


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


def stop_at(hook, count, monkeypatch, number=signal.SIGTERM):
    """Let a run get a signal at the call of a hook with this number."""
    calls, usual = [], getattr(Interruption, hook)

    def stopping(self, trainer, *args, **kwargs):
        calls.append(trainer.sanity_checking)
        if calls.count(False) == count:
            os.kill(os.getpid(), number)
        usual(self, trainer, *args, **kwargs)

    monkeypatch.setattr(Interruption, hook, stopping)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the run ended at a target sparsity")
@pytest.mark.parametrize(
    ("hook", "count", "settings"),
    [
        ("on_train_batch_start", 18, []),  # the last batch, which a validation follows
        ("on_validation_batch_start", 3, []),  # within the last validation
        ("on_train_batch_start", 6, []),  # the last batch of an epoch
        ("on_train_batch_start", 8, ["trainer.accumulate_grad_batches=3"]),  # within a step
    ],
)
def test_a_stopped_run_has_the_results_of_a_whole_one(hook, count, settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    schedule = ["schedule.begin=1", "schedule.end=4", "trainer.max_epochs=3", "compare_dense=false"]
    typed = ["--config-dir", OWN, "recipe=small", *schedule, *settings]
    assert answer([*typed, "folder=whole"]) == 0
    with monkeypatch.context() as patched:
        stop_at(hook, count, patched)
        with pytest.raises(SystemExit, match="143"):
            answer([*typed, "folder=stopped"])
    assert answer([*typed, "folder=stopped", "ckpt_path=last"]) == 0
    whole, stopped = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("whole", "stopped"))
    assert whole["sparse"]
    assert stopped["sparse"] == whole["sparse"]
    last, other = (torch.load(tmp_path / name / "checkpoints" / "last.ckpt") for name in ("whole", "stopped"))
    for name, weight in last["state_dict"].items():
        assert torch.equal(weight, other["state_dict"][name]), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the run ended at a target sparsity")
def test_a_run_that_was_stopped_before_its_results_were_written_has_them_when_it_is_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    typed = ["--config-dir", OWN, "recipe=small", "trainer.max_epochs=2", "compare_dense=false", "folder=run"]
    assert answer(typed) == 0
    whole = json.loads((tmp_path / "run" / "results.json").read_text())
    for name in ("results.json", ".ended.yaml"):
        (tmp_path / "run" / name).unlink()
    assert answer([*typed, "ckpt_path=last"]) == 0
    assert json.loads((tmp_path / "run" / "results.json").read_text())["sparse"] == whole["sparse"]


def rows(folder):
    """The rows of metrics.csv, without the metrics that they do not have."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


LOGGED = [
    *("--config-dir", OWN, "recipe=small", "compare_dense=false", "schedule.begin=1", "schedule.end=17"),
    *("trainer.max_epochs=3", "trainer.log_every_n_steps=4", "update_every=1"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "settings"),
    [
        (8, []),
        (6, ["trainer.log_every_n_steps=6"]),  # the last batch of an epoch, which a validation follows
        (6, ["trainer.log_every_n_steps=6", "trainer.limit_val_batches=0"]),
        (18, ["trainer.log_every_n_steps=6", "trainer.limit_val_batches=0"]),
    ],
)
def test_the_step_at_which_a_run_is_stopped_is_logged_once(count, settings, tmp_path, monkeypatch):
    """It stops at a step that Lightning logs, and has no batch after that."""
    monkeypatch.chdir(tmp_path)
    typed = [*LOGGED, *settings]
    assert answer([*typed, "folder=whole"]) == 0
    with monkeypatch.context() as patched:
        stop_at("on_train_batch_start", count, patched)
        with pytest.raises(SystemExit, match="143"):
            answer([*typed, "folder=stopped"])
    [saved] = tmp_path.glob("stopped/checkpoints/interrupted.ckpt")
    assert torch.load(saved, weights_only=True)["global_step"] == count
    assert answer([*typed, "folder=stopped", "ckpt_path=last"]) == 0
    whole = rows(tmp_path / "whole")
    assert [row for row in whole if int(row["step"]) == count - 1 and "train_loss" in row]
    assert rows(tmp_path / "stopped") == whole


def run_until_killed(folder, count, *typed):
    """Run a command line until kill -9 before a batch; a call of its own process."""
    os.chdir(folder)
    with pytest.MonkeyPatch.context() as patched:
        stop_at("on_train_batch_start", count, patched, signal.SIGKILL)
        answer(list(typed))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the run ended at a target sparsity")
@pytest.mark.parametrize("count", [4, 6, 11])
def test_a_killed_run_has_the_rows_of_a_whole_one(count, tmp_path, monkeypatch):
    """Masks are updated, and logged, at more steps than those that Lightning logs, and than those with a checkpoint."""
    monkeypatch.chdir(tmp_path)
    typed = [*LOGGED, "checkpoint_every=3", "trainer.log_every_n_steps=50"]
    assert answer([*typed, "folder=whole"]) == 0
    run = FORKED.Process(target=run_until_killed, args=(tmp_path, count, *typed, "folder=killed"))
    run.start()
    run.join()
    assert run.exitcode == -signal.SIGKILL
    assert [path.name for path in tmp_path.glob("killed/checkpoints/step=*")] == [f"step={(count - 1) // 3 * 3}.ckpt"]
    assert answer([*typed, "folder=killed", "ckpt_path=last"]) == 0
    whole = rows(tmp_path / "whole")
    assert {int(row["step"]) for row in whole} >= set(range(1, 17)), "updates were not logged"
    assert rows(tmp_path / "killed") == whole


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the run ended at a target sparsity")
def test_a_run_that_is_trained_on_does_not_end_with_the_metrics_of_its_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    typed = ["--config-dir", OWN, "recipe=small", "compare_dense=false", "folder=run"]
    assert answer([*typed, "trainer.max_epochs=1"]) == 0
    assert answer([*typed, "trainer.max_epochs=2", "trainer.limit_val_batches=0", "ckpt_path=last"]) == 0
    assert set(json.loads((tmp_path / "run" / "results.json").read_text())["sparse"]) == {"train_loss"}
