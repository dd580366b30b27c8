"""A wheel, built from the repository and installed into a fresh environment, works in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import zipfile

import pytest
from installed import ROOT

pytestmark = pytest.mark.slow

SHORT = ["trainer.max_epochs=2", "trainer.limit_train_batches=4"]


def call(program, folder, *arguments):
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "HYDRA_FULL_ERROR")}
    return subprocess.run(
        [program, *arguments], cwd=folder, capture_output=True, text=True, timeout=300, check=False, env=env
    )


def test_the_wheel_has_all_that_is_not_python(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    conf, recipes = sorted((ROOT / "conf").rglob("*.yaml")), sorted((ROOT / "recipes").glob("*.yaml"))
    kernels = sorted((ROOT / "sparse_lightning").rglob("*.cpp"))
    assert min(map(len, (conf, recipes, kernels))) > 0, "the repository has other folders"
    for file in conf:
        assert f"sparse_lightning/conf/{file.relative_to(ROOT / 'conf')}" in names
    for file in recipes:
        assert f"sparse_lightning/conf/recipe/{file.name}" in names
        assert f"sparse_lightning/recipes/{file.name}" in names
    for file in kernels:
        assert str(file.relative_to(ROOT)) in names
    assert "hydra_plugins/sparse_lightning_groups/groups.py" in names


def test_the_package_comes_from_the_wheel(python, tmp_path):
    ran = call(python, tmp_path, "-c", "import sparse_lightning; print(sparse_lightning.__file__)")
    assert str(python.parent.parent) in ran.stdout, ran.stderr


def test_the_default_recipe_ends_with_its_table_and_files(console_script, tmp_path):
    ran = call(console_script, tmp_path, *SHORT)
    assert ran.returncode == 0, ran.stderr
    [folder] = tmp_path.glob("outputs/digits_blocks/*")
    check_files(folder, ran.stdout)


@pytest.mark.exhaustive
def test_other_recipes_do_so_too_in_one_sweep(console_script, tmp_path):
    ran = call(console_script, tmp_path, "-m", "recipe=digits_rigl,digits_filters", "schedule.final=0.8", *SHORT)
    assert ran.returncode == 0, ran.stderr
    folders = sorted(tmp_path.glob("multirun/*/*/[01]"))
    assert [folder.name for folder in folders] == ["0", "1"]
    for folder in folders:
        check_files(folder, ran.stdout)


def check_files(folder, printed):
    assert {"config.yaml", "checkpoints", "metrics.csv", "masks.safetensors", "table.txt"} <= set(os.listdir(folder))
    table = (folder / "table.txt").read_text()
    assert re.search(r"after \d+ steps +dense +sparse", table)
    assert table in printed
