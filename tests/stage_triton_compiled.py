"""Stages compiled ahead of time: vectors in the PTX, nothing spilled in the binary. See `triton_harness`.

Not collected by itself: `test_triton_kernels.py` runs it in a process of its own.
"""

from __future__ import annotations

import pytest
import torch
from pairwise import in_turn
from stage_triton_cases import STAGES
from triton_harness import ARCHITECTURES, compiled_for, loads, spills, wide_loads

from sparse_lightning.kernels.block_score import triton


def some_of(values, name):
    """Parametrize a test by values, of which `make test` takes every second."""
    cases = [pytest.param(v, marks=() if i % 2 == 0 else pytest.mark.exhaustive) for i, v in enumerate(values)]
    return pytest.mark.parametrize(name, cases, ids=str)


def compile_on(stage, arch, block, dtype, size=768):
    """The one kernel that a stage launches on contiguous matrices in blocks."""
    shape = (size // block[0], block[0], size // block[1], block[1])
    windows = [torch.zeros(shape, dtype=dtype) for _ in range(stage.inputs)]
    windows = [w.as_strided(shape, (block[0] * size, size, block[1], 1)) for w in windows]
    with compiled_for(arch) as compiled:
        triton.fold(stage, windows)
    (kernel,) = compiled
    return kernel


@in_turn(arch=ARCHITECTURES, name=["taylor", "magnitude"], dtype=[torch.float32, torch.bfloat16])
def test_square_blocks(arch, name, dtype):
    kernel = compile_on(STAGES[name], arch, (32, 32), dtype)
    assert wide_loads(kernel) == loads(kernel) > 0, "all loads are 128 bits wide"
    assert spills(kernel) == 0


@some_of([(1, 1), (16, 1), (1, 4), (8, 8), (4, 24), (64, 256)], "block")
def test_other_blocks(block):
    kernel = compile_on(STAGES["taylor"], 80, block, torch.float32)
    assert wide_loads(kernel) == loads(kernel) > 0, "all loads are 128 bits wide"
    assert spills(kernel) == 0


@some_of(list(STAGES), "name")
def test_every_stage_compiles(name):
    """The interpreter takes what the compiler would refuse; and many folds must not spill either."""
    assert spills(compile_on(STAGES[name], 90, (4, 32), torch.float32)) == 0
