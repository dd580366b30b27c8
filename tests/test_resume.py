"""Resume: a run that is killed and resumed ends bit for bit as the run that was not killed."""

from __future__ import annotations

import csv
import os
import signal
from pathlib import Path

import pytest
import torch
from forked import FORKED
from resumable import CASES, SAVE_EVERY, STEPS, train, train_until
from small_nets import LAYERS

from sparse_lightning.app.folders import last_checkpoint as newest_in_run
from sparse_lightning.app.folders import last_run, newest_checkpoint

KILLS = {"movement": (4, 10, 20), "soft": (9, 17)}
"""Before which steps runs are killed; all others are killed once."""

# A run that is resumed saves where it saved before.
pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")


def last_checkpoint(folder: Path) -> Path:
    """Return the checkpoint of the latest step."""
    return max(folder.glob("saved/step=*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))


def logged(folder: Path) -> dict[int, dict[str, str]]:
    """Return the logged sparsity by step, over all versions of the log."""
    rows = {}
    for path in sorted(folder.glob("logs/version_*/metrics.csv")):
        for row in csv.DictReader(path.read_text().splitlines()):
            found = {k: v for k, v in row.items() if k.startswith("sparsity/") and v}
            if found:
                rows[int(row["step"])] = found
    return rows


def flat(value, place=""):
    """Yield all leaves of a nested state with their places; an empty container is a leaf."""
    if isinstance(value, dict | list | tuple) and not value:
        yield place, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{place}/{key}")
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            yield from flat(inner, f"{place}/{i}")
    else:
        yield place, value


def differences(one, other) -> list[str]:
    """Return the places at which two states are not bit for bit the same."""
    one, other = dict(flat(one)), dict(flat(other))
    assert any(isinstance(leaf, torch.Tensor) for leaf in one.values()), "a state without tensors shows nothing"
    found = sorted(set(one) ^ set(other))
    for place in set(one) & set(other):
        a, b = one[place], other[place]
        same = torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
        found += [] if same else [place]
    return found


def end_of(trainer, net, ours) -> dict:
    """Return the final state of a run."""
    return {
        "weights": dict(net.state_dict()),
        "optimizer": trainer.optimizers[0].state_dict(),
        "callbacks": [callback.state_dict() for callback in ours],
    }


@pytest.fixture
def one_thread():
    """Sums have the same order in this process and in those that are killed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def updates_of(case) -> list[int]:
    """Return the steps at which the first callback of a case updates its masks."""
    settings = CASES[case][1][0]
    plan = settings["schedule"].resolve(STEPS)
    return [step for step in range(STEPS) if plan.is_update(step, settings["update_every"])]


def check_kills(case, steps, folder):
    """A run that is killed before each of the steps ends as the run that was not."""
    whole = end_of(*train(case, folder / "whole"))
    expected = logged(folder / "whole")
    assert set(expected) >= set(updates_of(case)), "sparsity was not logged at every update"
    assert all(callback["step"] == STEPS for callback in whole["callbacks"])
    assert any((weight == 0).any() for weight in whole["weights"].values()), "nothing was pruned"
    for die_at in steps:
        killed = folder / f"killed at {die_at}"
        run = FORKED.Process(target=train_until, args=(case, killed, die_at))
        run.start()
        run.join()
        assert run.exitcode == -signal.SIGKILL
        ckpt = last_checkpoint(killed)
        assert ckpt.stem == f"step={die_at // SAVE_EVERY * SAVE_EVERY}"
        assert set(logged(killed)) == {step for step in expected if step < die_at}
        resumed = end_of(*train(case, killed, ckpt_path=str(ckpt)))
        assert not differences(whole, resumed), f"killed before step {die_at}"
        assert logged(killed) == expected, f"killed before step {die_at}: sparsity was logged otherwise"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_killed_and_resumed(case, tmp_path, one_thread):
    check_kills(case, KILLS.get(case, (13,)), tmp_path)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_killed_before_any_step_and_resumed(case, tmp_path, one_thread):
    check_kills(case, range(SAVE_EVERY, STEPS), tmp_path)


def test_the_masks_of_a_run_are_in_its_checkpoint(tmp_path):
    _, _, [callback] = train("rigl", tmp_path)
    saved = torch.load(last_checkpoint(tmp_path), weights_only=True)
    state = saved["callbacks"][callback.state_key]
    assert set(state["masks"]) == set(LAYERS)
    assert not differences(state, callback.state_dict())


def written(file: Path, step: int, time: int) -> Path:
    """Write a checkpoint of a step at a time; return its path."""
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"global_step": step}, file)
    os.utime(file, (time, time))
    return file


@pytest.mark.parametrize("name", ["last.ckpt", "interrupted.ckpt", "step=100.ckpt", "interrupted.ckpt/meta.pt"])
def test_a_run_resumes_from_its_highest_step_also_without_the_times_of_its_files(name, tmp_path):
    written(tmp_path / "step=27.ckpt", 27, 3)
    written(tmp_path / "best.ckpt", 9, 4)
    expected = tmp_path / Path(name).parts[0]
    written(tmp_path / name, 100, 1)
    assert newest_checkpoint(tmp_path) == expected


def test_a_truncated_checkpoint_of_the_highest_step_is_passed_over(tmp_path, capsys):
    kept = written(tmp_path / "interrupted.ckpt", 27, 1)
    cut = written(tmp_path / "step=50.ckpt", 50, 3)
    written(tmp_path / "step=9.ckpt", 9, 2)
    os.truncate(cut, 300)
    os.utime(cut, (3, 3))
    assert newest_in_run(tmp_path) == kept
    assert f"{cut} is truncated, and passed over for {kept}" in capsys.readouterr().err


def test_of_checkpoints_of_one_step_the_end_of_the_run_and_then_the_newer_file_is_taken(tmp_path):
    written(tmp_path / "interrupted.ckpt", 27, 1)
    newer, last = written(tmp_path / "step=27.ckpt", 27, 2), tmp_path / "last.ckpt"
    last.symlink_to(newer.name)
    assert newest_checkpoint(tmp_path).resolve() == newer
    last.unlink()
    torch.save({"weight": torch.ones(2)}, tmp_path / "weights.ckpt")  # the newest, and without a step
    assert newest_checkpoint(tmp_path) == newer
    written(last, 26, 0)
    assert newest_checkpoint(tmp_path) == newer
    written(last, 27, 0)
    assert newest_checkpoint(tmp_path) == last, "it holds what was done after the last step"


def test_times_decide_where_the_step_of_a_checkpoint_cannot_be_read(tmp_path):
    written(tmp_path / "step=50.ckpt", 50, 1)
    other = tmp_path / "interrupted.ckpt"
    torch.save({"global_step": 57, "of a class": Path("somewhere")}, other)  # not loaded as data
    assert newest_checkpoint(tmp_path) == other


def test_between_runs_the_time_decides(tmp_path):
    written(tmp_path / "long" / "checkpoints" / "step=900.ckpt", 900, 1)
    written(tmp_path / "newer" / "checkpoints" / "step=9.ckpt", 9, 2)
    assert last_run(tmp_path) == tmp_path / "newer"
