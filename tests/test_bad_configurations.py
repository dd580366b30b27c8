"""Bad configurations: each ends before training, with one message that names the place and the nearest right name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparse_lightning.app.checked import check_runs
from sparse_lightning.app.cli import answer
from sparse_lightning.app.prepare import prepare_runs
from sparse_lightning.errors import ConfigError

OWN = str(Path(__file__).parent / "own_conf")

BAD = {
    # what is typed: what the message says
    "schedule=cubik": "schedule: there is no option 'cubik': did you mean 'cubic'?",
    "recipe=smal": "recipe: there is no option 'smal': did you mean 'small'?",
    "shedule=cubic": "shedule: there is no such key: did you mean 'schedule'?",
    "schedule.finl=0.5": "schedule.finl: there is no such key: did you mean 'final'?",
    "+schedule.finl=0.5": "schedule.finl: Cubic takes no 'finl': did you mean 'final'?",
    "+schedule.final=0.5": "schedule.final: this key exists already: write it without +",
    "trainer.limit_test_batches=2": "write +trainer.limit_test_batches=",
    "recipe=misspelt_key": "shedule: there is no such key: did you mean 'schedule'?",
    "recipe=no_yaml": "a YAML file cannot be parsed",
    "recipe=late_header": "the first line must be `# @package _global_`",
    "seed": "An override is key=value",
    "seed=x": "seed: 'x' is not a whole number",
    "seed=-1": "seed: -1 is not between",
    "compare_dense=maybe": "compare_dense: 'maybe' is not true or false",
    "update_every=0": "update_every: 0 is too small: it must be at least 1",
    "update_every=2.5": "update_every: 2.5 is not a whole number",
    "schedule.final=1.5": "schedule: final=1.5 of Cubic: a sparsity must lie between 0",
    "schedule.begin=-3": "schedule: begin=-3 of Cubic is not a step",
    "schedule.final=high": "schedule.final: 'high' is not float",
    "schedule.final=null": "schedule.final: None is not float",
    "schedule.begin=0.9": "ends before it begins",
    "~schedule.final": "schedule.final: Cubic requires 'final', which is missing",
    "schedule.initial=0.95": "initial=0.95 of Cubic is above final=0.9",
    "schedule._target_=sparse_lightning.Kubic": "there is no 'Kubic' in sparse_lightning: did you mean 'Cubic'?",
    "criterion=magnitude criterion.p=3": "criterion: p=3 of Magnitude is not supported: pass 1, 2 or inf",
    "method=rigl method.drop_fraction=2": "method: drop_fraction=2 is out of range",
    "budget.overrides={first.weight:0.5}": "in its present value: to add one, write +budget.overrides=",
    "+budget.overrides={frst.weight:0.5}": "budget.overrides: the override 'frst.weight' matches no pruned scope",
    "+budget.overrides={7:0.5}": "budget: the override 7=0.5 has no name: pass a glob of scopes",
    "trainer.accumulate_grad_batches=0": "trainer.accumulate_grad_batches: 0 is out of range: pass 1 or more",
    "trainer.max_steps=0": "trainer.max_steps: 0 trains nothing: pass a positive number",
    "trainer.limit_train_batches=0": "trainer.limit_train_batches: 0 trains nothing: pass a positive number",
    "+trainer.gradient_clip_val=-1.0": "trainer.gradient_clip_val: -1.0 would reverse the gradients",
    "model.hidden=99999999999999999999": "Overflow when unpacking long",
    "budget.overrides=0.5": "budget.overrides: 0.5 is not",
    "pattern.blocks.match=[frst.weight]": "pattern: Blocks(match=('frst.weight',), shape=(4, 4)): 'frst.weight'",
    "pattern.blocks.shape=[5,5]": "does not fit first.weight of shape (32, 64)",
    "pattern.blocks.shape=four": "pattern.blocks.shape: 'four' is not Sequence",
    "pattern.blocks.scope=rows": "there is no scope 'rows': did you mean 'row'?",
    "pattern.blocks.edge=cut": "pattern.blocks.edge: 'cut' is not 'error' or 'partial'",
    "~pattern.blocks": "pattern: no pattern is set: choose pattern=blocks",
    "model.hidden=wide": "model.hidden: 'wide' is not int",
    "model._target_=torch.nn.Linear": "model.in_features: Linear requires 'in_features', which is missing",
    "model=gpt": "model.context: Interpolation key 'data.context' not found",
    "trainer.max_epochs=many": "trainer.max_epochs: 'many' is not int or null",
    "trainer.accelerator=abacus": "accelerator='abacus'",
    "optimizer.lr=-1": "optimizer: Invalid learning rate: -1",
    "optimizer.learning_rate=1": "optimizer.learning_rate: there is no such key",
    "ckpt_path=nowhere.ckpt": "ckpt_path: there is no checkpoint at nowhere.ckpt",
    "ckpt_path=last": "ckpt_path: there is no checkpoint in outputs/small",
    "data=text_file data.path=nowhere.txt": "data.path=nowhere.txt does not exist: set it to a text file",
    "seed=1,2": "several values request a sweep: add -m",
    "trusted_targets=my_pkg": "trusted_targets: 'my_pkg' is not a list of prefixes",
    "data.batch_size=0": "data: batch_size=0 is out of range: pass 1 or more",
    "data.num_workers=-1": "data: num_workers=-1 is out of range: pass 0 or more",
    "criterion=null": "criterion: None is not an option: choose criterion=auto, or another",
    "trainer=7": "trainer: 7 is not an option: choose trainer=cpu, or another",
    "recipe=null": "recipe: None is not an option: choose recipe=digits_blocks, or another",
    "hydra=null": "hydra: None is not an option: set its keys, or remove it",
    "hydra.run.dir=''": "hydra.run.dir: '' is not the name of a folder: write one, such as hydra.run.dir=outputs/mine",
    "hydra.run.dir=.": "hydra.run.dir: '.' is not the name of a folder",
    "folder=7": "folder: 7 is not the name of a folder: write one, such as folder=outputs/mine",
    "hydra.verbose=[7]": "hydra.verbose: [7] is not true, false, or names of loggers: correct or remove it",
    "hydra.launcher=null": "hydra.launcher: None is not a launcher: use hydra/launcher=basic",
    "hydra.sweeper=null": "hydra.sweeper: None is not a sweeper: use hydra/sweeper=basic",
    "hydra.searchpath=[http://x]": "hydra.searchpath: 'http://x' is not supported: pass a list of folders, such as",
    "hydra.searchpath=7": "hydra.searchpath: 7 is not supported: pass a list of folders, such as",
    f"seed={'9' * 5000}": "seed=999999999999999999999999…99999999999999999999999999999: Exceeds the limit",
    f"+{'k' * 100_000}=1": "kkk: a key has at most 200 characters, and this one 100,000",
    f"schedule={'o' * 300}": "schedule: there is no option 'ooo",
    "+trainer.val_check_interval=0": "trainer.val_check_interval: 0 is out of range: pass a positive number, or",
    "+trainer.check_val_every_n_epoch=0": "trainer.check_val_every_n_epoch: 0 is out of range: pass a positive number",
    "optimizer.lr=inf": "optimizer.lr: inf is not finite: pass a number",
    "recipe=hydra_null": "hydra_null.yaml is not allowed: hydra: None is not a mapping. Remove it",
    "recipe=long_number": "long_number.yaml is not allowed: the number 12345678901234567890… has 1,100 digits",
    "recipe=latin": "a file of the configuration cannot be read: 'utf-8' codec can't decode byte 0xe9",
    # parts of the wrong kind
    "schedule._target_=lightning.pytorch.loggers.CSVLogger +schedule.save_dir=${folder}": (
        "schedule._target_: CSVLogger is not a Schedule. Choose an option of schedule"
    ),
    "+schedule._partial_=true": "schedule._partial_: true makes no Schedule yet. Remove it",
    "~optimizer._partial_": "model.optimizer.params: AdamW requires 'params', which is missing",
    "schedule=constant schedule._target_=sparse_lightning.Magnitude": (
        "schedule._target_: Magnitude is not a Schedule. Choose an option of schedule"
    ),
    "criterion={_target_:lightning.pytorch.loggers.CSVLogger,save_dir:'${folder}'}": "criterion: ",
    "export=weights export._target_=sparse_lightning.Magnitude ~export.file": (
        "export._target_: sparse_lightning.Magnitude cannot export: it is not called with a folder, a model and a "
        "Sparsifier. Choose export=weights, or another"
    ),
    "pattern.blocks={_target_:sparse_lightning.Magnitude}": "pattern.blocks",
    "+trainer.callbacks=[1]": "trainer.callbacks[0]._target_: int is not a Callback",
    "+trainer.callbacks=7": "trainer.callbacks: 7 is not a list: write - _target_",
    "+trainer.callbacks=[{_target_:lightning.pytorch.callbacks.EarlyStopping,monitor:x,mode:up}]": (
        "trainer.callbacks[0]: `mode` can be min, max, got up"
    ),
    "+trainer.profiler=pytorch": (
        "trainer.profiler: 'pytorch' is not allowed: it writes files outside of the run's folder. Use simple or "
    ),
    "export=weights export.fil=x": "export.fil: there is no such key: did you mean 'file'?",
}


def attempt(typed):
    """All that happens before training."""
    overrides = typed.split() if "recipe=" in typed else ["recipe=small", *typed.split()]
    checked = check_runs(overrides, OWN)
    prepare_runs(checked).take(checked.runs[0]).build()


@pytest.mark.parametrize(("typed", "message"), BAD.items(), ids=[typed[:60] for typed in BAD])
def test_a_bad_configuration_is_refused_before_training(typed, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        attempt(typed)
    assert message in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_good_configuration_is_not_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    attempt("schedule.final=0.5")


MESSAGES = """
import sys
from sparse_lightning.app.cli import answer
for typed in sys.argv[2:]:
    try:
        code = answer(["--config-dir", sys.argv[1], "recipe=small", typed])
    except SystemExit as ended:  # by Hydra, inside of the job
        code = ended.code
    torch = "torch" if {"torch", "lightning"} & set(sys.modules) else "no torch"
    print(code, torch, file=sys.stderr)
"""


def test_the_command_line_prints_one_message_and_imports_torch_last(tmp_path):
    """In one process: typos of names and schedules out of range are reported before torch is imported, others after."""
    typos = ["schedule=cubik", "schedule.finl=0.5", "recipe=smal", "seed=1,2", "schedule.final=1.5"]
    others = ["pattern.blocks.match=[frst.weight]"]
    command = [sys.executable, "-c", MESSAGES, OWN, *typos, *others]
    environment = {key: value for key, value in os.environ.items() if key != "HYDRA_FULL_ERROR"}
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180, env=environment)
    lines = ran.stderr.strip().splitlines()
    assert len(lines) == 2 * len(typos + others), ran.stderr
    for typed, message, end in zip(typos + others, lines[::2], lines[1::2], strict=True):
        assert message.startswith("sparse-lightning: ")
        assert BAD[typed] in message
        assert end == ("2 no torch" if typed in typos else "2 torch"), typed


@pytest.mark.slow
def test_the_console_script_exits_with_a_code(console_script, tmp_path):
    command = [console_script, "schedule=cubik"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == f"sparse-lightning: {BAD['schedule=cubik']}\n"


def test_the_traceback_is_shown_on_request(monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ConfigError, match="cubik"):
        answer(["schedule=cubik"])
