"""Settings and tools that hold for every test."""

from __future__ import annotations

import os
from contextlib import contextmanager

import hypothesis
import pytest
import torch
from installed import build_wheel, install
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

hypothesis.settings.register_profile("laws", deadline=None, max_examples=int(os.environ.get("EXAMPLES", "150")))
hypothesis.settings.load_profile("laws")

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    """Every test draws the same weights whenever it runs."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """A wheel of the package."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def console_script(wheel, tmp_path_factory):
    """`sparse-lightning`, installed from the wheel into a fresh environment."""
    return install(wheel, tmp_path_factory.mktemp("environment"))


@pytest.fixture(scope="session")
def python(console_script):
    """The Python of that environment."""
    return console_script.with_name("python")


class NewTensors(TorchDispatchMode):
    """Notes the size of every tensor that an operation makes: results that share no storage with an argument."""

    def __init__(self):
        super().__init__()
        self.largest = 0
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        for made in _tensors(result):
            if made.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, made.numel())
                self.bytes = max(self.bytes, made.untyped_storage().nbytes())
        return result


def _tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


@pytest.fixture
def copies():
    """A context that counts the new tensors made inside of it."""

    @contextmanager
    def counting():
        with NewTensors() as mode:
            yield mode

    return counting
