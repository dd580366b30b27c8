"""The command line as a newcomer meets it: help, a run, Ctrl-C, a kill, resuming, a sweep."""

from __future__ import annotations

import csv
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest
import torch

from sparse_lightning.app import catalog, launch, progress_lines
from sparse_lightning.app.cli import answer, main
from sparse_lightning.app.compose import compose
from sparse_lightning.app.folders import fresh, last_checkpoint, last_run
from sparse_lightning.app.job import Job
from sparse_lightning.app.run import run
from sparse_lightning.errors import ConfigError

OWN = str(Path(__file__).parent / "own_conf")
ENVIRONMENT = {key: value for key, value in os.environ.items() if key not in ("HYDRA_FULL_ERROR", "PYTHONPATH")}
LONG = ["trainer.max_epochs=2000", "compare_dense=false"]


@pytest.fixture
def command(console_script):
    """The small recipe, by the console script in a fresh environment."""
    return [console_script, "--config-dir", OWN, "recipe=small"]


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Run the command line in this process, in an empty folder; return the exit code and the output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)

    def run_to_its_end(*overrides):
        code = answer(["--config-dir", OWN, "recipe=small", *overrides])
        read = capsys.readouterr()
        return code, read.out + read.err

    return run_to_its_end


def call_main(folder, *overrides):
    """Run the command line, to its exit, in a process that has imported torch."""
    os.chdir(folder)
    os.environ.pop("HYDRA_FULL_ERROR", None)
    main(["--config-dir", OWN, "recipe=small", *overrides])


def wait_for_a_checkpoint(folder, has_ended):
    until = time.monotonic() + 120
    while not list(folder.glob("outputs/small/*/**/checkpoints/*.ckpt")):
        assert not has_ended(), "it ended without a checkpoint"
        assert time.monotonic() < until, "no checkpoint after two minutes"
        time.sleep(0.1)


def stopped(number, folder, *overrides):
    """Start a run in an empty folder, send it a signal after its first checkpoint; return the code and the output."""
    process = forked.start(call_main, folder, *overrides, file=folder / "said")
    wait_for_a_checkpoint(folder, lambda: process.exitcode is not None)
    time.sleep(0.3)  # until that checkpoint is whole
    os.kill(process.pid, number)
    process.join(60)
    return process.exitcode, (folder / "said").read_text()


def test_help_fits_on_two_screens_and_tells_what_to_do_next(capsys):
    assert answer(["--help"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 60
    assert max(map(len, text.splitlines())) <= 120
    for recipe, purpose in catalog.options("recipe").items():
        assert recipe in text
        assert purpose[:40] in text
    for group in catalog.groups():
        assert group in text
        assert all(option in text for option in catalog.options(group))
    assert "To start: run `sparse-lightning`" in text


def test_help_for_a_group_says_what_each_option_is_for(capsys):
    assert answer(["--help", "schedule"]) == 0
    text = capsys.readouterr().out
    assert all(purpose in text for purpose in catalog.options("schedule").values())
    assert answer(["--help", "shedule"]) == 0
    assert "did you mean 'schedule'?" in capsys.readouterr().out


def test_help_imports_neither_torch_nor_hydra():
    program = (
        "import sys; from sparse_lightning.app.cli import answer; answer(['--help']); "
        "sys.exit(bool({'torch', 'lightning', 'hydra'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_folders_are_fresh_and_the_last_run_has_the_newest_checkpoint(tmp_path):
    first, second = tmp_path / "1" / "checkpoints", tmp_path / "2" / "dense" / "checkpoints"
    for i, folder in enumerate((second, first)):
        folder.mkdir(parents=True)
        torch.save({}, folder / "last.ckpt")
        os.utime(folder / "last.ckpt", (i, i))
    assert last_run(tmp_path) == tmp_path / "1"
    assert last_checkpoint(first) == first / "last.ckpt"
    assert last_checkpoint(tmp_path) is None
    assert fresh(tmp_path / "1") == tmp_path / "1_2"


def test_a_run_trains_both_and_returns_its_metric(tmp_path):
    outcome = run(compose(["recipe=small"], OWN).plain(tmp_path))
    assert {"config.yaml", "dense.json", "metrics.csv", "masks.safetensors", "table.txt"} <= set(os.listdir(tmp_path))
    assert "dense" in outcome.table
    dense = json.loads((tmp_path / "dense.json").read_text())
    assert 0 <= outcome.metric <= 1
    assert 0 <= dense["val_accuracy"] <= 1
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 6
    assert float((saved["state_dict"]["second.weight"] == 0).float().mean()) > 0.85


def test_the_dense_twin_is_the_same_run_without_pruning(tmp_path):
    dense = run(compose(["recipe=small", "schedule.final=0.0"], OWN).plain(tmp_path))
    assert json.loads((tmp_path / "dense.json").read_text())["val_accuracy"] == dense.metric


def test_a_run_from_any_folder_writes_its_files_and_can_be_resumed(call, tmp_path):
    """In this process; test_wheel.py runs the console script to its end."""
    code, said = call()
    assert code == 0, said
    [folder] = tmp_path.glob("outputs/small/*")
    assert "val_accuracy" in said
    assert {"config.yaml", "checkpoints", "metrics.csv", "table.txt", "sparsity.png"} <= set(os.listdir(folder))
    code, said = call("ckpt_path=last")
    assert code == 2
    assert "has ended: raise trainer.max_epochs" in said
    code, said = call("ckpt_path=last", "trainer.max_epochs=2")
    assert code == 0, said
    assert list(tmp_path.glob("outputs/small/*")) == [folder], "it resumes in its folder"
    assert torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 12


def test_the_best_checkpoint_of_a_run_is_a_sparse_one(tmp_path):
    """The first epochs have the highest loss, so that a plain ranking by the highest would keep a dense state."""
    chosen = ["recipe=small", "compare_dense=false", "trainer.max_epochs=4", "monitor=val_loss", "monitor_mode=max"]
    run(compose(chosen, OWN).plain(tmp_path))
    best = torch.load(tmp_path / "checkpoints" / "best.ckpt", weights_only=True)
    assert float((best["state_dict"]["first.weight"] == 0).float().mean()) == pytest.approx(0.9, abs=0.01)
    assert best["global_step"] < 24


def test_a_metric_that_the_model_does_not_log_cannot_rank(tmp_path):
    with pytest.raises(ConfigError, match=r"monitor: the model logs .*val_loss, and no 'val_los': did you mean"):
        run(compose(["recipe=small", "compare_dense=false", "monitor=val_los"], OWN).plain(tmp_path))
    with pytest.raises(ConfigError, match="monitor_mode: 'up' is not min or max"):
        run(compose(["recipe=small", "monitor_mode=up"], OWN).plain(tmp_path))


@pytest.mark.slow
def test_the_console_script_is_stopped_by_ctrl_c_and_resumes(command, call, tmp_path):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen([*command, *LONG], cwd=tmp_path, text=True, env=ENVIRONMENT, **pipes)
    wait_for_a_checkpoint(tmp_path, lambda: process.poll() is not None)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 130, said
    check_stopped(said)
    check_resumed(call, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_run_that_was_stopped_resumes(number, code, call, tmp_path):
    ended, said = stopped(number, tmp_path, *LONG)
    assert ended == code, said
    assert "Traceback" not in said
    if code > 0:
        check_stopped(said)
    check_resumed(call, tmp_path)


def test_a_log_file_tells_how_far_training_is_before_it_ends(tmp_path):
    said = tmp_path / "said"
    process = forked.start(call_main, tmp_path, *LONG, "trainer.enable_progress_bar=true", file=said)
    until = time.monotonic() + 120
    while not said.exists() or "sparse model: training from step 0 to 2000 epochs\n" not in said.read_text():
        assert process.is_alive(), said.read_text()
        assert time.monotonic() < until, said.read_text()
        time.sleep(0.05)
    process.kill()
    process.join(60)


def test_lines_tell_the_step_and_the_metrics_where_there_is_no_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress_lines, "INTERVAL", 0.0)
    run(compose(["recipe=small", "trainer.enable_progress_bar=true"], OWN).plain(tmp_path))
    lines = capsys.readouterr().out.splitlines()
    for title in ("dense baseline", "sparse model"):
        assert f"{title}: training from step 0 to 1 epochs" in lines
        assert any(line.startswith(f"{title}: epoch 0, step 6: train_loss ") for line in lines)


def check_stopped(said):
    assert "Traceback" not in said
    assert said.strip().splitlines()[-1].startswith("Stopped. To resume: sparse-lightning recipe=small trainer.max")


def check_resumed(call, tmp_path):
    """It goes on in its folder, after its last checkpoint."""
    [folder] = tmp_path.glob("outputs/small/*")
    before = torch.load(last_checkpoint(folder / "checkpoints"), weights_only=True)["global_step"]
    assert before >= 2
    epochs = before // 6 + 3
    ended, said = call("ckpt_path=last", "compare_dense=false", f"trainer.max_epochs={epochs}")
    assert ended == 0, said
    assert list(tmp_path.glob("outputs/small/*")) == [folder]
    assert torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] > before
    with (folder / "metrics.csv").open(newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    assert steps == sorted(steps)


@pytest.mark.slow
def test_a_run_that_was_stopped_in_the_dense_twin_resumes(call, tmp_path):
    ended, said = stopped(signal.SIGINT, tmp_path, "trainer.max_epochs=2000")
    assert ended == 130, said
    assert "Stopped. To resume: sparse-lightning recipe=small trainer.max_epochs=2000 ckpt_path=last" in said
    [folder] = tmp_path.glob("outputs/small/*")
    made = torch.load(last_checkpoint(folder / "dense" / "checkpoints"), weights_only=True)["global_step"]
    code, said = call("ckpt_path=last", f"trainer.max_epochs={made // 6 + 2}")
    assert code == 0, said
    assert "dense" in said


def test_a_sweep_ends_in_one_table(call, tmp_path):
    code, said = call("-m", "schedule.final=0.5,0.75", "criterion=magnitude,random", "compare_dense=false")
    assert code == 0, said
    assert said.count("All files are in") == 4
    [folder] = tmp_path.glob("multirun/small/*")
    assert {"0", "1", "2", "3", "sweep.csv", "sweep.txt", "sweep.png"} <= set(os.listdir(folder))
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("swept", ["schedule.final=0.5,1.5", "logger=csv,none logger.folder=1,x", "optimizer.lr=1,-1"])
def test_a_bad_value_in_a_sweep_is_refused_before_the_first_run(swept, call, tmp_path):
    code, said = call("-m", *swept.split())
    assert code == 2
    assert said.count("sparse-lightning: ") == 1
    assert swept.split("=")[0].split(".")[0] in said
    assert os.listdir(tmp_path) == []


def test_the_composed_configuration_is_printed(call, tmp_path):
    code, said = call("--cfg", "job", "schedule.final=0.6")
    assert code == 0
    assert "final: 0.6" in said
    assert os.listdir(tmp_path) == []


def test_a_job_without_a_prepared_run_checks_and_prepares_it(call, monkeypatch):
    """So it is in a process to which a launcher has sent it: pickled, a Job has no prepared runs."""
    monkeypatch.setattr(launch, "Job", lambda *args: pickle.loads(pickle.dumps(Job(*args))))
    code, said = call("compare_dense=false")
    assert code == 0
    assert "All files are in" in said
