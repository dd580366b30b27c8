"""The groups in a Hydra application of the user's, and the callback in a LightningCLI program."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys

import pytest
from forked import printed_by

from sparse_lightning import SparsityCallback

APPLICATION = """
import hydra
from hydra.utils import instantiate

@hydra.main(version_base="1.3", config_path=".", config_name="app")
def main(config):
    import sys
    assert "torch" not in sys.modules, "the plugin imports torch"
    print(instantiate(config.sparse_lightning.schedule), instantiate(config.scoring).p, config.mine)

main()
"""
CONFIG = """
defaults:
  - sparse_lightning/schedule: cubic
  - sparse_lightning/criterion@scoring: magnitude
  - _self_
mine: 1
hydra:
  run:
    dir: .
  output_subdir: null
"""
PROGRAM = """
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

def cli(*arguments):
    LightningCLI(BoringModel, BoringDataModule, save_config_callback=None, args=list(arguments))

cli("fit", "--config", "sparse.yaml")
cli("fit", "--trainer.callbacks.help=sparse_lightning.SparsityCallback")
"""
LIGHTNING = """
trainer:
  accelerator: cpu
  max_steps: 8
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  callbacks:
    - class_path: sparse_lightning.SparsityCallback
      init_args:
        patterns:
          - class_path: sparse_lightning.Blocks
            init_args:
              match: layer.weight
              shape: [1, 4]
        schedule:
          class_path: sparse_lightning.Cubic
          init_args:
            final: 0.75
        update_every: 2
"""


def call(folder, *arguments):
    env = {key: value for key, value in os.environ.items() if key != "HYDRA_FULL_ERROR"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180, check=False, env=env)


@pytest.mark.slow
def test_a_hydra_application_uses_the_groups(tmp_path):
    (tmp_path / "app.py").write_text(APPLICATION)
    (tmp_path / "app.yaml").write_text(CONFIG)
    ran = call(
        tmp_path,
        "app.py",
        "sparse_lightning.schedule.final=0.5",
        "sparse_lightning/criterion@scoring=magnitude",
    )
    assert ran.returncode == 0, ran.stderr
    assert "Cubic(final=0.5, begin=0.1, end=0.7, initial=0.0) 2 1" in ran.stdout
    ran = call(tmp_path, "app.py", "sparse_lightning/schedule=steps", "--cfg", "job")
    assert "milestones" in ran.stdout, ran.stderr
    ran = call(tmp_path, "app.py", "sparse_lightning/schedule=cubik")
    assert "cubic" in ran.stderr, "Hydra lists the options"


def run_program(folder):
    os.chdir(folder)
    runpy.run_path("program.py", run_name="__main__")


@pytest.mark.slow
def test_a_lightning_cli_program_reads_the_callback_from_yaml_and_its_help_from_docstrings(tmp_path):
    pytest.importorskip("jsonargparse")
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "sparse.yaml").write_text(LIGHTNING)
    printed = printed_by(run_program, tmp_path, file=tmp_path / "printed")
    assert "layer.weight 2×32" in printed
    text = " ".join(printed.split())
    documented = re.findall(r"^ +(\w+): (.+)$", SparsityCallback.__doc__.partition("Args:")[2], re.MULTILINE)
    assert {"patterns", "schedule", "update_every"} <= {name for name, _ in documented}
    for name, first_line in documented:
        assert first_line in text, f"the help does not describe {name}"
