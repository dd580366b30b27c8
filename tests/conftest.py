"""Settings and fixtures of all tests."""

from __future__ import annotations

import os
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import hypothesis
import pytest
import torch
from filelock import FileLock
from installed import build_wheel, install
from law_examples import EXAMPLES
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

hypothesis.settings.register_profile("laws", deadline=None, max_examples=EXAMPLES)
hypothesis.settings.load_profile("laws")

# One thread, here and in the processes that tests start: where all cores are in use, threads of OpenMP mostly wait for
# one another, and burn the time of other workers.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(config, items):
    """Let each worker of pytest-xdist begin with slow tests, so that only quick ones are left when others finish.

    With `--dist worksteal` a worker starts with a contiguous part of the tests, all of the same size.
    """
    workers = getattr(config, "workerinput", {"workercount": 1})["workercount"]
    slow = [item for item in items if item.get_closest_marker("slow")]
    quick = iter([item for item in items if not item.get_closest_marker("slow")])
    ordered = []
    for worker in range(workers):
        size = (len(items) - len(ordered)) // (workers - worker)
        mine = slow[worker::workers]
        ordered += [*mine, *islice(quick, max(0, size - len(mine)))]
    items[:] = ordered


@pytest.fixture(autouse=True)
def seeded():
    """Every test draws the same weights whenever it runs."""
    torch.manual_seed(0)


@pytest.fixture
def own_precision():
    """Accelerate keeps the first precision that is chosen in a process: let a test choose another, and leave none."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.fixture(scope="session")
def installed_once(tmp_path_factory, worker_id):
    """The wheel and the console script of a fresh environment, shared by all workers of pytest-xdist."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder if worker_id == "master" else folder.parent
    wheels, environment, done = folder / "wheels", folder / "environment", folder / "installed"
    with FileLock(folder / "installed.lock"):
        if not done.exists():
            wheels.mkdir()
            wheel = build_wheel(wheels)
            done.write_text(f"{wheel}\n{install(wheel, environment)}")
    return tuple(map(Path, done.read_text().splitlines()))


@pytest.fixture(scope="session")
def wheel(installed_once):
    """A wheel of the package."""
    return installed_once[0]


@pytest.fixture(scope="session")
def console_script(installed_once):
    """`sparse-lightning`, installed from the wheel into a fresh environment."""
    return installed_once[1]


@pytest.fixture(scope="session")
def python(console_script):
    """The Python of that environment."""
    return console_script.with_name("python")


class NewTensors(TorchDispatchMode):
    """Records the sizes of all tensors that operations make: results that share no storage with an argument."""

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
    """Return a context manager that records the sizes of new tensors."""

    @contextmanager
    def counting():
        with NewTensors() as mode:
            yield mode

    return counting
