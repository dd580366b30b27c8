"""Sweeps with plugins of Hydra: what the user chooses works, and a recipe adds nothing to it."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from sparse_lightning.app.checked import check_runs
from sparse_lightning.app.cli import answer
from sparse_lightning.errors import ConfigError, UntrustedError

OWN = str(Path(__file__).parent / "own_conf")
DOCS = Path(__file__).parent.parent / "docs" / "hydra.md"
PLUGINS = pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="the extra sweeps is not installed")


def documented():
    """The commands of the documents that need the extra `sweeps`, without their comments."""
    section = DOCS.read_text("utf-8").partition("\n## Sweeps\n")[2].partition("\n## ")[0]
    return [line.partition("  #")[0].strip() for line in section.splitlines() if line.startswith("sparse-lightning ")]


@pytest.fixture
def call(tmp_path, monkeypatch, capfd):
    """Run the command line in this process, in an empty folder; return what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)

    def run_to_its_end(*typed):
        code = answer(["--config-dir", OWN, "recipe=small", "compare_dense=false", *typed])
        read = capfd.readouterr()
        assert code == 0, read.out + read.err
        return read.out + read.err

    return run_to_its_end


def results(folder):
    found = sorted(folder.glob("multirun/small/*/*/config.yaml"))
    return [float(re.search(r"final: (.*)", file.read_text("utf-8"))[1]) for file in found]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Optuna and SQLAlchemy, which it uses in an old way
def test_plugins_work_together(call, tmp_path):
    swept = ["schedule.final=interval(0.5, 0.9)", "criterion=glob([magnitude, tay*])", "hydra.sweeper.n_jobs=1"]
    plugins = ["hydra/sweeper=optuna", "hydra/launcher=joblib", "hydra/job_logging=colorlog"]
    call("-m", *swept, *plugins, "hydra.sweeper.n_trials=1", "hydra.launcher.n_jobs=1")
    [final] = results(tmp_path)
    assert 0.5 <= final <= 0.9
    assert os.listdir(tmp_path) == ["multirun"], "files lie outside"
    assert list(tmp_path.glob("multirun/small/*/0/run.log"))


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_every_documented_sweep_runs(call, tmp_path):
    """Each in a folder of its own; only the numbers of trials, jobs and minutes are smaller."""
    commands = documented()
    assert [name for name in ("optuna", "interval", "glob", "colorlog", "joblib", "submitit_local", "submitit_slurm")
            if not any(name in command for command in commands)] == []  # fmt: skip
    for i, command in enumerate(line for line in commands if "slurm" not in line):
        folder = tmp_path / str(i)
        folder.mkdir()
        os.chdir(folder)
        small = ["hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1"] if "optuna" in command else []
        small += ["hydra.launcher.n_jobs=1"] if "joblib" in command else []
        said = call(*shlex.split(command)[1:], *small)
        runs = list(folder.glob("**/results.json"))
        assert len(runs) == (1 if "-m" not in command else 2), said
        assert sorted(os.listdir(folder)) == ["multirun" if "-m" in command else "outputs"], "files lie outside"
        assert all(json.loads(file.read_text("utf-8")) for file in runs)
        if "optuna" in command:
            assert all(0.5 <= final <= 0.9 for final in results(folder))
            [best] = folder.glob("multirun/small/*/optimization_results.yaml")
            assert "best_value" in best.read_text("utf-8")


def test_a_glob_stands_for_the_options_that_it_matches(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = check_runs(["recipe=small", "criterion=glob([mag*, t*], exclude=x)"], OWN, multirun=True).runs
    assert [run.config.criterion._target_.rpartition(".")[2] for run in runs] == ["Magnitude", "Taylor"]
    assert len(check_runs(["recipe=glob(sm*)"], OWN).runs) == 1, "recipes of the user are found"
    with pytest.raises(ConfigError, match=r"on=glob\(x\*\): no option of criterion matches: choose of "):
        check_runs(["criterion=glob(x*)"], multirun=True)


def test_the_ends_of_an_interval_are_checked():
    optuna = ["recipe=small", "hydra/sweeper=optuna"]
    assert len(check_runs([*optuna, "schedule.final=interval(0.5,0.9)"], OWN, multirun=True).runs) == 2
    with pytest.raises(ConfigError, match=r"seed: 9\.0 is not a whole number"):
        check_runs([*optuna, "seed=tag(log, interval(9.0, 9.5))"], OWN, multirun=True)
    with pytest.raises(ConfigError, match=r"0\.9\): the basic sweeper draws no values .* hydra/sweeper=optuna, which"):
        check_runs(["schedule.final=interval(0.5,0.9)"], multirun=True)
    with pytest.raises(ConfigError, match="several values request a sweep: add -m"):
        check_runs([*optuna, "schedule.final=interval(0.5,0.9)"], OWN)


ADDED = {
    # a recipe: what the user types, and the setting that is refused
    "defaults: [{override /hydra/sweeper: optuna}]": ("job_logging=colorlog", "sweeper._target_: 'hydra_plugins"),
    "hydra: {sweeper: {custom_search_space: os.system}}": (
        "sweeper=optuna",
        "sweeper.custom_search_space: 'os",
    ),
    "hydra: {sweeper: {storage: 'sqlite:////tmp/proof'}}": (
        "sweeper=optuna",
        "sweeper.storage: 'sqlite:////tmp/proof'",
    ),
    "hydra: {sweeper: {sampler: {_target_: os.system}}}": (
        "sweeper=optuna",
        "sweeper.sampler: {'_target_': 'os",
    ),
    "defaults: [{override /hydra/sweeper/sampler: grid}]": ("sweeper=optuna", "sweeper.sampler: {'_target_': 'optuna"),
    "hydra: {launcher: {temp_folder: /tmp/proof}}": ("launcher=joblib", "launcher.temp_folder: '/tmp/proof'"),
    "hydra: {launcher: {pre_dispatch: 9**9**9}}": ("launcher=joblib", r"launcher.pre_dispatch: '9\*\*9\*\*9'"),
    "hydra: {launcher: {setup: [touch proof]}}": ("launcher=submitit_slurm", r"launcher.setup: \['touch proof'\]"),
    "hydra: {launcher: {submitit_folder: /tmp/p}}": ("launcher=submitit_local", "launcher.submitit_folder: '/tmp/p'"),
    "hydra: {job_logging: {handlers: {file: {mode: w}}}}": ("job_logging=colorlog", "job_logging.handlers: {"),
    "hydra: {callbacks: {a: {_target_: hydra_plugins.x.Y}}}": ("launcher=joblib", "callbacks.a._target_: 'hydra_plug"),
}


@pytest.mark.parametrize(("recipe", "typed", "place"), [(k, *v) for k, v in ADDED.items()])
def test_a_recipe_adds_nothing_to_a_plugin_that_the_user_chooses(recipe, typed, place, tmp_path):
    Path(tmp_path, "recipe").mkdir()
    Path(tmp_path, "recipe", "own.yaml").write_text(f"# @package _global_\n{recipe}\n")
    with pytest.raises(UntrustedError, match=f"hydra.{place}.* is not allowed"):
        check_runs(["recipe=own", f"hydra/{typed}"], str(tmp_path), multirun=True)


@pytest.mark.filterwarnings("ignore:\\s*'hydra/launcher/joblib' is validated")  # by Hydra: a plugin has the name
def test_a_file_beside_the_recipe_does_not_stand_for_a_plugin(tmp_path):
    Path(tmp_path, "hydra", "launcher").mkdir(parents=True)
    text = "_target_: hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher\ntemp_folder: /tmp/proof\n"
    Path(tmp_path, "hydra", "launcher", "joblib.yaml").write_text(text)
    with pytest.raises(UntrustedError, match=r"hydra\.launcher\.\w+: .* is not allowed in a recipe"):
        check_runs(["hydra/launcher=joblib"], str(tmp_path))


def test_a_launcher_in_a_file_of_the_user_may_use_what_hydra_has_and_what_is_trusted(tmp_path):
    Path(tmp_path, "hydra", "launcher").mkdir(parents=True)
    file = Path(tmp_path, "hydra", "launcher", "mine.yaml")
    typed = ["hydra/launcher=mine", "seed=1,2", "recipe=digits_blocks"]
    file.write_text("defaults: [basic]", "utf-8")
    assert len(check_runs(typed, str(tmp_path), True).runs) == 2
    file.write_text("_target_: os.system", "utf-8")
    with pytest.raises(UntrustedError, match=r"launcher\._target_: 'os\.system' is not allowed.*trusted_targets"):
        check_runs(typed, str(tmp_path), True)
    file.write_text("_target_: hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher", "utf-8")
    check_runs([*typed, "trusted_targets=[hydra_plugins]"], str(tmp_path), True)
