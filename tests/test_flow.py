"""Flows: traced, checked, eliminated; state that lives from run to run; lowerings that agree."""

from __future__ import annotations

import io

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from sparse_lightning import BlockCoupling, BlockSpec, CheckpointError, FlowError, ScopeCoupling, ScopeSpec, View
from sparse_lightning.flow import (
    FORMAT,
    Abs,
    Criterion,
    Exp,
    L2Norm,
    Load,
    Log,
    Max,
    Maximum,
    Mean,
    Min,
    Minimum,
    Normalize,
    Pick,
    Program,
    Rank,
    Relu,
    Save,
    Scorer,
    Sigmoid,
    Softmax,
    Sources,
    Sqrt,
    Square,
    Stack,
    State,
    Sum,
    Where,
    trace,
)
from sparse_lightning.flow.context import Value
from sparse_lightning.flow.ops import BlockReduction, Grouped

LOWERINGS = ["reference", "compiled"]


def criterion_of(flow, **states):
    """A criterion from a function, for tests."""
    body = {"flow": lambda self, x: flow(x), "states": states}
    return type("Made", (Criterion,), body)()


def param(*shape, seed=0, dtype=torch.float32):
    made = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))
    made.grad = torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1)).to(dtype)
    return made


def scorer_for(criterion, scope, **options):
    scorer = Scorer(criterion, **options)
    scorer.attach("w", scope)
    return scorer


def scores_of(criterion, scope, **options):
    return scorer_for(criterion, scope, **options).score()


def rows(values):
    """A scope whose blocks are single weights with these values, so that scores are easy to follow."""
    return ScopeSpec(BlockSpec(torch.tensor([values]), (1, 1)))


def test_an_operation_outside_of_a_trace_is_refused():
    value = trace(criterion_of(lambda x: Sum()(x.weight))).result
    with pytest.raises(FlowError, match="Abs is called outside of a trace"):
        Abs()(value)


REFUSED = [
    (lambda x: Sum()(Sum()(x.weight)), r"Sum: argument 1 must be ELEMENT, but Sum .* is RAGGED"),
    (lambda x: x.weight, r"must give one number for each block .*reduce elements"),
    (lambda x: x.weight + Sum()(x.grad), r"Add: weight .* and Sum .* have different formats"),
    (lambda x: Sum()(x.weight) + x.state["kept"], r"argument 2 must be ELEMENT or RAGGED, but kept .*Load it first"),
    (lambda x: Normalize()(x.weight), r"must be RAGGED, but weight .*reduce it over its blocks first"),
    (lambda x: Load()(x.state["wide"]), r"inner shape \[1, 1\]"),
    (lambda x: Save()(x.weight, x.state["kept"]), r"Save: argument 1 must be RAGGED"),
    (lambda x: Save()(Sum()(x.weight), x.state["wide"]), r"does not have the inner shape \[2, 1\]"),
    (lambda x: Load()(x.state["flat"]), r"must have rank 3, \[entries, D0, D1\], but flat .* has rank 2"),
    (lambda x: Load()(x.state["wide"]) + Load()(x.state["tall"]), r"inner shapes .* do not agree"),
    (lambda x: x.state["keptt"], r"declares no state 'keptt': did you mean 'kept'"),
    (lambda x: Sum()(3.0), r"Sum: argument 1 must be a value of the flow, not 3.0"),
    (lambda x: Abs()(1.0), r"at least one argument must be a value"),
    (lambda x: Sum()(x.weight, x.grad), r"Sum takes 1 arguments, not 2"),
    (lambda x: Sum()(x.weight > 0), r"is a condition, not a number: choose with Where"),
    (lambda x: (x.weight > 0) + 1, r"is a condition, not a number"),
    (lambda x: Sum()(Where()(x.weight, 1.0, 0.0)), r"Where: argument 1 must be a condition"),
    (lambda x: Sum()(x.weight) if x.weight > 0 else 0, r"use Where instead of if"),
    (lambda x: Pick(3)(Stack()(Sum()(x.weight), Sum()(x.grad))), r"no statistic 3"),
    (lambda x: Stack()(Load()(x.state["wide"])), r"takes values of inner shape \[1, 1\]"),
    (lambda x: Sum()(x.weight) > 0, r"gives the condition"),
    (lambda x: Rank(per="layer")(Sum()(x.weight)), r'per is "parameter" or "scope", not \'layer\''),
    (lambda x: list(x.optimizer), r"ask for it by name"),
]
STATES = {"kept": State(), "wide": State(inner=(2, 1)), "tall": State(inner=(3, 1)), "flat": State(inner=(2,))}


@pytest.mark.parametrize(("flow", "text"), REFUSED)
def test_what_does_not_fit_is_refused_when_it_is_traced(flow, text):
    with pytest.raises(FlowError, match=text):
        trace(criterion_of(flow, **STATES))


def test_a_value_of_another_device_or_trace_is_refused_when_it_is_traced():
    elsewhere = trace(criterion_of(lambda x: Sum()(x.weight)), device="meta").result
    with pytest.raises(FlowError, match="belongs to another trace"):
        trace(criterion_of(lambda x: Sum()(x.weight) + elsewhere))

    def moved(x):
        total = Sum()(x.weight)
        return Abs()(Value(total.context, total.id, total.format, (1, 1), total.dtype, torch.device("meta"), "moved"))

    with pytest.raises(FlowError, match=r"Abs: argument 1 must live on cpu, but moved .* lives on meta"):
        trace(criterion_of(moved))


def test_unused_operations_are_dropped_and_saves_stay_with_all_that_they_need():
    def flow(x):
        Exp()(Sum()(x.grad))
        Save()(Square()(Sum()(x.weight)), x.state["kept"])
        return Max()(x.weight)

    context = trace(criterion_of(flow, kept=State()))
    assert [str(node.op) for node in context.nodes] == ["Sum", "Exp", "Sum", "Square", "Save", "Max"]
    assert [str(node.op) for node in context.live_nodes()] == ["Sum", "Square", "Save", "Max"]
    program = Program.of(context)
    assert program.elements == ("weight",), "the gradient is read though nothing needs it"
    assert len(program.stage.folds) == 2


def test_values_know_their_shape_dtype_device_and_format():
    context = trace(criterion_of(lambda x: Sum()(x.weight * 2)))
    assert context.result.shape == ("ragged", 1, 1)
    assert context.inputs["weight"].format is FORMAT.ELEMENT
    assert (context.result.dtype, context.result.device) == (torch.float32, torch.device("cpu"))
    assert len({node.output.id for node in context.nodes}) == len(context.nodes)


@pytest.mark.parametrize("order", ["save first", "load first"])
def test_load_sees_the_previous_run(order):
    def flow(x):
        total = Sum()(x.weight)
        if order == "save first":
            Save()(total, x.state["kept"])
            return Load()(x.state["kept"])
        before = Load()(x.state["kept"])
        Save()(total, x.state["kept"])
        return before

    scope = rows([1.0, 2.0])
    scorer = scorer_for(criterion_of(flow, kept=State(fill=-7.0)), scope)
    assert scorer.score()[scope.block].tolist() == [[-7, -7]]
    scope.block.param.mul_(10)
    assert scorer.score()[scope.block].tolist() == [[1, 2]]
    assert scorer.score()[scope.block].tolist() == [[10, 20]]


def counter(fill=0.0):
    def flow(x):
        kept = Load()(x.state["runs"]) + 1 + 0 * Sum()(x.weight)
        Save()(kept, x.state["runs"])
        return kept

    return criterion_of(flow, runs=State(fill=fill))


def test_attaching_and_detaching_leaves_the_state_of_others_bit_for_bit():
    scopes = [ScopeSpec(BlockSpec(param(300, 2, seed=i), (1, 1))) for i in range(4)]
    scorer = Scorer(criterion_of(_movement, saliency=State()))
    for i, scope in enumerate(scopes[:3]):
        scorer.attach(f"s{i}", scope)
    scorer.score()
    before = scorer.state_dict()["fields"]["saliency"]
    scorer.detach("s1")
    scorer.attach("s3", scopes[3])
    after = scorer.state_dict()["fields"]["saliency"]
    assert set(after) == {"s0", "s2", "s3"}
    assert torch.equal(before["s0"], after["s0"])
    assert torch.equal(before["s2"], after["s2"])
    assert not after["s3"].any(), "a page that is used again does not start at its fill"


def _movement(x):
    saliency = Load()(x.state["saliency"]) + Sum()(-x.weight * x.grad)
    Save()(saliency, x.state["saliency"])
    return saliency


def test_a_page_that_is_used_again_starts_at_its_fill():
    scorer = Scorer(counter(fill=100.0))
    first, second = rows([1.0] * 300), rows([1.0] * 300)
    scorer.attach("a", first)
    scorer.score()
    pages = list(scorer._table.pages["a"])
    scorer.detach("a")
    scorer.attach("b", second)
    assert scorer._table.pages["b"] == pages, "the test wants the same pages"
    assert (scorer.score()[second.block] == 101).all()


def test_state_round_trips_through_a_checkpoint_that_loads_weights_only():
    scope = ScopeSpec(BlockSpec(param(20, 30), (2, 3)))
    scorer = scorer_for(criterion_of(_movement, saliency=State()), scope)
    scorer.score()
    file = io.BytesIO()
    torch.save(scorer.state_dict(), file)
    file.seek(0)
    other = scorer_for(criterion_of(_movement, saliency=State()), scope)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other.score()[scope.block], scorer.score()[scope.block])
    assert other.runs == 2


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing():
    small = scorer_for(counter(), rows([1.0, 2.0]))
    small.score()
    large = scorer_for(counter(), rows([1.0, 2.0, 3.0]))
    large.score()
    kept = large.state_dict()
    with pytest.raises(CheckpointError, match=r"\(2, 1, 1\) entries of state 'runs' for 'w', which has 3 blocks"):
        large.load_state_dict(small.state_dict())
    with pytest.raises(CheckpointError, match=r"for \[\], not \['w'\]"):
        large.load_state_dict({"runs": 1, "fields": {}})
    assert torch.equal(large.state_dict()["fields"]["runs"]["w"], kept["fields"]["runs"]["w"])


def test_several_statistics_can_be_one_value():
    def flow(x):
        Save()(Stack()(Sum()(x.weight), Max()(x.weight)), x.state["pair"])
        kept = Load()(x.state["pair"])
        return Pick(0)(kept) + 10 * Pick(1)(kept)

    scope = ScopeSpec(BlockSpec(torch.tensor([[1.0, 2.0, 3.0, 5.0]]), (1, 2)))
    scorer = scorer_for(criterion_of(flow, pair=State(inner=(2, 1))), scope)
    assert scorer.score()[scope.block].tolist() == [[0, 0]]
    assert scorer.score()[scope.block].tolist() == [[23, 58]]


def test_groups_are_parameters_or_scopes():
    first, second = (
        BlockSpec(torch.tensor([[3.0, 4.0, 0.0, 0.0]]), (1, 1)),
        BlockSpec(torch.tensor([[5.0, 12.0]]), (1, 1)),
    )
    both = ScopeCoupling([ScopeSpec(first), ScopeSpec(second)])
    weight = lambda x: Sum()(x.weight)  # noqa: E731
    scores = scores_of(criterion_of(lambda x: Normalize()(weight(x))), both)
    torch.testing.assert_close(scores[first], torch.tensor([[0.6, 0.8, 0.0, 0.0]]))
    torch.testing.assert_close(scores[second], torch.tensor([[5 / 13, 12 / 13]]))
    scores = scores_of(criterion_of(lambda x: Rank(per="scope")(weight(x))), both)
    assert scores[first].tolist() == [[pytest.approx(0.4), pytest.approx(0.6), pytest.approx(0.2), 0]]
    assert scores[second].tolist() == [[pytest.approx(0.8), 1]]
    scores = scores_of(criterion_of(lambda x: Softmax(per="scope")(weight(x))), ScopeSpec(first, (1, 2)))
    torch.testing.assert_close(scores[first].view(2, 2).sum(-1), torch.ones(2))


def test_scores_of_parameters_that_are_not_there_are_errors_with_what_is():
    bare = nn.Parameter(torch.ones(2, 2))
    scope = ScopeSpec(BlockSpec(bare, (1, 1)))
    with pytest.raises(FlowError, match="grad is not there for w: run backward first"):
        scores_of(criterion_of(lambda x: Sum()(x.grad)), scope)
    with pytest.raises(FlowError, match="input_norm is not there for w: collect it with InputNorms"):
        scores_of(criterion_of(lambda x: Sum()(x.input_norm)), scope)
    adam = Sources(optimizers=[torch.optim.AdamW([bare])])
    wrong = scorer_for(criterion_of(lambda x: Sum()(x.optimizer["exp_avg_square"])), scope)
    with pytest.raises(
        FlowError, match=r"optimizer.exp_avg_square is not there for w: did you mean 'optimizer.exp_avg_sq'"
    ):
        wrong.check(adam)
    with pytest.raises(FlowError, match="no optimizer keeps a tensor of its shape"):
        wrong.check(Sources(optimizers=[torch.optim.SGD([bare])]))
    scorer_for(criterion_of(lambda x: Sum()(x.optimizer["exp_avg_sq"])), scope).check(adam)
    with pytest.raises(FlowError, match="no lowering 'compile': did you mean 'compiled'"):
        Scorer(criterion_of(lambda x: Sum()(x.weight)), lowering="compile")


def test_step_and_target_are_numbers_for_all_blocks():
    scope = rows([1.0, 2.0])
    scorer = scorer_for(criterion_of(lambda x: Sum()(x.weight) * x.target + x.step), scope)
    assert scorer.score(Sources(step=3, target=0.5))[scope.block].tolist() == [[3.5, 4.0]]


SHAPES = st.sampled_from([(1, 1), (3, 5), (63, 4), (5, 7, 3), (500,), (8, 3, 3, 3)])
# Bounded, so that fp32 and fp64 see the same numbers and not the end of the one's range.
UNARY = [
    Abs(),
    Relu(),
    Sigmoid(),
    lambda v: -v,
    lambda v: Square()(Sigmoid()(v)),
    lambda v: Sqrt()(Abs()(v)),
    lambda v: Log()(Abs()(v) + 1),
]
BINARY = [Maximum(), Minimum(), lambda a, b: a + b, lambda a, b: a - b, lambda a, b: Sigmoid()(a) * b]
REDUCE = [Sum, Mean, Max, Min, L2Norm]


@st.composite
def flows(draw):
    """A flow that hypothesis puts together from the operations: a recipe of choices, replayed while tracing."""
    picks = draw(st.lists(st.integers(0, 10**6), min_size=6, max_size=14))

    def flow(x):
        elements = [x.weight, x.grad]
        for i, pick in enumerate(picks[:-3]):
            a, b = elements[pick % len(elements)], elements[pick // 7 % len(elements)]
            kind = pick % 4
            if kind == 0:
                elements.append(UNARY[pick // 4 % len(UNARY)](a))
            elif kind == 1:
                elements.append(BINARY[pick // 4 % len(BINARY)](a, b))
            elif kind == 2:
                elements.append(Where()(a > b, a, 0.5 * b))
            else:
                elements.append(a * (0.25 + i) - 1)
        first, second = (REDUCE[p % len(REDUCE)]()(Sigmoid()(elements[-1 - k]) + 0.5) for k, p in enumerate(picks[-2:]))
        kept = Load()(x.state["kept"]) * 0.5 + first
        Save()(kept, x.state["kept"])
        return kept + Normalize()(second) * 0.125

    return flow


def naive(context, scope, loaded):
    """The traced graph executed op by op on all elements of one BlockSpec: the plainest meaning of a flow."""
    spec = scope.block
    sizes = spec.block_sizes().flatten()
    values = {}
    for name in ("weight", "grad"):
        tensor = spec.param.detach() if name == "weight" else spec.param.grad
        if name in context.inputs:
            parts = [spec.view_of(tensor).data[_slices(spec, at)].flatten().double() for at in _grid(spec)]
            values[context.inputs[name].id] = parts
    for node in context.live_nodes():
        if isinstance(node.op, Save):
            continue
        args = [values[x.id] if isinstance(x, Value) and x.id in values else x for x in node.inputs]
        if isinstance(node.op, Load):
            out = loaded.double()
        elif isinstance(node.op, BlockReduction):
            out = torch.stack([node.op.execute(part) for part in args[0]]).view(-1, 1, 1)
        elif isinstance(node.op, Grouped):
            assert isinstance(node.op, Normalize)
            out = args[0] / args[0].norm() if args[0].norm() > 0 else args[0] * 0
        elif node.output.format is FORMAT.ELEMENT:
            out = [node.op.execute(*(a[i] if isinstance(a, list) else a for a in args)) for i in range(len(sizes))]
        else:
            out = node.op.execute(*args)
        values[node.output.id] = out
    return values[context.result.id].flatten()


def _grid(spec):
    import itertools

    return list(itertools.product(*map(range, spec.grid_shape)))


def _slices(spec, at):
    return tuple(slice(i * b, (i + 1) * b) for i, b in zip(at, spec.shape, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_random_flows_mean_what_their_operations_say(dtype):
    @settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
    @given(flows(), SHAPES, st.data())
    def law(flow, shape, data):
        weight = param(*shape, seed=data.draw(st.integers(0, 9)), dtype=dtype)
        order = data.draw(st.permutations(range(len(shape))))
        back = [order.index(d) for d in range(len(shape))]
        weight.grad = weight.grad.permute(order).contiguous().permute(back)
        block = [data.draw(st.integers(1, n)) for n in shape]
        scope = ScopeSpec(BlockSpec(weight, block, edge="partial"))
        criterion = criterion_of(flow, kept=State(fill=0.5))
        context = trace(criterion)
        got = scores_of(criterion, scope, lowering="reference")[scope.block].flatten()
        wanted = naive(context, scope, torch.full((scope.numblk(), 1, 1), 0.5))
        torch.testing.assert_close(got.double(), wanted, rtol=2e-3, atol=2e-4)

    law()


def mixed_scopes(dtype=torch.float32):
    """Awkward sizes, strides, couplings and edges."""
    conv = nn.Parameter(torch.randn(63, 4, 3, 3).to(dtype).contiguous(memory_format=torch.channels_last))
    conv.grad = torch.randn(63, 4, 3, 3).to(dtype)
    up, down, odd = param(24, 10, dtype=dtype), param(7, 24, seed=3, dtype=dtype), param(500, 3, seed=4, dtype=dtype)
    backwards = View(odd, (500, 3), (3, -1), 2)
    neurons = BlockCoupling([BlockSpec(up, (1, -1)), BlockSpec(down, (-1, 1))], [None, (1, 0)])
    return {
        "conv": ScopeSpec(BlockSpec(conv, (4, 3, 2, -1), edge="partial")),
        "neurons": ScopeSpec(neurons),
        "backwards": ScopeSpec(BlockSpec(backwards, (63, 2), edge="partial")),
        "one": ScopeSpec(BlockSpec(param(1, 1, seed=5, dtype=dtype), (1, 1))),
        "singles": ScopeSpec(BlockSpec(param(3, 5, seed=6, dtype=dtype).requires_grad_(), (1, 1))),
    }


def with_grads(scopes):
    for scope in scopes.values():
        for p in scope.parameters():
            if p.grad is None:
                p.grad = torch.randn(p.shape).to(p.dtype)
    return scopes


def test_lowerings_agree_on_random_flows(monkeypatch):
    monkeypatch.setattr("sparse_lightning.kernels.block_score.compiled.WORTH", 500)
    scopes = with_grads(mixed_scopes(torch.float16))

    @settings(max_examples=2, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(flows())
    def law(flow):
        results = []
        for lowering in LOWERINGS:
            scorer = Scorer(criterion_of(flow, kept=State()), lowering=lowering)
            for name, scope in scopes.items():
                scorer.attach(name, scope)
            scorer.score()
            results.append(scorer.score())
        for block, grid in results[0].items():
            torch.testing.assert_close(results[1][block], grid, rtol=1e-4, atol=1e-4)

    law()


def test_the_choice_of_a_lowering():
    from sparse_lightning.kernels import block_score
    from sparse_lightning.kernels.block_score import compiled, reference

    cpu = torch.device("cpu")
    assert block_score.choose(cpu, 1000) is reference.fold
    assert block_score.choose(cpu, 1000, "compiled") is compiled.fold
    if compiled.has_compiler():
        assert block_score.choose(cpu, block_score.PAYS) is compiled.fold


def test_without_a_compiler_the_plain_lowering_is_chosen(monkeypatch, tmp_path):
    from sparse_lightning.kernels import block_score
    from sparse_lightning.kernels.block_score import compiled, reference

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    compiled.has_compiler.cache_clear()
    try:
        assert block_score.choose(torch.device("cpu"), 1 << 30) is reference.fold
    finally:
        compiled.has_compiler.cache_clear()
