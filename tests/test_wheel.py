"""A wheel, built from the repository and installed into a fresh environment, works in an empty folder."""

from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path

import pytest
from installed import ROOT

pytestmark = pytest.mark.slow

SHORT = ["trainer.max_epochs=2", "trainer.limit_train_batches=4"]


def call(script, folder, *overrides):
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "HYDRA_FULL_ERROR")}
    return subprocess.run(
        [script, *overrides], cwd=folder, capture_output=True, text=True, timeout=300, check=False, env=env
    )


def test_the_wheel_has_all_that_is_not_python(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for file in (ROOT / "conf").rglob("*.yaml"):
        assert f"sparse_lightning/conf/{file.relative_to(ROOT / 'conf')}" in names
    for file in (ROOT / "recipes").glob("*.yaml"):
        assert f"sparse_lightning/conf/recipe/{file.name}" in names
        assert f"sparse_lightning/recipes/{file.name}" in names
    for file in (ROOT / "sparse_lightning").rglob("*.cpp"):
        assert str(file.relative_to(ROOT)) in names
    assert "hydra_plugins/sparse_lightning_groups/groups.py" in names


def test_the_package_comes_from_the_wheel(console_script, tmp_path):
    program = "import sparse_lightning; print(sparse_lightning.__file__)"
    python = Path(console_script).with_name("python")
    ran = subprocess.run([python, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert str(Path(console_script).parent.parent) in ran.stdout


@pytest.mark.parametrize(
    "overrides",
    [SHORT, ["recipe=digits_rigl", "schedule.final=0.8", *SHORT], ["recipe=digits_filters", "seed=3", *SHORT]],
    ids=["the default", "digits_rigl", "digits_filters"],
)
def test_recipes_end_with_their_table_and_files(console_script, overrides, tmp_path):
    ran = call(console_script, tmp_path, *overrides)
    assert ran.returncode == 0, ran.stderr
    assert "dense" in ran.stdout
    [folder] = tmp_path.glob("outputs/*/*")
    assert {"config.yaml", "checkpoints", "metrics.csv", "masks.safetensors", "table.txt"} <= set(os.listdir(folder))
    assert (folder / "table.txt").read_text() in ran.stdout
