"""Whole flows in Triton against plain torch: in the interpreter, or on a GPU. See `triton_harness`.

Not collected by itself: `test_triton_kernels.py` runs it in processes of its own.
"""

from __future__ import annotations

from itertools import count

import pytest
from flow_cases import SHIPPED, check_agreement, criterion_of, flows, in_turn
from hypothesis import HealthCheck, Phase, given, settings
from law_examples import examples
from poison import poison  # noqa: F401
from triton_harness import case_device, is_interpreted

from sparse_lightning.flow import State

pytestmark = pytest.mark.usefixtures("poison")

LONG = 21 if is_interpreted() else 500
"""The interpreter takes the elements of a maximum one by one: the large matrices are not needed for its proof."""


PARTS = 3
"""Each criterion meets the layouts in as many parts, of which `make test` runs one."""


@pytest.mark.parametrize(
    ("first", "name", "part"),
    [
        pytest.param(first, name, part, marks=() if part == first % PARTS else pytest.mark.exhaustive)
        for first, name in enumerate(SHIPPED)
        for part in range(PARTS)
    ],
)
def test_every_criterion(first, name, part):
    """Each on every layout; the dtypes take turns, so that every layout meets all of them."""
    scopes = in_turn(first, LONG, case_device())
    mine = dict(list(scopes.items())[part::PARTS])
    check_agreement("triton", SHIPPED[name], mine)


def test_random_flows():
    turns = count()

    @settings(
        max_examples=examples(3), phases=[Phase.generate], suppress_health_check=list(HealthCheck), derandomize=True
    )
    @given(flows())
    def law(flow):
        check_agreement("triton", criterion_of(flow, kept=State()), in_turn(next(turns), LONG, case_device()))

    law()
