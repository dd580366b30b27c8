"""Recipes and checkpoints that would run code: each is refused with its reason, and nothing runs."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch

from sparse_lightning.configuration.catalog import purpose
from sparse_lightning.configuration.launch import checked
from sparse_lightning.configuration.shards import check_checkpoint
from sparse_lightning.configuration.trust import check_trust, instantiate
from sparse_lightning.errors import ConfigError, UntrustedError

HOSTILE = Path(__file__).parent / "hostile"
RECIPES = sorted((HOSTILE / "recipe").glob("*.yaml"))
IN_A_PROCESS = ("hydra_callback", "hydra_logging", "os_system", "sweeper")


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return (Path.touch, (self.proof,))


@pytest.fixture
def proof(tmp_path, monkeypatch):
    """The file that every hostile recipe would make."""
    file = tmp_path / "proof"
    (tmp_path / "hubconf.py").write_text(f"open({str(file)!r}, 'w')\ndef evil(): pass\n")
    (tmp_path / "script.py").write_text(f"open({str(file)!r}, 'w')\n")
    (tmp_path / "evil.pickle").write_bytes(pickle.dumps(Evil(file)))
    monkeypatch.setenv("HOSTILE_PROOF", str(file))
    monkeypatch.setenv("HOSTILE_FOLDER", str(tmp_path))
    monkeypatch.setenv("HOSTILE_SCRIPT", str(tmp_path / "script.py"))
    monkeypatch.setenv("HOSTILE_PICKLE", str(tmp_path / "evil.pickle"))
    monkeypatch.chdir(tmp_path)
    return file


def test_there_are_many_ways_to_be_hostile():
    assert len(RECIPES) >= 15


def test_the_proof_is_made_where_nothing_stops_it(proof):
    pickle.loads((proof.parent / "evil.pickle").read_bytes())
    assert proof.exists()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)
def test_a_hostile_recipe_is_refused_with_its_reason(recipe, proof):
    with pytest.raises(UntrustedError, match=purpose(recipe.read_text("utf-8"))):
        checked([f"recipe={recipe.stem}"], str(HOSTILE))
    assert not proof.exists(), f"{recipe.stem} has run"


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_A_PROCESS)
def test_the_command_line_refuses_before_hydra_runs_anything(name, console_script, proof):
    command = [console_script, "--config-dir", HOSTILE, f"recipe={name}"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 2, ran.stderr
    assert "Traceback" not in ran.stderr
    assert re.search(purpose((HOSTILE / "recipe" / f"{name}.yaml").read_text("utf-8")), ran.stderr)
    assert not proof.exists()
    assert sorted(os.listdir(proof.parent)) == ["evil.pickle", "hubconf.py", "script.py"]


def test_a_checkpoint_that_would_run_code_is_refused(proof):
    torch.save({"state_dict": {}, "evil": Evil(proof)}, "evil.ckpt")
    with pytest.raises(ConfigError, match=r"evil\.ckpt holds more than tensors and plain values: \w"):
        check_checkpoint(L.Trainer(logger=False, accelerator="cpu"), "evil.ckpt")
    assert not proof.exists()
    torch.load("evil.ckpt", weights_only=False)
    assert proof.exists(), "it would have"


@pytest.mark.parametrize("size", [0, 300])
def test_a_checkpoint_that_was_cut_short_is_refused(size, tmp_path):
    torch.save({"state_dict": {"weight": torch.ones(99)}}, tmp_path / "cut.ckpt")
    trainer = L.Trainer(logger=False, accelerator="cpu")
    check_checkpoint(trainer, tmp_path / "cut.ckpt")
    os.truncate(tmp_path / "cut.ckpt", size)
    with pytest.raises(ConfigError, match=r"cut\.ckpt is no checkpoint, or was cut short"):
        check_checkpoint(trainer, tmp_path / "cut.ckpt")


def test_nothing_is_called_where_a_later_target_is_refused(tmp_path, monkeypatch):
    (tmp_path / "my_pkg.py").write_text("def make(): open('made', 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    config = {"first": {"_target_": "my_pkg.make"}, "second": {"_target_": "os.system", "command": "ls"}}
    with pytest.raises(UntrustedError, match=r"second\._target_"):
        instantiate(config, trusted=["my_pkg"])
    assert not Path("made").exists()
    assert "my_pkg" not in sys.modules, "a package was imported before all names were looked at"


def test_a_prefix_that_the_user_trusts_works(tmp_path, monkeypatch):
    (tmp_path / "our_pkg.py").write_text("import os\n\nclass Thing:\n    pass\n\ncall = os.system\n")
    monkeypatch.syspath_prepend(tmp_path)
    thing = {"_target_": "our_pkg.Thing"}
    with pytest.raises(UntrustedError, match=r"trusted_targets=\[our_pkg\]"):
        instantiate(thing, "model")
    assert type(instantiate(thing, "model", ["our_pkg"])).__name__ == "Thing"
    with pytest.raises(UntrustedError, match=r"posix.system|nt.system"):
        instantiate({"_target_": "our_pkg.call"}, "model", ["our_pkg"])
    with pytest.raises(UntrustedError, match="our_pkgs"):
        check_trust({"_target_": "our_pkgs.Thing"}, trusted=["our_pkg"])


@pytest.mark.parametrize(
    "path",
    [
        "torch.nn.Linear",
        "torch.nn.functional.relu",
        "torch.optim.AdamW",
        "torch.optim.lr_scheduler.StepLR",
        "torch.utils.data.DataLoader",
        "torchmetrics.classification.MulticlassAccuracy",
        "lightning.Trainer",
        "lightning.pytorch.loggers.CSVLogger",
        "lightning.pytorch.callbacks.EarlyStopping",
        "lightning.pytorch.strategies.DDPStrategy",
        "sparse_lightning.Blocks",
        "sparse_lightning.schedules.OneShot",
    ],
)
def test_what_recipes_need_is_allowed(path):
    check_trust({"model": {"_target_": path}})


@pytest.mark.parametrize("path", ["", "os", 5, None, "torch", "torch.nn", "torch..nn", "torch.nn.", ["os", "system"]])
def test_what_is_no_name_is_refused(path):
    with pytest.raises(UntrustedError, match=r"model\._target_"):
        check_trust({"model": {"_target_": path}})
