"""Checkpoints that are cut short, folders that cannot be written, full disks, and signals while a run starts."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from pairwise import in_turn

from sparse_lightning.app.cli import answer
from sparse_lightning.app.folders import is_whole, last_checkpoint, last_run
from sparse_lightning.callbacks.saving import WholeFiles, partial_path, save
from sparse_lightning.errors import ConfigError

OWN = str(Path(__file__).parent / "own_conf")
NOBODY = 65534


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Run the command line in this process, in an empty folder; return the exit code and the lines of errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)

    def run_to_its_end(*overrides):
        capsys.readouterr()
        try:
            code = answer(["--config-dir", OWN, "recipe=small", "compare_dense=false", *overrides])
        except SystemExit as ended:  # inside of a job
            code = ended.code
        return code, capsys.readouterr().err.strip().splitlines()

    return run_to_its_end


def checkpoint(file, step, size=None):
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"weight": torch.ones(500), "global_step": step}, file)
    if size is not None:
        os.truncate(file, size)
    os.utime(file, (step, step))


@pytest.mark.parametrize("size", [0, 1, 300, 2000])
def test_the_newest_whole_checkpoint_is_taken_and_those_passed_over_are_named(size, tmp_path, capsys):
    folder = tmp_path / "run" / "checkpoints"
    checkpoint(folder / "a.ckpt", 1)
    checkpoint(folder / "b.ckpt", 2)
    checkpoint(folder / "c.ckpt", 3, size)
    assert last_checkpoint(folder) == folder / "b.ckpt"
    assert capsys.readouterr().err == f"ckpt_path: {folder}/c.ckpt is truncated, and passed over for {folder}/b.ckpt\n"
    assert last_run(tmp_path) == tmp_path / "run"
    for name in "ab":
        os.truncate(folder / f"{name}.ckpt", size)
    assert last_checkpoint(folder) is None
    assert re.search(r"c\.ckpt.* are truncated, and passed over to start again", capsys.readouterr().err)
    with pytest.raises(ConfigError, match=r"no checkpoint in .* is whole: .*c\.ckpt.* are truncated: remove ckpt_path"):
        last_run(tmp_path)


def test_a_run_resumes_from_the_checkpoint_before_the_one_that_was_cut_short(call, tmp_path):
    assert call("folder=mine")[0] == 0
    files = sorted(Path("mine/checkpoints").glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    assert all(map(is_whole, files))
    os.truncate(files[-1], 1000)
    code, lines = call("folder=mine", "ckpt_path=last", "trainer.max_epochs=2")
    assert code == 0, lines
    assert f"{files[-1].name} is truncated, and passed over for " in lines[0]
    assert torch.load("mine/checkpoints/last.ckpt", weights_only=True)["global_step"] == 12
    code, lines = call("folder=mine", "ckpt_path=last", "trainer.max_epochs=3", "model.hidden=16")
    assert code == 2
    assert "has first.weight of shape (32, 64), and DigitsMLP one of (16, 64)" in lines[-1]


class Cut(Exception):
    pass


def test_a_checkpoint_replaces_the_old_one_only_when_it_is_complete(tmp_path, monkeypatch):
    """Those of a ModelCheckpoint too: Lightning writes all by the trainer's CheckpointIO."""
    callback = ModelCheckpoint(tmp_path, every_n_train_steps=1, filename="only", enable_version_counter=False)
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = L.Trainer(max_steps=1, limit_val_batches=0, callbacks=[callback], plugins=[WholeFiles()], **options)
    trainer.fit(BoringModel())
    before = (tmp_path / "only.ckpt").read_bytes()
    written = []

    def cut(checkpoint, path):
        Path(path).write_bytes(before[:500])
        written.append(Path(path))
        raise Cut

    monkeypatch.setattr("lightning.fabric.plugins.io.torch_io._atomic_save", cut)
    for write in (trainer.save_checkpoint, lambda path, **kw: save(trainer, path)):
        with pytest.raises(Cut):
            write(tmp_path / "only.ckpt", weights_only=False)
    assert written == [partial_path(tmp_path / "only.ckpt")] * 2
    assert os.listdir(tmp_path) == ["only.ckpt"]
    assert (tmp_path / "only.ckpt").read_bytes() == before


FOLDERS = {
    "folder=file/run": "file/run: the run's folder cannot be used: Not a directory. Choose another one by folder=",
    "hydra.run.dir=file/run": "file/run: the run's folder cannot be used: Not a directory",
    "hydra.run.dir=/proc/run": "/proc/run: the run's folder cannot be used: No such file or directory",
    f"name={'n' * 300}": "nnn/.* the run's folder cannot be used: File name too long. Choose another one by folder=",
}


@pytest.mark.parametrize(("typed", "reason"), FOLDERS.items(), ids=[typed[:20] for typed in FOLDERS])
def test_a_folder_that_cannot_be_made_is_one_line(typed, reason, call):
    Path("file").touch()
    code, [line] = call(typed)
    assert code == 2
    assert re.search(reason, line), line


@pytest.fixture
def read_only(monkeypatch):
    """A current folder that this user cannot write to; root may write anywhere, and becomes another user here."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        monkeypatch.chdir(folder)
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(NOBODY)
        try:
            if not os.access(OWN, os.R_OK, effective_ids=True):
                pytest.skip("another user cannot read the repository")
            yield
        finally:
            if is_root:
                os.seteuid(0)
            monkeypatch.undo()
            os.chmod(folder, 0o755)


@pytest.mark.parametrize("typed", [["folder=mine"], ["hydra.run.dir=mine"], [], ["-m", "seed=1,2"]], ids=str)
def test_a_read_only_folder_is_one_line(typed, call, read_only):
    code, [line] = call(*typed)
    assert code == 2
    assert re.search(r": the run's folder cannot be used: Permission denied\. Choose another one by folder=", line), (
        line
    )
    assert os.listdir() == []


@pytest.mark.parametrize("size", [300, 20_000])
def test_a_full_disk_is_one_line(size, call):
    """Files may not grow beyond a size: so Hydra's own files, checkpoints or figures cannot be written."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    call("trainer.fast_dev_run=true", "folder=first")  # caches of libraries are written
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        code, lines = call("folder=full", "export=weights")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1
    [line] = lines
    assert ": File too large. Check permissions and free space, then resume by ckpt_path=last" in line


@pytest.mark.slow
@in_turn(number=[signal.SIGINT, signal.SIGTERM], delay=[0.3, 1.5, 3.0])
def test_a_signal_while_a_run_starts_leaves_no_traceback(number, delay, tmp_path):
    """At several moments: while Python, Hydra and torch are imported, and twice."""
    program = "from sparse_lightning.app.cli import main; print('started', flush=True); main()"
    command = [sys.executable, "-c", program, "--config-dir", OWN, "recipe=small", "trainer.max_epochs=2000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, cwd=tmp_path, text=True, **pipes)
    assert process.stdout.readline() == "started\n"
    time.sleep(delay)
    process.send_signal(number)
    time.sleep(0.05)
    if process.poll() is None:
        process.send_signal(number)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + number, said
    assert "Traceback" not in said
    assert "Stopped." in said
