"""Runs that have ended: a later command keeps how they were trained and what they measured, unless it trains on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from zipfile import ZipFile

import forked
import pytest
import torch

from sparse_lightning.app.cli import main
from sparse_lightning.app.compose import compose
from sparse_lightning.app.ended import EndedRun, note_end
from sparse_lightning.app.run import run
from sparse_lightning.errors import ConfigError

OWN = str(Path(__file__).parent / "own_conf")
TRAINED = "recipe=small compare_dense=false schedule.final=0.8 optimizer.lr=0.005 trainer.max_epochs=2"
OTHER = "pattern.blocks.shape=[8,8]"


def commands(folder, *lines):
    """Run command lines one after another, and keep what the run's folder holds after each."""
    os.chdir(folder)
    os.environ.pop("HYDRA_FULL_ERROR", None)
    for number, line in enumerate(lines):
        try:
            main(["--config-dir", OWN, *line.split()])
        except SystemExit as ended:
            print(f"code {ended.code}", flush=True)
        [made] = Path("outputs", "small").glob("*")
        held = {str(file.relative_to(made)): file.read_bytes().hex() for file in made.rglob("*") if file.is_file()}
        Path(f"after_{number}.json").write_text(json.dumps(held))


def after(folder, number):
    """The files of the run after a command."""
    held = json.loads((folder / f"after_{number}.json").read_text())
    return {name: bytes.fromhex(text) for name, text in held.items()}


def test_what_fails_or_exports_keeps_the_record_and_the_results(tmp_path):
    lines = [
        TRAINED,
        f"recipe=small {OTHER} export=tiled ckpt_path=last",
        f"{TRAINED} {OTHER} export=tiled ckpt_path=last",
        f"{TRAINED} ckpt_path=last",
        f"{TRAINED} trainer.max_epochs=4 {OTHER} ckpt_path=last",
        f"{TRAINED} export=weights ckpt_path=last",
        f"{TRAINED} export=blocks ckpt_path=last data.batch_size=32",
    ]
    said = forked.printed_by(commands, tmp_path, *lines, file=tmp_path / "said")
    codes = [line.removeprefix("code ") for line in said.splitlines() if line.startswith("code ")]
    assert codes == ["0", "2", "2", "2", "2", "0", "0"], said

    trained = after(tmp_path, 0)
    for number in range(1, 5):
        assert after(tmp_path, number) == trained, f"{lines[number]} fails, and changes the run's folder"
    exported, results = after(tmp_path, 6), json.loads(trained["results.json"])
    for name in trained:
        if name not in ("results.json", "report.html", "run.log"):
            assert exported[name] == trained[name], f"{name} was written anew by an export"
    assert results["sparse"]["val_accuracy"] > 0
    now = json.loads(exported["results.json"])
    assert [entry["file"] for entry in now.pop("exports")] == ["model.safetensors", "blocks.safetensors"]
    assert now == results
    assert b"export=blocks" not in exported[".hydra/overrides.yaml"]

    told = [line for line in said.splitlines() if line.startswith("sparse-lightning: ")]
    assert len(told) == 4
    for key in ("pattern.blocks.shape=", "schedule.final=0.8", "optimizer.lr=0.005", "trainer.max_epochs=2"):
        assert key in told[0], key
    assert "pattern.blocks.shape=[4, 4]" in told[1]
    assert "schedule" not in told[1].partition(": repeat")[0], "it did not differ"
    assert "has ended: raise trainer.max_epochs" in told[2]
    assert "masks" in told[3], "it would train longer, with other blocks"


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_an_ended_run_that_is_resumed_at_its_end_keeps_its_metrics(tmp_path):
    """As where max_steps is what ended it, and only max_epochs is raised: there is nothing left to train."""
    chosen = ["recipe=small", "compare_dense=false", "trainer.max_steps=4"]
    made = run(compose(chosen, OWN).plain(tmp_path))
    before = json.loads((tmp_path / "results.json").read_text("utf-8"))
    again = run(compose([*chosen, "trainer.max_epochs=9", "ckpt_path=last"], OWN).plain(tmp_path))
    after = json.loads((tmp_path / "results.json").read_text("utf-8"))
    assert (after["metric"], after["sparse"]) == (before["metric"], before["sparse"])
    assert "train_loss" in after["sparse"]
    [line] = [line for line in again.table.splitlines() if line.startswith("train_loss")]
    assert line in made.table


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_run_that_is_trained_longer_is_compared_to_a_baseline_that_is_too(tmp_path):
    def train(folder, epochs, *more):
        run(compose(["recipe=small", f"trainer.max_epochs={epochs}", *more], OWN).plain(folder))
        last = torch.load(folder / "dense" / "checkpoints" / "last.ckpt", weights_only=True)
        return last["epoch"], (folder / "dense.json").read_text("utf-8")

    first, short = train(tmp_path / "on", 2)
    now, longer = train(tmp_path / "on", 4, "ckpt_path=last")
    assert (first, now) == (2, 4)
    assert short != longer
    assert json.loads((tmp_path / "on" / "results.json").read_text("utf-8"))["dense"] == json.loads(longer)
    before = (tmp_path / "on" / "dense.json").stat().st_mtime_ns
    train(tmp_path / "on", 4, "ckpt_path=last", "export=weights")
    assert (tmp_path / "on" / "dense.json").stat().st_mtime_ns == before, "it was long enough"
    assert train(tmp_path / "elsewhere", 5, f"ckpt_path={tmp_path}/on/checkpoints/last.ckpt")[0] == 5


@pytest.fixture
def ended(tmp_path):
    """A folder as an ended run leaves it, trained for three epochs."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "results.json").write_text("{}")
    (tmp_path / "config.yaml").write_text("trainer: {max_epochs: 3, max_steps: -1}\nseed: 0\n")
    with ZipFile(tmp_path / "checkpoints" / "last.ckpt", "w") as archive:
        archive.writestr("archive/data.pkl", "")
    return tmp_path


@pytest.mark.parametrize(("epochs", "goes_on"), [(2, False), (3, False), (4, True), (-1, True)])
def test_only_a_higher_limit_trains_an_ended_run_longer(ended, epochs, goes_on):
    limits = {"max_epochs": epochs, "max_steps": -1}
    assert EndedRun.of(ended).goes_on({"trainer": limits}) is goes_on


def test_a_run_that_is_trained_longer_is_so_for_every_process_and_after_a_kill(ended):
    """Rank 0 has written the new configuration when others look, or when it was killed before a checkpoint."""
    note_end(ended, {"trainer": {"max_epochs": 3, "max_steps": -1}, "seed": 0})
    (ended / "config.yaml").write_text("trainer: {max_epochs: 5000, max_steps: -1}\nseed: 0\n")
    assert EndedRun.of(ended).goes_on({"trainer": {"max_epochs": 5000, "max_steps": -1}})
    assert not EndedRun.of(ended).goes_on({"trainer": {"max_epochs": 3, "max_steps": -1}})


def test_a_run_that_was_stopped_while_trained_longer_has_not_ended(ended):
    """Lightning has made last.ckpt a link then; the report is that of the earlier end."""
    last = ended / "checkpoints" / "last.ckpt"
    last.rename(last.with_name("step=9.ckpt"))
    last.symlink_to("step=9.ckpt")
    assert EndedRun.of(ended).goes_on({"trainer": {"max_epochs": 3, "max_steps": -1}})


def test_exports_may_name_other_data_devices_and_folders(ended):
    config = {
        "trainer": {"max_epochs": 3, "max_steps": -1, "accelerator": "gpu"},
        "data": {"path": "/elsewhere"},
        "export": {"_target_": "x"},
        "ckpt_path": "last",
        "folder": "/other",
        "seed": 0,
    }
    EndedRun.of(ended).check_export(config)
    with pytest.raises(ConfigError, match=r"trained with seed=0, not 1: repeat its overrides"):
        EndedRun.of(ended).check_export({**config, "seed": 1})
