"""The package as a user has it: a wheel built from the repository, in a fresh environment, with its console script."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ("sparse_lightning", "hydra_plugins", "conf", "recipes", "pyproject.toml", "README.md", "LICENSE")


def build_wheel(folder: Path) -> Path:
    """Build a wheel of a copy of the sources, so that nothing is left among them."""
    copy = folder / "source"
    copy.mkdir()
    for name in SOURCE:
        path = ROOT / name
        shutil.copytree(path, copy / name, symlinks=True) if path.is_dir() else shutil.copy(path, copy / name)
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", folder]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, copy], check=True, timeout=300)
    return next(folder.glob("*.whl"))


def install(wheel: Path, folder: Path) -> Path:
    """Install a wheel into a new environment; gives its console script."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--quiet"]
    subprocess.run([*pip, wheel], check=True, timeout=120)
    [packages] = folder.glob("lib/python*/site-packages")
    # What the package needs comes from the environment of the tests, but not the package: only the wheel has that.
    (packages / "needed.pth").write_text(f"{Path(pytest.__file__).parent.parent}\n")
    return folder / "bin" / "sparse-lightning"
