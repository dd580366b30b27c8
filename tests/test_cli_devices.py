"""The command line in two processes: a sweep with DDP, FSDP2 by torchrun, resuming and Ctrl-C, tensor parallelism."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lightning as L
import pytest
import torch
from forked import on_ranks, printed_by
from safetensors.torch import load_file
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from sparse_lightning.app.checked import check_runs
from sparse_lightning.app.cli import answer, main
from sparse_lightning.app.compose import compose
from sparse_lightning.app.folders import last_checkpoint, last_run
from sparse_lightning.app.prepare import prepare_runs
from sparse_lightning.app.processes import FOLDER, Processes, together
from sparse_lightning.app.run import PreparedRun, run
from sparse_lightning.app.shards import check_model
from sparse_lightning.data import StdlibText
from sparse_lightning.errors import ConfigError
from sparse_lightning.models import GPT

OWN = str(Path(__file__).parent / "own_conf")
MODULE = ["-m", "sparse_lightning", "--config-dir", OWN]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TWO = ["trainer.accelerator=cpu", "trainer.devices=2", "trainer.precision=32-true"]
NOT_OF_USERS = {"HYDRA_FULL_ERROR", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "WORLD_SIZE"}
"""Environment variables of pytest and of other tests."""
LEFT = {"config.yaml", "checkpoints", "metrics.csv", "masks.safetensors", "results.json", "table.txt", ".hydra"}
"""What every run writes."""


def environment():
    """The environment of a user, without variables of pytest and of other tests."""
    return {key: value for key, value in os.environ.items() if key not in NOT_OF_USERS}


def start(command, folder):
    """In a session of its own: its processes can be ended with it."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=folder, text=True, start_new_session=True, env=environment(), **streams)


def finish(process, seconds=240):
    """The exit code, and all that was printed; a run that hangs fails the test, and leaves no process."""
    try:
        said = process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"the run did not end in {seconds} s:\n{process.communicate()[0]}")
    return process.returncode, said


def call(command, folder):
    code, said = finish(start(command, folder))
    assert code == 0, said
    return said


def results(folder):
    return json.loads((folder / "results.json").read_text("utf-8"))


def call_script(script, folder, arguments):
    """Run the command line in a forked process, to its exit, as the console script would."""
    os.chdir(folder)
    sys.argv = [str(script), "--config-dir", OWN, *arguments]
    main()


def torchrun_script(script, folder, arguments):
    """Let the agent that torchrun starts run the command line in two forked processes, which have imported torch."""
    meeting = {"run_id": "tests", "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}  # as --standalone does
    config = LaunchConfig(1, 1, 2, **meeting, start_method="forkserver", monitor_interval=0.1)
    elastic_launch(config, end_script)(script, folder, arguments)


def end_script(*arguments):
    """The agent takes an exit for a failure, whatever its code."""
    with pytest.raises(SystemExit) as ended:
        call_script(*arguments)
    assert ended.value.code == 0, f"rank {os.environ['RANK']} has ended with {ended.value.code}"


def as_user(program, *arguments):
    """Call a function in a forked process without variables of pytest and of other tests."""
    for name in NOT_OF_USERS:
        os.environ.pop(name, None)
    program(*arguments)


class Forks:
    """Runs that are forked with torch imported: their first process, or both under the agent of torchrun."""

    def __init__(self, script):
        self.script = script

    def by_lightning(self, folder, *arguments):
        """Lightning starts the other process, by the console script."""
        return printed_by(as_user, call_script, self.script, folder, arguments, file=folder / "printed")

    def by_torchrun(self, folder, *arguments):
        """Return what both printed."""
        return printed_by(as_user, torchrun_script, self.script, folder, arguments, file=folder / "printed")


class Commands:
    """Runs as they are typed."""

    def __init__(self, script):
        self.python = script.with_name("python")

    def by_lightning(self, folder, *arguments):
        """Lightning starts the other process, by the name of the module."""
        return call([self.python, *MODULE, *arguments], folder)

    def by_torchrun(self, folder, *arguments):
        """Return what both printed."""
        return call([self.python, *TORCHRUN, *MODULE, *arguments], folder)


@pytest.mark.slow
@pytest.mark.parametrize("runs", [Forks, pytest.param(Commands, marks=pytest.mark.exhaustive)])
def test_the_same_run_with_ddp_and_fsdp2_by_lightning_and_by_torchrun(
    runs, console_script, python, tmp_path, monkeypatch, capsys
):
    """One test: starting two processes is slow, and later runs need the files of earlier ones."""
    ddp = sweep_with_ddp(runs(console_script), tmp_path / "ddp")
    sharded = fsdp2_by_torchrun(runs(console_script), tmp_path / "fsdp2")
    check_same(ddp, sharded)
    refuse_to_resume(sharded, monkeypatch, capsys)
    export_from_shards(sharded, monkeypatch)
    resume_until_ctrl_c(python, sharded)


def sweep_with_ddp(runs, folder):
    """Two runs, one after the other in the same two processes, each with a dense twin; return the second."""
    folder.mkdir()
    sweep = ["-m", "schedule.final=0.5,0.9", "export=weights"]
    said = runs.by_lightning(folder, "recipe=small", "trainer=ddp", *TWO, *sweep)
    [made] = folder.glob("multirun/small/*")
    assert {"0", "1", "sweep.csv", "sweep.txt", "sweep.png"} <= set(os.listdir(made))
    for one, final in ((made / "0", 0.5), (made / "1", 0.9)):
        assert LEFT | {"dense.json", "dense", "model.safetensors"} <= set(os.listdir(one))
        assert results(one)["actual"] == pytest.approx(final, abs=0.01)
        assert results(one)["dense"]["val_loss"] > 0
    assert said.count("All files are in") == 2, said
    assert said.count("val_accuracy sparse") == 1, said
    assert said.count("GLOBAL_RANK: 1") == 1, f"the other process was not started once:\n{said}"
    return made / "1"


def fsdp2_by_torchrun(runs, folder):
    """The second of these runs in shards."""
    folder.mkdir()
    said = runs.by_torchrun(folder, "recipe=small", "trainer=fsdp2", *TWO, "export=weights", "compare_dense=false")
    [run] = folder.glob("outputs/small/*")
    assert set(os.listdir(run)) >= LEFT
    assert said.count("All files are in") == 1, said
    assert (run / "checkpoints" / "last.ckpt" / "meta.pt").is_file(), "a checkpoint in shards is a folder"
    return run


def check_same(ddp, sharded):
    """Masks and whole weights."""
    wanted, found = (load_file(run / "masks.safetensors") for run in (ddp, sharded))
    assert {name: mask.tolist() for name, mask in found.items()} == {n: m.tolist() for n, m in wanted.items()}
    wanted, found = (load_file(run / "model.safetensors") for run in (ddp, sharded))
    assert list(found) == list(wanted)
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    assert float((found["second.weight"] == 0).float().mean()) == pytest.approx(0.89, abs=0.01)


def refuse_to_resume(run, monkeypatch, capsys):
    """Without the user's word, before any other process is started."""
    monkeypatch.chdir(run.parents[2])
    resumed = ["recipe=small", "trainer=fsdp2", *TWO, "ckpt_path=last", "trainer.max_epochs=7"]
    with pytest.raises(SystemExit) as ended:
        answer(["--config-dir", OWN, *resumed])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("its .metadata is a pickle") == 1, said
    assert "add trust_checkpoint=true to the command line" in said


def export_from_shards(run, monkeypatch):
    """The run has ended: no other process is started, and nothing is trained."""
    monkeypatch.chdir(run.parents[2])
    trained = (run / "model.safetensors").read_bytes()
    (run / "model.safetensors").unlink()
    said = ["recipe=small", "trainer=fsdp2", *TWO, "compare_dense=false", "export=weights"]
    assert answer(["--config-dir", OWN, *said, f"folder={run}", "ckpt_path=last", "trust_checkpoint=true"]) == 0
    assert (run / "model.safetensors").read_bytes() == trained


def resume_until_ctrl_c(python, run):
    """All processes stop after the same step, with one message and one checkpoint."""
    long = ["ckpt_path=last", "trust_checkpoint=true", "trainer.max_epochs=5000", "compare_dense=false"]
    process = start([python, *MODULE, "recipe=small", "trainer=fsdp2", *TWO, *long], run.parents[2])
    try:
        until = time.monotonic() + 120
        while not any(step > 6 for step in steps_in(run)):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < until, "no checkpoint after two minutes"
            time.sleep(0.1)
    finally:
        os.killpg(process.pid, signal.SIGINT)
    code, said = finish(process, 60)
    assert code == 130, said
    assert "Traceback" not in said, said
    assert said.count("Stopped. To resume: sparse-lightning recipe=small trainer=fsdp2") == 1, said
    assert said.count("ckpt_path=last trust_checkpoint=true") == 1, said
    assert list(run.parent.iterdir()) == [run], "it resumes in its folder"
    stopped = torch.load(run / "checkpoints" / "interrupted.ckpt" / "meta.pt", weights_only=True)
    assert stopped["global_step"] > 6
    with (run / "metrics.csv").open(newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    assert steps == sorted(steps)
    assert steps[0] < 6, "the rows from before are kept"


def steps_in(run):
    """The steps of the checkpoints that are there."""
    names = [path.parent.name for path in run.glob("checkpoints/step=*/meta.pt")]
    return [int(re.findall(r"\d+", name)[0]) for name in names]


def call_main_as_torchrun(rank, port, folder, arguments):
    """Run the command line in a process that torchrun has started, as far as its environment says."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "tests"}
    os.environ.update({name: str(value) for name, value in {**names, **where}.items()})
    os.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        main(["--config-dir", OWN, *arguments])
    assert ended.value.code == 0, f"rank {rank} has ended with {ended.value.code}"


@pytest.mark.slow
def test_tensor_parallel_gpt_exports_the_model_that_was_measured(tmp_path):
    sizes = {"width": 32, "depth": 1, "heads": 4}
    model = [f"model.{name}={value}" for name, value in sizes.items()]
    data = ["data.size=20000", "data.context=32", "data.batch_size=8"]
    short = ["trainer.limit_train_batches=8", "trainer.limit_val_batches=2", "trainer.enable_progress_bar=false"]
    quick = ["update_every=2", "compare_dense=false", "export=weights"]
    chosen = ["recipe=gpt_heads", "trainer=fsdp2_tp", *TWO, *model, *data, *short, *quick]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    on_ranks(call_main_as_torchrun, (port, tmp_path, chosen), 2)
    [run] = tmp_path.glob("outputs/gpt_heads/*")
    rows = {row["parameter"]: row["actual"] for row in results(run)["parameters"]}
    assert rows["blocks.0.attn.qkv.weight"] == 0.5
    assert rows["blocks.0.mlp.down.weight"] == 0.75
    plain = GPT(context=32, **sizes)
    plain.load_state_dict(load_file(run / "model.safetensors"))
    batches = [batch for batch, _ in zip(StdlibText(8, 32, 20000).val_dataloader(), range(2), strict=False)]
    with torch.no_grad():
        losses = [float(plain.loss(batch)) for batch in batches]
    assert sum(losses) / 2 == pytest.approx(results(run)["sparse"]["val_loss"], rel=1e-4)


BAD = {
    # what is typed beside two devices on the CPU: what the message says
    "recipe=small trainer=fsdp2_tp": "DigitsMLP has no plan for tensor parallelism over 2 devices",
    "recipe=digits_blocks trainer=fsdp2_tp trainer.devices=3": "tensor_parallel_size=2 does not divide 3 processes",
    "recipe=digits_blocks trainer=fsdp2_tp trainer.gradient_clip_val=1.0": "gradient_clip_val: 1.0 clips by norm",
    "recipe=digits_blocks trainer=fsdp2 trainer.strategy.tensor_parallel_size=0": "it must be at least 1",
    "recipe=small trainer=ddp ckpt_path=FOLDER": "is sharded, so only trainer=fsdp2 can resume from it",
}


@pytest.mark.parametrize(("typed", "message"), BAD.items(), ids=list(BAD))
def test_what_cannot_be_sharded_is_refused_before_training(typed, message, tmp_path):
    (tmp_path / "meta.pt").touch()
    chosen = typed.replace("FOLDER", str(tmp_path)).split()
    with pytest.raises(ConfigError, match=re.escape(message)):
        PreparedRun(compose([*TWO, *chosen], OWN).plain(tmp_path)).build()


def test_a_model_that_does_not_shard_itself_is_refused(tmp_path):
    run = PreparedRun(compose(["recipe=small", "trainer=fsdp2", *TWO], OWN).plain(tmp_path))
    with pytest.raises(ConfigError, match="LightningModule has no configure_model to shard itself: add one"):
        check_model(run.trainer, L.LightningModule())


def test_a_sweep_has_the_same_processes_in_all_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"the runs of this sweep need \[1, 2\] processes"):
        prepare_runs(check_runs(["recipe=small", "trainer=ddp", *TWO[::2], "trainer.devices=1,2"], OWN, multirun=True))
    assert os.listdir(tmp_path) == []


def test_torchrun_with_a_trainer_for_one_process_is_refused(monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"torchrun has started 2 processes, but num_nodes=1 and devices=1 are 1"):
        Processes.of(PreparedRun(compose(["recipe=small"], OWN).plain(".")).trainer)


def nowhere():
    raise ConfigError("there is nothing to resume")


@pytest.mark.parametrize("choose", [lambda: Path("there"), nowhere])
def test_all_ranks_get_the_folder_of_rank_zero_or_its_error(choose):
    """Threads act as processes: all that they share is the address of rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(Processes(3, rank, address).agree, choose if rank == 0 else None) for rank in (2, 1, 0)]
        if choose is nowhere:
            assert [str(answer.exception()) for answer in asked] == ["there is nothing to resume"] * 3
        else:
            assert [answer.result() for answer in asked] == [Path("there")] * 3


def test_a_process_that_lightning_has_started_gets_the_folder():
    with together(Path("there")):
        assert Processes(2, 1, ("127.0.0.1", 1)).agree(nowhere) == Path("there")
        assert Processes(2, 0, None).agree(lambda: Path("own")) == Path("own"), "rank 0 chooses"
    assert FOLDER not in os.environ


def test_the_last_checkpoint_is_not_written_through_the_link_to_another(tmp_path):
    short = ["trainer.limit_train_batches=5", "compare_dense=false", "logger=none"]
    run(compose(["recipe=small", *short], OWN).plain(tmp_path))
    for name, step in (("step=4.ckpt", 4), ("last.ckpt", 5)):
        assert torch.load(tmp_path / "checkpoints" / name, weights_only=True)["global_step"] == step


def test_a_checkpoint_in_shards_counts_when_it_is_complete(tmp_path):
    for time_, name in enumerate(("whole.ckpt", "sharded.ckpt/meta.pt", "cut_short.ckpt/__0_0.distcp")):
        file = tmp_path / "run" / "checkpoints" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save({}, file)
        os.utime(file, (time_, time_))
    assert last_checkpoint(tmp_path / "run" / "checkpoints").name == "sharded.ckpt"
    assert last_run(tmp_path) == tmp_path / "run"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_one_call_of_prune_in_shards_ends_as_it_does_with_whole_models(python, tmp_path):
    small = ["data.size=20000", "data.batch_size=4", "data.context=16", "model.context=16", "model.width=32"]
    small += ["model.depth=2", "model.heads=4", "trainer.limit_train_batches=5", "trainer.limit_val_batches=2"]
    command = [python, "-m", "sparse_lightning", "recipe=prune_once", *small, "logger=none", "compare_dense=false"]
    ends = []
    for trainer in ("fsdp2", "ddp"):
        call([*command, f"trainer={trainer}", *TWO, f"hydra.run.dir={trainer}"], tmp_path)
        ends.append((results(tmp_path / trainer), load_file(tmp_path / trainer / "masks.safetensors")))
    (sharded, some), (whole, others) = ends
    assert {row["actual"] for row in sharded["parameters"]} == {0.5}
    assert sharded["sparse"]["val_loss"] == pytest.approx(whole["sparse"]["val_loss"], rel=1e-3)
    assert all(torch.equal(some[name], others[name]) for name in others)
