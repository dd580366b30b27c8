"""Scores and masks of a few parameters, to be computed on this machine and on one without Triton and a compiler.

Run as a program it hides both, and saves the results to the file that it is given.
"""

from __future__ import annotations

import importlib.abc
import os
import sys

import pytest
import torch
from poison import poison_memory


class HideTriton(importlib.abc.MetaPathFinder):
    """Importing Triton fails as where it is not installed."""

    def find_spec(self, fullname, path=None, target=None):
        """Refuse Triton and all its parts."""
        if fullname.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def results():
    """Every criterion's scores, masked and scaled weights, and an N:M selection: tensors by name."""
    from flow_cases import SHIPPED, in_turn, scores_by

    from sparse_lightning.kernels.nm_select import nm_select

    made = {}
    for kind, criterion in SHIPPED.items():
        torch.manual_seed(0)
        made |= {f"{kind} of {name}": grid for name, grid in scores_by(None, criterion, in_turn()).items()}
    for name, scope in in_turn(1).items():
        for block in scope.blocks():
            block.apply_mask(torch.rand(block.grid_shape) < 0.5)
            block.apply_multiplier(torch.rand(block.grid_shape))
            made |= {f"{name} {i}": p.detach() for i, p in enumerate(block.unique_params())}
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(63, 500).to(dtype)
        made |= {f"selection of {dtype}": nm_select(weight, 2, 4), f"selected of {dtype}": weight}
    return made


if __name__ == "__main__":
    sys.meta_path.insert(0, HideTriton())
    os.environ["PATH"] = ""
    os.environ.pop("CXX", None)
    from sparse_lightning.kernels import block_score
    from sparse_lightning.kernels.availability import has_triton

    assert not has_triton()
    assert not block_score.compiled.has_compiler()
    block_score.PAYS = block_score.PAYS_ONCE = 1  # a compiler would be used now
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        poison_memory(patch)
        made = results()
    torch.save(made, sys.argv[1])
    assert not any(name.partition(".")[0] == "triton" for name in sys.modules)
