"""Kernels in C++: built once per machine by the compiler that `torch.compile` uses, and kept on disk.

A library is named after everything that its machine code depends on: the source, the compiler and its version, the
options and the CPU. Processes that start together build it once: the first locks the folder, the others wait for it.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch

from sparse_lightning.kernels.availability import cpp_compiler

OPTIONS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")

FOLDER = "SPARSE_LIGHTNING_CACHE"
"""The environment variable that names the folder of built libraries."""

_log = logging.getLogger(__name__)


def torch_options() -> tuple[str, ...]:
    """Return the options for a source that includes headers of torch; its version is one of them, for the name."""
    root = Path(torch.__file__).parent
    version = f'-DTORCH_VERSION="{torch.__version__}"'
    return f"-I{root / 'include'}", f"-L{root / 'lib'}", "-lc10", "-std=c++20", version


@lru_cache(maxsize=8)
def library(source: Path, options: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """Return the library built from a C++ file; None without a compiler or not on x86 Linux.

    Args:
        source: the file.
        options: of the compiler, besides those of all kernels.
    """
    return library_of(source.parent.name, source.read_text("utf-8"), options)


def is_supported() -> bool:
    """Whether there is a compiler, on x86 Linux."""
    return cpp_compiler() is not None and sys.platform == "linux" and platform.machine() == "x86_64"


def library_of(name: str, source: str, options: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """Return the library built from C++ source; None without a compiler or not on x86 Linux.

    Args:
        name: of the kernel, for messages and file names.
        source: the text.
        options: of the compiler, besides those of all kernels.
    """
    compiler = cpp_compiler()
    if compiler is None or not is_supported():
        return None
    try:
        return _load_or_build(compiler, name, source, options)
    except (subprocess.CalledProcessError, OSError) as error:
        output = (getattr(error, "stderr", None) or str(error)).strip()[:500]
        warnings.warn(
            f"{compiler} could not build the kernel {name}: torch operations are used instead, and are slower. Output "
            f"of the compiler: {output}",
            stacklevel=2,
        )
        return None


def cache_folder() -> Path:
    """Return the folder of built libraries: `$SPARSE_LIGHTNING_CACHE`, or `sparse_lightning` in the user's cache."""
    chosen = os.environ.get(FOLDER)
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparse_lightning"


def _load_or_build(compiler: str, kernel: str, source: str, options: tuple[str, ...]) -> ctypes.CDLL:
    """Load the library from the cache, or build it there; in a temporary folder where the cache can't be written."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{kernel}-{_key(compiler, source, options)}"
        with _locked(folder / "lock"):
            built = _whole_file(folder, name) or _build(compiler, source, options, folder, name)
        return ctypes.CDLL(str(built))
    except (OSError, RuntimeError) as error:  # a read-only home, a full disk, no home at all
        _log.info("the folder of built kernels can't be used (%s): the kernel is built for this process only", error)
    with tempfile.TemporaryDirectory() as own:
        built = _build(compiler, source, options, Path(own), f"{kernel}-kernel")
        return ctypes.CDLL(str(built))  # it stays loaded when the file is deleted


def _build(compiler: str, source: str, options: tuple[str, ...], folder: Path, name: str) -> Path:
    """Compile beside the final place, then move; the name ends in a digest of the file."""
    _log.warning("building the CPU kernel %s, once on this machine: up to ten seconds", name.partition("-")[0])
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as file:
        fresh = Path(file.name)
    try:
        command = [compiler, *OPTIONS, "-x", "c++", "-", *options, "-o", str(fresh)]
        subprocess.run(command, input=source, capture_output=True, text=True, check=True)
        return fresh.replace(folder / f"{name}-{_digest(fresh)}.so")
    finally:
        fresh.unlink(missing_ok=True)


def _whole_file(folder: Path, name: str) -> Path | None:
    """Return the library of this name, None if there is none; one that was cut short is deleted: it can't be loaded."""
    for file in folder.glob(f"{name}-*.so"):
        if file.stem == f"{name}-{_digest(file)}":
            return file
        file.unlink()
    return None


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold the lock of the folder; the system releases it when a process dies."""
    import fcntl  # here, because Windows does not have it

    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _key(compiler: str, source: str, options: tuple[str, ...]) -> str:
    """Return a digest of what the machine code depends on."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    parts = [source, compiler, version, " ".join([*OPTIONS, *options]), _cpu()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _cpu() -> str:
    """Return the model and the features of the CPU: code for one may not run on another that shares the folder."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    wanted = ("vendor_id", "cpu family", "model\t", "model name", "stepping", "flags")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))
