"""A wheel, built from the repository and installed into a fresh environment, works in an empty folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ("sparse_lightning", "hydra_plugins", "conf", "recipes", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder, copy = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("source")
    for name in SOURCE:
        path = ROOT / name
        shutil.copytree(path, copy / name, symlinks=True) if path.is_dir() else shutil.copy(path, copy / name)
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(copy)], check=True, timeout=300)
    return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_has_every_yaml_and_the_plugin(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for file in (ROOT / "conf").rglob("*.yaml"):
        assert f"sparse_lightning/conf/{file.relative_to(ROOT / 'conf')}" in names
    for file in (ROOT / "recipes").glob("*.yaml"):
        assert f"sparse_lightning/conf/recipe/{file.name}" in names
        assert f"sparse_lightning/recipes/{file.name}" in names
    assert "hydra_plugins/sparse_lightning_groups/groups.py" in names


@pytest.mark.slow
def test_the_wheel_runs_in_an_empty_folder(wheel, tmp_path):
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=120)
    [packages] = environment.glob("lib/python*/site-packages")
    # What the package needs comes from here, but not the package itself: only the wheel has that.
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", str(packages), str(wheel)],
        check=True,
        timeout=120,
    )
    needed = Path(pytest.__file__).parent.parent
    (packages / "needed.pth").write_text(f"{needed}\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    overrides = ["recipe=digits_rigl", "trainer.max_epochs=1", "compare_dense=false"]
    program = ["-c", "import sparse_lightning.cli as c; print(c.__file__); c.main()"]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    ran = subprocess.run(
        [environment / "bin" / "python", *program, *overrides],
        cwd=empty, capture_output=True, text=True, timeout=300, check=False, env=env,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert str(packages) in ran.stdout, "the package was not taken from the wheel"
    [folder] = empty.glob("outputs/digits_rigl/*")
    assert {"config.yaml", "table.txt", "masks.safetensors"} <= set(os.listdir(folder))
