"""Memory: block operations on a 256 MB parameter allocate a small part of it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
import resource, torch
from sparse_lightning import BlockSpec, ScopeSpec
torch.set_num_threads(1)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

weight = torch.nn.Parameter(torch.ones(8192, 8192{layout}))
spec = BlockSpec(weight, {block})
mask = torch.rand(spec.grid_shape) < 0.75
small = BlockSpec(torch.nn.Parameter(torch.ones(256, 256)), {block})
warm = torch.ones(small.grid_shape, dtype=torch.bool)
for act in (small.norms, small.max, lambda: small.apply_mask(warm), lambda: small.apply_multiplier(warm * 1.0)):
    act()
actions = {{
    "apply_mask": lambda: spec.apply_mask(mask),
    "apply_multiplier": lambda: spec.apply_multiplier(mask * 1.0),
    "norms": spec.norms,
    "max": spec.max,
    "reduce": lambda: spec.reduce(None, torch.mean),
}}
if {block} == (-1, -1):
    del actions["reduce"]  # what the user's function does with one block is its own
before, results = peak(), 0
for name, act in actions.items():
    result = act()
    results += result.nbytes if result is not None else 0
    print(name, (peak() - before - results) / weight.nbytes)
"""


@pytest.mark.parametrize(("block", "layout"), [((32, 32), ""), ((32, 32), ").t("), ((1, -1), ""), ((-1, -1), "")])
def test_beyond_its_result_an_operation_allocates_less_than_a_twentieth(block, layout):
    program = textwrap.dedent(PROGRAM).format(block=block, layout=layout)
    # Memory that is freed goes back at once, so that the peak counts what was in use and not what malloc kept.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert ran.returncode == 0, ran.stderr
    shares = dict(line.split() for line in ran.stdout.splitlines())
    assert len(shares) >= 4
    for action, share in shares.items():
        assert float(share) < 0.05, f"{action} with blocks of {block} allocated {float(share):.1%} of the parameter"
