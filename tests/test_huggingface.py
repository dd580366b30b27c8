"""HuggingFaceCallback in a real `transformers.Trainer`: hold, updates, clipping, logs, checkpoints and resume."""

from __future__ import annotations

import signal
import socket

import forked
import pytest
import torch
from accelerate import Accelerator
from forked import on_ranks
from hugging_face_runs import (
    SETTINGS,
    STEPS,
    Rows,
    WithLoss,
    callback,
    train,
    train_on_rank,
    train_until,
    trainer,
    without_dropout,
)
from small_nets import broken_blocks
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from sparse_lightning import CheckpointError, Constant, Magnitude, Neurons, PatternError, Sparsifier, SparsityCallback
from sparse_lightning.callbacks.huggingface import STATE_FILE


class Reader(TrainerCallback):
    """Reads the weights wherever other callbacks can."""

    def __init__(self, ours):
        self.ours, self.broken, self.sparsities, self.norms = ours, [], [], []

    def _read(self, args, state, control, **kwargs):
        sparsifier = self.ours.sparsifier
        self.broken += broken_blocks(sparsifier.scopes, sparsifier.masks)
        self.sparsities.append(sparsifier.sparsity())

    on_optimizer_step = on_substep_end = on_step_end = on_evaluate = on_save = _read


@pytest.mark.parametrize("case", SETTINGS)
def test_pruned_blocks_are_zero_wherever_a_callback_can_read_them(case, tmp_path):
    ours = callback(case)
    reader = Reader(ours)
    both = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 6}
    trainer(tmp_path, ours, reader, gradient_accumulation_steps=2, **both).train()
    assert reader.broken == []
    assert reader.sparsities[-1] == pytest.approx(0.5)
    assert not ours.sparsifier.is_attached


@pytest.mark.parametrize(("accumulated", "clipped"), [(1, 0.1), (3, 0.05), (2, 0.0)])
def test_a_run_is_the_loop_that_updates_before_it_clips(accumulated, clipped, tmp_path):
    """The plain loop is the reference: scores are of unclipped gradients, and norms of masked ones."""
    model = WithLoss().eval()  # no dropout: the loops draw random numbers in another order
    model.train = lambda mode=True: model
    start = {name: value.clone() for name, value in model.state_dict().items()}
    run = trainer(
        tmp_path,
        callback("movement"),
        model=model,
        gradient_accumulation_steps=accumulated,
        max_grad_norm=clipped,
        optim="sgd",
        lr_scheduler_type="constant",
    )
    batches = [batch for _ in range(4) for batch in _order_of(run)]
    run.train()
    found = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(start)
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    usual = callback("movement").sparsifier.configuration
    sparsifier = Sparsifier(usual.patterns, usual.schedule, usual.criterion, budget=usual.budget, update_every=2)
    sparsifier.attach(model, optimizer, STEPS)
    for step in range(STEPS):
        for batch in batches[step * accumulated : (step + 1) * accumulated]:
            (model(**batch)["loss"] / accumulated).backward()
        sparsifier.before_step()
        if clipped:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clipped)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in found.items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-5, atol=1e-6)
        assert ((value == 0) == (model.state_dict()[name] == 0)).all()


def _order_of(run):
    """Return the batches of an epoch as the trainer draws them; a sampler without shuffling gives the same order."""
    run._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(run.train_dataset)
    return list(DataLoader(run.train_dataset, batch_size=8))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["movement", pytest.param("wanda", marks=pytest.mark.exhaustive)])
def test_a_run_that_is_killed_resumes_bit_for_bit(case, tmp_path):
    # Not a fork of this process: threads that earlier tests have started do not live on in one, and are joined there.
    process = forked.start(train_until, case, tmp_path / "killed", 8, file=tmp_path / "said")
    process.join(120)
    assert process.exitcode == -signal.SIGKILL, (tmp_path / "said").read_text()
    whole, ours = train(case, tmp_path / "whole")
    resumed, theirs = train(case, tmp_path / "killed", resume=True)
    assert resumed.state.global_step == STEPS
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    for one, other in zip(_moments(whole), _moments(resumed), strict=True):
        assert torch.equal(one, other)
    for name, mask in ours.sparsifier.masks.items():
        assert torch.equal(mask, theirs.sparsifier.masks[name])
        assert mask.any()
    assert _logged(whole) == _logged(resumed)


def _moments(run):
    states = run.optimizer.state_dict()["state"]
    return [value for state in states.values() for value in state.values() if isinstance(value, torch.Tensor)]


def _logged(run):
    return [entry for entry in run.state.log_history if "sparsity/churn" in entry]


def test_updates_are_in_the_history_of_logs_and_beside_the_loss(tmp_path):
    class Listed(TrainerCallback):
        logs: list = []  # noqa: RUF012 - of one test

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.logs.append(dict(logs))

    run = trainer(tmp_path, callback(), Listed())
    run.train()
    entries = _logged(run)
    assert [entry["step"] for entry in entries] == [3, 5, 7, 9, 11]
    assert entries[-1]["sparsity/target"] == entries[-1]["sparsity/actual"] == entries[-1]["sparsity/neurons"] == 0.5
    assert [logs["sparsity/target"] for logs in Listed.logs if "loss" in logs][-1] == 0.5


def test_an_update_that_is_due_at_the_end_is_in_the_last_checkpoint(tmp_path):
    ours = callback(schedule=Constant(0.5, begin=STEPS, end=STEPS))
    trainer(tmp_path, ours, save_strategy="steps", save_steps=STEPS).train()
    saved = torch.load(tmp_path / f"checkpoint-{STEPS}" / STATE_FILE, weights_only=True)
    assert saved["sparsifier"]["last_update"]["target"] == 0.5
    weights = trainer(tmp_path, model=None).model
    from safetensors.torch import load_file

    weights.load_state_dict(load_file(tmp_path / f"checkpoint-{STEPS}" / "model.safetensors"))
    assert int((weights.net.up.weight == 0).all(dim=1).sum()) == 16


def test_checkpoints_without_masks_or_of_another_step_are_refused(tmp_path):
    trainer(tmp_path, callback(), save_strategy="steps", save_steps=4).train()
    folder = tmp_path / "checkpoint-8"
    wrong = callback()
    wrong.load(tmp_path / "checkpoint-4")
    with pytest.raises(CheckpointError, match=r"step 4, but the run resumes at step 8"):
        trainer(tmp_path, wrong).train(resume_from_checkpoint=str(folder))
    (folder / STATE_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint-8 has no sparsity.pt"):
        trainer(tmp_path, callback()).train(resume_from_checkpoint=str(folder))


def test_a_checkpoint_elsewhere_is_named_by_load_or_by_the_arguments(tmp_path):
    trainer(tmp_path, callback(), save_strategy="steps", save_steps=8).train()
    elsewhere = (tmp_path / "checkpoint-8").rename(tmp_path / "moved")
    named, loaded = callback(), callback()
    loaded.load(elsewhere)
    path = str(elsewhere)
    trainer(tmp_path / "one", named, resume_from_checkpoint=path).train(resume_from_checkpoint=path)
    trainer(tmp_path / "two", loaded).train(resume_from_checkpoint=path)
    assert torch.equal(*[ours.sparsifier.masks["net (neurons)"] for ours in (named, loaded)])


def test_the_best_model_comes_with_its_own_masks(tmp_path):
    class Worse(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics=None, **kwargs):
            metrics["eval_loss"] = float(state.global_step)

    ours = callback()
    steps = {"eval_strategy": "steps", "eval_steps": 6, "save_strategy": "steps", "save_steps": 6}
    run = trainer(tmp_path, ours, Worse(), load_best_model_at_end=True, metric_for_best_model="eval_loss", **steps)
    with pytest.warns(UserWarning, match=r"checkpoint-6, the best checkpoint, was saved before the final sparsity 0.5"):
        run.train()
    saved = torch.load(tmp_path / "checkpoint-6" / STATE_FILE, weights_only=True)["sparsifier"]["last_update"]
    pruned = (run.model.net.up.weight == 0).all(dim=1)
    assert 0 < int(pruned.sum()) < 16
    assert saved["target"] < 0.5
    assert torch.equal(ours.sparsifier.masks["net (neurons)"].flatten(), pruned)


@pytest.mark.slow
def test_two_processes_prune_as_one(tmp_path):
    """The Trainer averages gradients over ranks: half of each batch on each gives the masks of whole batches."""
    alone = callback("movement")
    run = trainer(tmp_path / "alone", alone, model=without_dropout())
    run.train()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    on_ranks(train_on_rank, (tmp_path, port), 2)
    found = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    for name, mask in alone.sparsifier.masks.items():
        assert all(torch.equal(each["masks"][name], mask) for each in found), name
    for name, value in run.model.state_dict().items():
        assert torch.equal(found[0]["weights"][name], found[1]["weights"][name])
        torch.testing.assert_close(found[0]["weights"][name], value, rtol=1e-4, atol=1e-5)
    assert (tmp_path / "run" / "checkpoint-6" / STATE_FILE).exists()


def test_a_callback_of_lightning_names_the_one_of_transformers(tmp_path):
    ours = SparsityCallback([Neurons("net.up", "net.down")], 0.5)
    with pytest.raises(PatternError, match=r"callback of Lightning.*HuggingFaceCallback"):
        trainer(tmp_path, ours)


def test_a_second_run_starts_the_schedule_again(tmp_path):
    ours = callback()
    trainer(tmp_path, ours).train()
    first = ours.sparsifier.masks["net (neurons)"].clone()
    run = trainer(tmp_path, ours)
    with pytest.warns(UserWarning, match="pruned blocks in the previous model"):
        run.train()
    assert ours.sparsifier.step == STEPS
    assert (ours.sparsifier.masks["net (neurons)"] >= first).all()


def test_a_loop_with_accelerate_uses_the_same_class():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = WithLoss()
    loader = DataLoader(Rows(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters()), loader)
    ours = callback(schedule=Constant(0.5), criterion=Magnitude())
    ours.attach(model, optimizer)
    norms = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                kept = [p.grad for p in model.parameters()]
                assert all(bool((g[ours.sparsifier.masks["net (neurons)"].flatten()] == 0).all()) for g in kept[:2])
            optimizer.step()
            optimizer.zero_grad()
    assert len(norms) == ours.sparsifier.step == 6
    assert ours.sparsifier.sparsity() == 0.5
    ours.detach()
