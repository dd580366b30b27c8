"""A run of the command line composes once, checks once, and builds each of its objects once."""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from sparse_lightning.app import check, compose, launch, run
from sparse_lightning.app.cli import answer

PACKAGE = """
import lightning as L
from sparse_lightning import Magnitude
from sparse_lightning.data import Digits
from sparse_lightning.export import Weights
from sparse_lightning.models import DigitsMLP
from sparse_lightning.report.metrics_file import MetricsFile

built = []

class Recorded:
    def __init__(self, *args, **kwargs):
        built.append(type(self).__name__)
        super().__init__(*args, **kwargs)

class Model(Recorded, DigitsMLP):
    def __init__(self, optimizer, hidden=32):
        super().__init__(optimizer, hidden)

class Data(Recorded, Digits): pass
class Criterion(Recorded, Magnitude): pass
class Logger(Recorded, MetricsFile): pass
class Export(Recorded, Weights): pass
class Trainer(Recorded, L.Trainer): pass
"""
RECIPE = """# @package _global_
# A run whose objects record that they are built.
defaults:
  - override /export: weights
  - override /model: digits_mlp
model: {_target_: recorded.Model, optimizer: "${optimizer}", hidden: 32}
data: {_target_: recorded.Data}
criterion: {_target_: recorded.Criterion}
logger: {_target_: recorded.Logger, folder: "${folder}"}
export: {_target_: recorded.Export}
trainer:
  _target_: recorded.Trainer
  max_epochs: 1
  limit_train_batches: 2
  limit_val_batches: 1
  enable_progress_bar: false
pattern: {blocks: {match: [first.weight]}}
update_every: 1
"""
USERS = (launch, run)
"""Imported here, so that all uses of the functions below are known when they are counted."""
OBJECTS = ("Model", "Data", "Criterion", "Logger", "Export", "Trainer")


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """Run the command line in an empty folder; return what was built, and how often was composed and checked."""
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    (tmp_path / "conf" / "recipe" / "recorded.yaml").write_text(RECIPE, "utf-8")
    (tmp_path / "recorded.py").write_text(PACKAGE, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "recorded", raising=False)
    calls: Counter[str] = Counter()
    count(monkeypatch, calls, compose.compose)
    count(monkeypatch, calls, check.check)

    def run(*typed):
        own = ["--config-dir", str(tmp_path / "conf"), "recipe=recorded", "trusted_targets=[recorded]"]
        assert answer([*own, *typed]) == 0
        return Counter(sys.modules["recorded"].built), calls

    return run


def count(monkeypatch, calls, function):
    """Count the calls of a function, in whatever module of the package its name is used."""

    def counting(*args, **kwargs):
        calls[function.__name__] += 1
        return function(*args, **kwargs)

    modules = [module for name, module in sys.modules.items() if name.startswith("sparse_lightning.")]
    for module in modules:
        for name, value in list(vars(module).items()):
            if value is function:
                monkeypatch.setattr(module, name, counting)


def test_a_single_run_builds_each_object_once(counted):
    built, calls = counted("compare_dense=false")
    assert built == Counter(OBJECTS)
    assert calls == {"compose": 1, "check": 1}


def test_a_dense_twin_has_its_own_model_data_and_trainer(counted):
    built, calls = counted("compare_dense=true")
    assert built == Counter([*OBJECTS, "Model", "Data", "Trainer"])
    assert calls == {"compose": 1, "check": 1}


def test_a_sweep_of_two_runs_builds_each_object_twice(counted):
    built, calls = counted("-m", "seed=1,2", "compare_dense=false")
    assert built == Counter([*OBJECTS, *OBJECTS])
    assert calls == {"compose": 2, "check": 2}


def test_a_run_that_names_its_folder_elsewhere_still_gets_it(counted, tmp_path):
    """Then objects that were built before the folder was known are built again."""
    built, calls = counted(
        "compare_dense=false", "export.file=${name}.safetensors", "+trainer.default_root_dir=${folder}"
    )
    assert built["Trainer"] == 2
    assert built["Model"] == built["Logger"] == 1
    assert calls == {"compose": 1, "check": 1}
    [folder] = tmp_path.glob("outputs/recorded/*")
    assert (folder / "recorded.safetensors").is_file()
