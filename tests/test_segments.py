"""Segments: sums, maxima and ranks over groups, against a plain loop, by operations whose results never vary."""

from __future__ import annotations

import pytest
import torch
from devices import each_device
from flow_cases import criterion_of
from hypothesis import given
from hypothesis import strategies as st
from poison import poison  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_lightning import BlockSpec, ScopeCoupling, ScopeSpec
from sparse_lightning.flow import Normalize, Scorer, Softmax, Sum
from sparse_lightning.flow.segments import Segments

pytestmark = pytest.mark.usefixtures("poison")

VARYING = {"index_add", "scatter_add", "scatter_reduce", "put", "cumsum", "histc", "segment_reduce", "logcumsumexp"}
"""Operations that add in an order that differs from run to run on a GPU, or have no deterministic form there."""


@st.composite
def groups(draw):
    """Groups of any sizes, empty ones included, in any order of entries."""
    sizes = draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 3, 8, 100]), min_size=1, max_size=8))
    index = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 32)))
    if draw(st.booleans()):
        index = index[torch.randperm(len(index), generator=generator)]
    inner = draw(st.sampled_from([(1, 1), (2, 1), (3, 2)]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    return Segments(index, len(sizes)), torch.randn(len(index), *inner, generator=generator, dtype=dtype)


@given(groups())
def test_sums_and_maxima_are_those_of_a_plain_loop(case):
    segments, x = case
    parts = [x[segments.index == i] for i in range(segments.count)]
    sums = torch.stack([part.double().sum(0) for part in parts]).to(x.dtype)
    torch.testing.assert_close(segments.sum(x), sums)
    start = x.new_full((1, *x.shape[1:]), -torch.inf)
    assert torch.equal(segments.max(x), torch.stack([torch.cat([start, part]).amax(0) for part in parts]))


@given(groups())
def test_a_group_is_summed_alike_wherever_it_stands(case):
    """A sum does not depend on the other groups, on where its entries are, or on what they contain."""
    segments, x = case
    spoiled = x.clone()
    spoiled[segments.index != 0] = torch.nan
    alone = Segments(torch.zeros(int((segments.index == 0).sum()), dtype=torch.int64), 1)
    assert torch.equal(segments.sum(spoiled)[0], alone.sum(x[segments.index == 0])[0])


class Recorded(TorchDispatchMode):
    """Records the names of the operations that run on floats; integers add up to the same in every order."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in args):
            self.names.add(func.overloadpacket.__name__.rstrip("_"))
        # index_put adds only if it is told to accumulate.
        assert "index_put" not in str(func) or args[3:4] != (True,), "index_put accumulates"
        return func(*args, **(kwargs or {}))


def test_no_operation_adds_in_an_order_that_varies():
    index = torch.tensor([0, 1, 0, 2, 1, 0])
    with Recorded() as recorded:
        segments = Segments(index, 4, torch.arange(6))
        segments.spread(segments.sum(torch.randn(6, 1, 1))), segments.max(torch.randn(6, 1, 1))
        segments.rank(torch.randn(6, 1, 1))
    assert {"sum", "amax"} <= recorded.names, recorded.names
    assert not recorded.names & VARYING, recorded.names & VARYING


@each_device
@pytest.mark.parametrize("op", [Normalize, Softmax])
def test_scores_are_the_same_in_every_run(op, device):
    """Torch refuses operations here whose results may differ from run to run."""
    weights = [
        torch.randn(shape, generator=torch.Generator().manual_seed(7)) for shape in ((64, 48), (8, 64), (64, 48))
    ]
    specs = [BlockSpec(weight.to(device), (2, 2)) for weight in weights]
    scorer = Scorer(criterion_of(lambda x: op("scope")(op()(Sum()(x.weight)))), device)
    scorer.attach("a", ScopeCoupling([ScopeSpec(specs[0]), ScopeSpec(specs[1])]))
    scorer.attach("b", ScopeSpec(specs[2], (4, 4)))
    torch.use_deterministic_algorithms(True)
    try:
        runs = [scorer.score() for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)
    for spec in specs:
        assert all(torch.equal(run[spec], runs[0][spec]) for run in runs)
