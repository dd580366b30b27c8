"""State(dtype=…): fields in fp32, fp64 and integers, computed, saved and resumed in that dtype."""

from __future__ import annotations

import io

import pytest
import torch
from flow_cases import criterion_of, param, rows, scorer_for
from poison import poison  # noqa: F401

from sparse_lightning import BlockSpec, CheckpointError, FlowError, ScopeSpec
from sparse_lightning.flow import (
    Load,
    Log,
    Maximum,
    Normalize,
    Pick,
    Rank,
    Save,
    Softmax,
    Sqrt,
    Square,
    Stack,
    State,
    Sum,
    Where,
    trace,
)
from sparse_lightning.flow.context import OPERATORS

pytestmark = pytest.mark.usefixtures("poison")

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES = [torch.float32, torch.float64, *INTEGERS]


def counter(dtype, fill=0, step=1):
    def flow(x):
        kept = Load()(x.state["runs"]) + step
        Save()(kept, x.state["runs"])
        return Sum()(x.weight) * 0 + kept

    return criterion_of(flow, runs=State(fill=fill, dtype=dtype))


def kept(scorer, name="runs"):
    state = scorer.state_dict()
    return state["fields"][name]["w"].expand(state["entries"]["w"], -1, -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_field_has_its_dtype_in_the_trace_in_memory_and_in_checkpoints(dtype):
    criterion = counter(dtype, fill=3)
    context = trace(criterion)
    assert context.fields["runs"].dtype == dtype
    assert context.nodes[0].output.dtype == dtype, "what Load returns"
    assert context.nodes[1].output.dtype == dtype, "a number does not change the dtype"
    scorer = scorer_for(criterion, rows([1.0, 2.0]))
    assert kept(scorer).dtype == dtype
    assert scorer.score().popitem()[1].dtype == torch.float32, "scores are fp32"
    assert kept(scorer).flatten().tolist() == [4, 4]
    assert kept(scorer).dtype == dtype


def test_integers_count_where_fp32_stands_still():
    """2²⁴ + 1 is not a number of fp32, and 2⁵³ + 1 not one of fp64."""
    scorers = {d: scorer_for(counter(d, fill=2**53), rows([1.0])) for d in (torch.float64, torch.int64)}
    scorers[torch.float32] = scorer_for(counter(torch.float32, fill=2**24), rows([1.0]))
    for scorer in scorers.values():
        for _ in range(3):
            scorer.score()
    assert kept(scorers[torch.float32]).item() == 2**24
    assert kept(scorers[torch.float64]).item() == 2**53
    assert kept(scorers[torch.int64]).item() == 2**53 + 3


def test_a_sum_in_fp64_keeps_what_fp32_drops():
    def flow(x):
        total = Load()(x.state["total"]) + Sum()(x.weight)
        Save()(total, x.state["total"])
        return total

    totals = {}
    for dtype in (torch.float32, torch.float64):
        scorer = scorer_for(criterion_of(flow, total=State(fill=1.0, dtype=dtype)), rows([1e-9]))
        for _ in range(1000):
            scorer.score()
        totals[dtype] = kept(scorer, "total").item()
    assert totals[torch.float32] == 1.0
    assert totals[torch.float64] == pytest.approx(1 + 1e-6, rel=1e-12)


def movement(dtype):
    def flow(x):
        total = Load()(x.state["total"]) * 0.9 + Sum()(-x.weight * x.grad)
        Save()(total, x.state["total"])
        Save()(Load()(x.state["runs"]) + 1, x.state["runs"])
        return total / (Load()(x.state["runs"]) + 1)

    return criterion_of(flow, total=State(dtype=dtype), runs=State(dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(dtype):
    scope = ScopeSpec(BlockSpec(param(20, 30), (2, 3)))
    whole = scorer_for(movement(dtype), scope)
    for _ in range(3):
        whole.score()
    file = io.BytesIO()
    torch.save(whole.state_dict(), file)
    file.seek(0)
    resumed = scorer_for(movement(dtype), scope)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(3):
        assert torch.equal(whole.score()[scope.block], resumed.score()[scope.block])
    for name in ("total", "runs"):
        assert torch.equal(kept(whole, name), kept(resumed, name))
        assert kept(whole, name).dtype == kept(resumed, name).dtype


def test_a_checkpoint_of_another_dtype_raises_an_error_and_changes_nothing():
    saved, other = (scorer_for(counter(d), rows([1.0, 2.0])) for d in (torch.float64, torch.int32))
    saved.score()
    with pytest.raises(CheckpointError, match=r"state 'runs' .* torch.float64, .* torch.int32"):
        other.load_state_dict(saved.state_dict())
    assert not kept(other).any()


SAVED = [
    (torch.int32, [2.4, 2.5, 3.5, -1.7], [2, 2, 4, -2]),
    (torch.int8, [1e9, -1e9, float("inf"), 126.6], [127, -128, 127, 127]),
    (torch.uint8, [-3.0, 300.0, 7.0, float("-inf")], [0, 255, 7, 0]),
    (torch.int64, [1e30, -1e30, 2.0**40, float("inf")], [2**63 - 1, -(2**63), 2**40, 2**63 - 1]),
    (torch.int16, [float("nan"), 1.0, -0.0, 0.49], [5, 1, 0, 0]),
]


@pytest.mark.parametrize(("dtype", "values", "wanted"), SAVED, ids=str)
def test_a_float_is_rounded_to_an_integer_within_its_range(dtype, values, wanted):
    def flow(x):
        Save()(Sum()(x.weight), x.state["runs"])
        return Load()(x.state["runs"]) * 0

    scorer = scorer_for(criterion_of(flow, runs=State(fill=5, dtype=dtype)), rows(values))
    scorer.score()
    assert kept(scorer).flatten().tolist() == wanted


def test_an_integer_is_saved_within_the_range_of_a_narrower_one():
    def flow(x):
        Save()(Load()(x.state["wide"]) * 1000, x.state["runs"])
        return Sum()(x.weight)

    states = {"wide": State(fill=7, dtype=torch.int64), "runs": State(dtype=torch.int8)}
    scorer = scorer_for(criterion_of(flow, **states), rows([1.0]))
    scorer.score()
    assert kept(scorer).item() == 127


def of_types(x):
    """The values of a flow, with the dtype that each should have."""
    whole, single, double = (Load()(x.state[name]) for name in ("int", "fp32", "fp64"))
    is_even = OPERATORS[">"]()(whole, 1)
    return [
        (whole + 1, torch.int32),
        (1 - whole, torch.int32),
        (whole + 1.0, torch.float32),
        (whole * single, torch.float32),
        (single * double, torch.float64),
        (single + 1, torch.float32),
        (double + 1.5, torch.float64),
        (whole / whole, torch.float32),
        (-whole, torch.int32),
        (abs(whole), torch.int32),
        (Square()(whole), torch.int32),
        (Sqrt()(whole), torch.float32),
        (Log()(double), torch.float64),
        (Maximum()(whole, 7), torch.int32),
        (is_even, torch.bool),
        (Where()(is_even, whole, 0), torch.int32),
        (Where()(is_even, 1, 0), torch.float32),
        (Where()(is_even, double, whole), torch.float64),
        (Pick(0)(Stack()(whole, double)), torch.float64),
        (Rank()(whole), torch.float32),
        (Softmax()(double), torch.float64),
        (Normalize()(whole), torch.float32),
        (x.step, torch.float32),
    ]


def test_dtypes_are_promoted_as_in_torch():
    """Every value of the trace has a dtype, and the tensor of a run has the same."""
    made = []

    def flow(x):
        made.extend(of_types(x))
        total = Sum()(x.weight)
        for value, dtype in made:
            assert value.dtype == dtype, value
            total = total + (Where()(value, 1.0, 0.0) if dtype == torch.bool else value)
        return total

    states = {"int": State(3, dtype=torch.int32), "fp32": State(2.0), "fp64": State(4.0, dtype=torch.float64)}
    scorer = scorer_for(criterion_of(flow, **states), rows([1.0, 2.0]))
    computed = {}
    nodes = scorer.program.nodes
    ids = {node.output.id: node for node in nodes if node.output is not None}
    for node in nodes:
        execute = node.op.execute
        node.op.execute = lambda *a, node=node, execute=execute: computed.setdefault(node.output.id, execute(*a))
    scorer.score()
    for value, dtype in made:
        if value.id in computed:
            assert computed[value.id].dtype == dtype, ids[value.id].op
    assert len(computed) >= len(made) - 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dtype": torch.bfloat16}, r"dtype=torch.bfloat16 of a State is not supported: pass torch.float32, .*int64"),
        ({"dtype": torch.bool}, r"dtype=torch.bool of a State is not supported"),
        ({"dtype": torch.complex64}, r"dtype=torch.complex64 of a State is not supported"),
        ({"dtype": torch.int32, "fill": 0.5}, r"fill=0.5 .* torch.int32"),
        ({"dtype": torch.int8, "fill": 128}, r"fill=128 .* torch.int8"),
        ({"dtype": torch.int64, "fill": float("inf")}, r"fill=inf .* torch.int64"),
    ],
)
def test_an_invalid_state_raises_an_error_at_construction(options, text):
    with pytest.raises(FlowError, match=text):
        State(**options)
