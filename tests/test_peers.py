"""The program that compares libraries: its loops and checks, with those parts that need no other library."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import mse_loss

from sparse_lightning import Cubic

FOLDER = Path(__file__).parent.parent / "benchmarks"
sys.path[:0] = [str(FOLDER / "peers"), str(FOLDER)]

from catalog import MODULES  # noqa: E402
from mask_loop import MaskLoop  # noqa: E402
from ours import Ours, OursMagnitude  # noqa: E402
from page import Table  # noqa: E402
from peer import Peer  # noqa: E402
from plan import Plan  # noqa: E402
from stack import Stack, check  # noqa: E402
from torch_ao import TorchAO  # noqa: E402


@pytest.mark.parametrize("steps", [40, 200, 2000])
def test_all_libraries_follow_the_ramp_of_the_default_schedule(steps):
    plan, default = Plan("4×4", 0.9, steps), Cubic(0.9).resolve(steps)
    targets = {step: target for step in range(steps) if (target := plan.target(step)) is not None}
    assert 20 <= len(targets) <= 35
    assert targets == {step: default(step) for step in targets}
    assert list(targets.values())[-1] == pytest.approx(0.9)


def trained(kind: type[Peer], pattern: str, sparsity: float) -> tuple[Peer, torch.nn.Module]:
    stack = Stack(kind, 3 * 64 * 64, 3, Plan(pattern, sparsity, 30), batch=8)
    for _ in range(30):
        stack.step()
    return stack.peer, stack.peer.finish()


@pytest.mark.filterwarnings("ignore:.* prunes much at each")
@pytest.mark.parametrize("pattern", Peer.patterns)
def test_what_each_library_leaves_is_counted(pattern):
    sparsity = 0.5 if pattern in ("2:4", "units") else 0.75
    for kind in (Ours, OursMagnitude, MaskLoop, TorchAO):
        if kind.can(pattern):
            peer, model = trained(kind, pattern, sparsity)
            assert check(peer, model) == pytest.approx(sparsity, abs=0.02), kind.name
            assert type(model).__name__ == "Layers"
            assert not any("parametrizations" in name for name in model.state_dict())


def test_a_model_that_is_not_sparse_is_not_reported():
    peer, model = trained(Peer, "4×4", 0.75)
    with pytest.raises(AssertionError, match=r"dense: the sparsity is 0\.0000 instead of 0\.7500"):
        check(peer, model)


def test_the_mask_loop_by_hand_agrees_with_torch_ao():
    found = [trained(kind, "4×4", 0.75)[1] for kind in (MaskLoop, TorchAO)]
    x = torch.randn(4, 64)
    with torch.no_grad():
        assert float(mse_loss(found[0](x), found[1](x))) < 1e-3


def test_every_library_has_a_module_of_its_own():
    assert all((FOLDER / "peers" / f"{module}.py").is_file() for module in MODULES)


def test_a_table_is_markdown():
    assert Table("t", ["a", "b"], [["1", "2"]]).markdown() == "### t\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n"
