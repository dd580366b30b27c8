"""Memory: block operations on a 256 MB parameter allocate a small fraction of it."""

from __future__ import annotations

import ctypes
import resource

import pytest
import torch
from forked import printed_by

from sparse_lightning import BlockSpec

M_MMAP_THRESHOLD = -3
ACTIONS = ["apply_mask", "apply_multiplier", "norms", "max", "nnz", "reduce_chunks"]


def actions_of(spec, mask):
    """Return the operations on the blocks of a parameter, by name."""
    return {
        "apply_mask": lambda: spec.apply_mask(mask),
        "apply_multiplier": lambda: spec.apply_multiplier(mask * 1.0),
        "norms": spec.norms,
        "max": spec.max,
        "nnz": lambda: torch.tensor(spec.nnz()),
        "reduce_chunks": lambda: spec.reduce_chunks(None, lambda b: b.mean(-1)),
    }


def peak():
    """Return the peak memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def print_allocations(block, is_transposed, actions):
    """Print what each operation allocates beyond its result, as a fraction of the parameter."""
    # Freed memory is returned to the system at once, so that the peak counts what was in use and not what malloc kept.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
    small = BlockSpec(torch.nn.Parameter(torch.ones(256, 256)), block)
    for act in actions_of(small, torch.ones(small.grid_shape, dtype=torch.bool)).values():
        act()
    values = torch.ones(8192, 8192)
    weight = torch.nn.Parameter(values.t() if is_transposed else values)
    spec = BlockSpec(weight, block)
    mask = torch.rand(spec.grid_shape) < 0.75
    before, results = peak(), 0
    for name in actions:
        result = actions_of(spec, mask)[name]()
        results += result.nbytes if result is not None else 0
        print(name, (peak() - before - results) / weight.nbytes)


@pytest.mark.parametrize(
    ("block", "is_transposed", "actions"),
    [
        ((32, 32), False, ACTIONS),
        ((32, 32), True, ACTIONS),
        ((1, -1), False, ACTIONS),
        ((-1, -1), False, ACTIONS[:-1]),  # what the user's function does with one block is its own
    ],
    ids=["tiles", "tiles of a transposed weight", "rows", "one block"],
)
def test_beyond_its_result_an_operation_allocates_less_than_a_twentieth(block, is_transposed, actions, tmp_path):
    printed = printed_by(print_allocations, block, is_transposed, actions, file=tmp_path / "printed")
    fractions = dict(line.split() for line in printed.splitlines())
    assert list(fractions) == actions
    for action, fraction in fractions.items():
        assert float(fraction) < 0.05, f"{action} with blocks of {block} allocated {float(fraction):.1%} of the weights"
