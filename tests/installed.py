"""The package as users install it: a wheel of the repository, in a fresh environment, with its console script."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

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
    """Install a wheel into a new environment; return its console script.

    Its declared dependencies, and nothing else, are linked there from the environment of the tests.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--quiet"]
    subprocess.run([*pip, wheel], check=True, timeout=120)
    [packages] = folder.glob("lib/python*/site-packages")
    for name in needed("sparse_lightning") - {"sparse_lightning"}:
        link(metadata.distribution(name), packages)
    return folder / "bin" / "sparse-lightning"


def needed(name: str) -> set[str]:
    """Return the names of a distribution and of its dependencies, direct and indirect, without optional ones."""
    found: set[tuple[str, str]] = set()
    waiting = [(name, "")]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) not in found:
            found.add((name, extra))
            lines = [Requirement(line) for line in metadata.requires(name) or []]
            wanted = [line for line in lines if line.marker is None or line.marker.evaluate({"extra": extra})]
            waiting += [(line.name, chosen) for line in wanted for chosen in ("", *line.extras)]
    return {name for name, _ in found}


def link(distribution: metadata.Distribution, packages: Path) -> None:
    """Link a distribution of the environment of the tests into another one."""
    for name in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
        path = packages / name
        if not path.exists():
            path.symlink_to(Path(str(distribution.locate_file(name))).resolve())
