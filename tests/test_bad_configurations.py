"""Bad configurations: each ends before training, with one message that names the place and the nearest right name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparse_lightning.configuration.compose import compose
from sparse_lightning.configuration.launch import checked
from sparse_lightning.errors import ConfigError
from sparse_lightning.run import prepare

OWN = str(Path(__file__).parent / "own_conf")

BAD = {
    # what is typed: what the message says
    "schedule=cubik": "schedule: there is no option 'cubik': did you mean 'cubic'?",
    "recipe=smal": "recipe: there is no option 'smal': did you mean 'small'?",
    "shedule=cubic": "shedule: there is no such key: did you mean 'schedule'?",
    "schedule.finl=0.5": "schedule.finl: there is no such key: did you mean 'final'?",
    "+schedule.finl=0.5": "schedule.finl: Cubic takes no 'finl': did you mean 'final'?",
    "trainer.limit_test_batches=2": "write +trainer.limit_test_batches=",
    "recipe=misspelt_key": "shedule: there is no such key: did you mean 'schedule'?",
    "recipe=no_yaml": "a YAML file cannot be read",
    "recipe=late_header": "its first line has to be `# @package _global_`",
    "seed": "An override is key=value",
    "seed=x": "seed: 'x' is not a whole number",
    "seed=-1": "seed: -1 does not lie between",
    "compare_dense=maybe": "compare_dense: 'maybe' is not true or false",
    "update_every=0": "update_every: 0 steps: it must be at least 1",
    "update_every=2.5": "update_every: 2.5 is not a whole number",
    "schedule.final=1.5": "schedule: final=1.5 of Cubic: a sparsity must lie between 0",
    "schedule.final=high": "schedule.final: 'high' is not float",
    "schedule.final=null": "schedule.final: None is not float",
    "schedule.begin=0.9": "ends before it begins",
    "~schedule.final": "schedule.final: Cubic needs 'final', which is not given",
    "schedule.initial=0.95": "initial=0.95 of Cubic is above final=0.9",
    "schedule._target_=sparse_lightning.Kubic": "there is no 'Kubic' in sparse_lightning: did you mean 'Cubic'?",
    "criterion.p=3": "criterion: Magnitude knows p = 1, 2 and inf, not 3",
    "method=rigl method.share=2": "method: a share of 2 to exchange",
    "budget.overrides={first.weight:0.5}": "inside of it: to add one, write +budget.overrides=",
    "+budget.overrides={frst.weight:0.5}": "budget.overrides: the override 'frst.weight' matches nothing",
    "budget.overrides=0.5": "budget.overrides: 0.5 is not",
    "pattern.blocks.match=[frst.weight]": "pattern: Blocks(match=('frst.weight',), shape=(4, 4)): 'frst.weight'",
    "pattern.blocks.shape=[5,5]": "does not fit first.weight of shape (32, 64)",
    "pattern.blocks.shape=four": "pattern.blocks.shape: 'four' is not Sequence",
    "pattern.blocks.scope=rows": "there is no scope 'rows': did you mean 'row'?",
    "pattern.blocks.edge=cut": "pattern.blocks.edge: 'cut' is not 'error' or 'partial'",
    "~pattern.blocks": "pattern: there is none",
    "model.hidden=wide": "model.hidden: 'wide' is not int",
    "model._target_=torch.nn.Linear": "model.optimizer: Linear takes no 'optimizer'",
    "model=gpt": "model.context: Interpolation key 'data.context' not found",
    "trainer.max_epochs=many": "trainer.max_epochs: 'many' is not int or null",
    "trainer.accelerator=abacus": "trainer: ",
    "optimizer.lr=-1": "optimizer: Invalid learning rate: -1",
    "optimizer.learning_rate=1": "optimizer.learning_rate: there is no such key",
    "ckpt_path=nowhere.ckpt": "ckpt_path: there is no file nowhere.ckpt",
    "ckpt_path=last": "ckpt_path: there is no checkpoint in outputs/small",
    "data=text_file data.path=nowhere.txt": "nowhere.txt",
    "seed=1,2": "several values are a sweep: add -m",
    "trusted_targets=my_pkg": "trusted_targets: 'my_pkg' is not a list of prefixes",
    "export=weights export.fil=x": "export.fil: there is no such key: did you mean 'file'?",
}


def attempt(typed):
    """All that happens before training."""
    overrides = typed.split() if "recipe=" in typed else ["recipe=small", *typed.split()]
    plan = checked(overrides, OWN)
    prepare(compose(overrides, OWN).plain(plan.folder), plan.trusted)


@pytest.mark.parametrize(("typed", "message"), BAD.items(), ids=list(BAD))
def test_a_bad_configuration_is_refused_before_training(typed, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        attempt(typed)
    assert message in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_there_are_thirty_and_the_good_one_is_good(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(BAD) >= 30
    attempt("schedule.final=0.5")


def command_line(script, typed, folder, **variables):
    command = [script, "--config-dir", OWN, "recipe=small", typed]
    environment = {**os.environ, **variables}
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=180, check=False, env=environment
    )


@pytest.mark.slow
@pytest.mark.parametrize("typed", ["schedule=cubik", "schedule.final=1.5", "pattern.blocks.match=[frst.weight]"])
def test_the_command_line_says_it_in_one_message(typed, console_script, tmp_path):
    ran = command_line(console_script, typed, tmp_path)
    assert ran.returncode == 2, ran.stderr
    assert BAD[typed] in ran.stderr
    assert len(ran.stderr.strip().splitlines()) == 1, ran.stderr


@pytest.mark.slow
def test_the_command_line_shows_where_it_was_raised_if_asked(console_script, tmp_path):
    ran = command_line(console_script, "schedule=cubik", tmp_path, HYDRA_FULL_ERROR="1")
    assert ran.returncode != 0
    assert "Traceback" in ran.stderr


@pytest.mark.parametrize("typed", ["schedule=cubik", "schedule.fnal=0.5", "recipe=digts_rigl", "seed=1,2"])
def test_a_slip_of_the_pen_is_answered_before_torch_is_imported(typed, tmp_path):
    program = (
        "import sys; from sparse_lightning.cli import answer; code = answer(sys.argv[1:]); "
        "sys.exit(3 if {'torch', 'lightning'} & set(sys.modules) else code)"
    )
    ran = subprocess.run([sys.executable, "-c", program, typed], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 2, ran.stderr
    assert ran.stderr.startswith("sparse-lightning: ")
