"""Triton and a C++ compiler only make things faster: without them the same scores, masks and weights come out."""

from __future__ import annotations

import subprocess
import sys

import bare_machine
import torch


def test_without_triton_and_a_compiler_everything_is_the_same(tmp_path):
    file = tmp_path / "results"
    ran = subprocess.run([sys.executable, bare_machine.__file__, file], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    there, here = torch.load(file, weights_only=True), bare_machine.results()
    assert set(there) == set(here)
    for name, wanted in here.items():
        assert torch.equal(there[name], wanted), f"{name} is another without Triton and a compiler"
