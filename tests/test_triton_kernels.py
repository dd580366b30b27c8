"""The Triton kernels and stages: in the interpreter against references, compiled, and on a GPU if there is one."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent

import pytest
import torch
from devices import needs_gpu
from triton_harness import needs_triton, run_cases

from sparse_lightning.errors import FlowError
from sparse_lightning.kernels import block_score

INTERPRETED = ["triton_cases.py", "stage_triton_cases.py", "lowering_triton_cases.py"]
"""Files of cases that run in the interpreter or on a GPU: kernels, stages, whole flows."""

COMPILED = ["triton_compiled.py", "stage_triton_compiled.py"]
"""Files of cases that are compiled and not run."""


@needs_triton
@pytest.mark.slow
def test_in_the_interpreter():
    run_cases(*INTERPRETED, interpreted=True)


@needs_triton
@pytest.mark.slow
def test_compiled_ahead_of_time():
    run_cases(*COMPILED, interpreted=False)


@needs_triton
@pytest.mark.exhaustive
@pytest.mark.parametrize("file", INTERPRETED + COMPILED)
def test_all_cases(file):
    run_cases(file, interpreted=file in INTERPRETED, exhaustive=True)


@needs_triton
@needs_gpu
@pytest.mark.parametrize("exhaustive", [False, True])
def test_on_the_gpu(exhaustive):
    run_cases(*INTERPRETED, interpreted=False, exhaustive=exhaustive)


def test_a_gpu_takes_triton_where_it_is_installed(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(block_score, "has_triton", lambda: True)
    assert block_score.choose(gpu, 1) is block_score.LOWERINGS["triton"]
    monkeypatch.setattr(block_score, "has_triton", lambda: False)
    assert block_score.choose(gpu, 1) is block_score.LOWERINGS["reference"]
    with pytest.raises(FlowError, match="'triton' needs Triton, which is not installed"):
        block_score.check_lowering("triton")


def test_nothing_on_a_cpu_imports_triton():
    """With Triton hidden behind an error, the package imports and its kernels and stages run."""
    code = """
        import sys
        sys.modules["triton"] = None  # importing it raises ImportError
        import torch
        import sparse_lightning
        from sparse_lightning.kernels import block_apply, block_score
        from sparse_lightning.kernels.availability import has_triton
        from sparse_lightning.kernels.nm_select import nm_select
        from sparse_lightning.kernels.stage import Ref, Stage
        weight = torch.randn(8, 16)
        assert nm_select(weight, 2, 4).sum() == 64
        block_apply.fill_(weight.view(4, 2, 4, 4), torch.ones(4, 4, dtype=torch.bool))
        block_apply.scale_(weight.view(4, 2, 4, 4), torch.ones(4, 4))
        assert not weight.any() and not has_triton()
        run = block_score.choose(torch.device("cpu"), 6)
        [grid] = run(Stage(1, (), ((Ref(0), "sum"),)), [torch.ones(2, 3)])
        assert grid.tolist() == [3, 3]
        assert block_score.choose(torch.device("cuda"), 6) is block_score.LOWERINGS["reference"]
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
