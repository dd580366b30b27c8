"""Stages in Triton: in the interpreter against the plain fold, compiled for GPUs, and on one where there is one."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from textwrap import dedent

import pytest
import torch
from devices import needs_gpu
from triton_harness import needs_triton, run_cases

from sparse_lightning.errors import FlowError
from sparse_lightning.kernels import block_score


@needs_triton
@pytest.mark.slow
def test_in_the_interpreter():
    run_cases("stage_triton_cases.py", interpreted=True)


@needs_triton
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("cases", "interpreted"),
    [("stage_triton_cases.py", True), ("stage_triton_compiled.py", False), ("lowering_triton_cases.py", True)],
)
def test_all_cases(cases, interpreted):
    run_cases(cases, interpreted=interpreted, exhaustive=True)


@needs_triton
@pytest.mark.slow
def test_flows_in_the_interpreter():
    run_cases("lowering_triton_cases.py", interpreted=True)


@needs_triton
@pytest.mark.slow
def test_compiled_ahead_of_time():
    run_cases("stage_triton_compiled.py", interpreted=False)


@needs_triton
@needs_gpu
@pytest.mark.parametrize(
    ("cases", "exhaustive"),
    list(product(["stage_triton_cases.py", "lowering_triton_cases.py"], [False, True])),
)
def test_on_the_gpu(cases, exhaustive):
    run_cases(cases, interpreted=False, exhaustive=exhaustive)


def test_a_gpu_takes_triton_where_it_is_installed(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(block_score, "has_triton", lambda: True)
    assert block_score.choose(gpu, 1) is block_score.LOWERINGS["triton"]
    monkeypatch.setattr(block_score, "has_triton", lambda: False)
    assert block_score.choose(gpu, 1) is block_score.LOWERINGS["reference"]
    with pytest.raises(FlowError, match="'triton' needs Triton, which is not installed"):
        block_score.check_lowering("triton")


def test_stages_run_without_triton():
    code = """
        import sys
        sys.modules["triton"] = None  # importing it raises ImportError
        import torch
        from sparse_lightning.kernels import block_score
        from sparse_lightning.kernels.stage import Ref, Stage
        run = block_score.choose(torch.device("cpu"), 6)
        [grid] = run(Stage(1, (), ((Ref(0), "sum"),)), [torch.ones(2, 3)])
        assert grid.tolist() == [3, 3]
        assert block_score.choose(torch.device("cuda"), 6) is block_score.LOWERINGS["reference"]
    """
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
