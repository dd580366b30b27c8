"""Tools to prove Triton kernels without a GPU: in Triton's interpreter, and compiled ahead of time.

`TRITON_INTERPRET` is read when a kernel is defined, so the two need separate processes: `run_cases` runs files of
ordinary pytest tests in one. Inside of it, kernels are called through the host code that users reach:

- with `interpreted=True`, tensors on the CPU run through the interpreter, in place;
- without, `compiled_for(arch)` catches every launch, compiles it for that GPU with exactly the specialisation that
  Triton infers from the arguments (alignment of pointers, divisibility by 16, ones), and launches nothing. What was
  compiled answers `wide_loads`, `wide_stores` and `spills`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ARCHITECTURES = (80, 90, 100)

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: pip install triton"
)


def run_cases(*files: str, interpreted: bool, exhaustive: bool = False) -> None:
    """Run files of tests in a process of their own, and fail with its output where one fails.

    Args:
        *files: files beside this one, whose names do not start with `test_`: they are collected only when named.
        interpreted: define the kernels for Triton's interpreter.
        exhaustive: run the cases that take long instead.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_INTERPRET", "PYTEST_"))}
    environment |= {"TRITON_INTERPRET": "1"} if interpreted else {}
    command = [sys.executable, "-m", "pytest", *(str(HERE / file) for file in files), "-q", "-x", "-rA"]
    command += ["-p", "no:cacheprovider", *(["-m", "exhaustive"] if exhaustive else [])]
    done = subprocess.run(command, cwd=HERE.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(files)} failed:\n{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    for file in files:  # where nothing was selected, nothing would be proven
        assert re.search(rf"^PASSED .*\b{re.escape(file)}::", done.stdout, re.M), f"{file} ran no test:\n{done.stdout}"


def is_interpreted() -> bool:
    """Whether this process defines kernels for the interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def case_device() -> str:
    """Where the cases of this process run: on the CPU in the interpreter, else on the GPU."""
    return "cpu" if is_interpreted() else "cuda"


@contextmanager
def compiled_for(arch: int, **options) -> Iterator[list]:
    """Compile, in place of launching, all kernels that are called inside; gives the list they are appended to.

    Args:
        arch: the compute capability without its point: 80, 90, 100.
        options: what else Triton's compiler is told, `maxnreg=32` for one.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    compiled: list = []
    launch, active = JITFunction.run, driver._active

    def compile_only(self, *args, grid, warmup, **kwargs):
        # A kernel compiled for another architecture in this process must not be found again.
        self.device_caches.clear()
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs, **options)
        compiled.append(kernel)
        return kernel

    driver.set_active(_NoDevice(GPUTarget("cuda", arch, 32)))
    JITFunction.run = compile_only
    try:
        yield compiled
    finally:
        JITFunction.run = launch
        driver._active = active


class _NoDevice:
    """What Triton asks of a driver before it launches, answered for a GPU that is not there."""

    def __init__(self, target):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def wide_loads(kernel) -> int:
    """How many 128-bit loads from global memory the PTX of a compiled kernel has."""
    return _wide("ld", kernel)


def wide_stores(kernel) -> int:
    """How many 128-bit stores to global memory the PTX of a compiled kernel has."""
    return _wide("st", kernel)


def loads(kernel) -> int:
    """How many loads from global memory of any width the PTX of a compiled kernel has."""
    return len(re.findall(r"\bld\.global\b", kernel.asm["ptx"]))


def _wide(kind: str, kernel) -> int:
    return len(re.findall(rf"\b{kind}\.global[.\w:]*\.(?:v4\.[bfsu]32|v2\.[bfsu]64)\b", kernel.asm["ptx"]))


def spills(kernel) -> int:
    """How many accesses to local memory the binary of a compiled kernel has: what did not fit into registers.

    They are counted, and not the bytes of the stack frame: LLVM may leave a frame behind that nothing uses. A kernel
    without a frame has none, and need not be disassembled, which takes long.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        [stack] = re.findall(r"\bREG:\d+ STACK:(\d+)\b", _dump(file.name, "--dump-resource-usage"))
        if stack == "0":
            return 0
        code = _dump(file.name, "--dump-sass")
    assert "EXIT" in code, f"no instructions in the binary of {kernel.metadata.name}:\n{code}"
    return len(re.findall(r"\b(?:LDL|STL)\b", code))


def _dump(file: str, kind: str) -> str:
    from triton import knobs

    command = [knobs.nvidia.cuobjdump.path, kind, file]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
