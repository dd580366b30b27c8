"""The Triton kernels: in the interpreter against their references, compiled for GPUs, and on one where there is one."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent

import pytest
from devices import needs_gpu
from triton_harness import needs_triton, run_cases


@needs_triton
@pytest.mark.slow
def test_in_the_interpreter():
    run_cases("triton_cases.py", interpreted=True)


@needs_triton
@pytest.mark.exhaustive
@pytest.mark.parametrize(("file", "interpreted"), [("triton_cases.py", True), ("triton_compiled.py", False)])
def test_all_cases(file, interpreted):
    run_cases(file, interpreted=interpreted, exhaustive=True)


@needs_triton
@pytest.mark.slow
def test_compiled_ahead_of_time():
    run_cases("triton_compiled.py", interpreted=False)


@needs_triton
@needs_gpu
@pytest.mark.parametrize("exhaustive", [False, True])
def test_on_the_gpu(exhaustive):
    run_cases("triton_cases.py", interpreted=False, exhaustive=exhaustive)


def test_nothing_on_a_cpu_imports_triton():
    """With Triton hidden behind an error, the package imports and its kernels run."""
    code = """
        import sys
        sys.modules["triton"] = None  # importing it raises ImportError
        import torch
        import sparse_lightning
        from sparse_lightning.kernels import block_apply
        from sparse_lightning.kernels.availability import has_triton
        from sparse_lightning.kernels.nm_select import nm_select
        weight = torch.randn(8, 16)
        assert nm_select(weight, 2, 4).sum() == 64
        block_apply.fill_(weight.view(4, 2, 4, 4), torch.ones(4, 4, dtype=torch.bool))
        block_apply.scale_(weight.view(4, 2, 4, 4), torch.ones(4, 4))
        assert not weight.any() and not has_triton()
    """
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_package_does_not_import_triton_by_itself():
    code = """
        import sys
        import torch
        before = "triton" in sys.modules
        import sparse_lightning.kernels.block_apply
        import sparse_lightning.kernels.nm_select
        assert before or "triton" not in sys.modules
    """
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
