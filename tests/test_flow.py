"""Flows: tracing, checks, dead code elimination and inputs."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from flow_cases import criterion_of, rows, scorer_for, scores_of
from poison import poison  # noqa: F401
from torch import nn

from sparse_lightning import Blocks, BlockSpec, Constant, FlowError, ScopeCoupling, ScopeSpec, Sparsifier
from sparse_lightning.blocks.reductions import norm
from sparse_lightning.flow import (
    FORMAT,
    Abs,
    Exp,
    Inputs,
    Load,
    Max,
    Normalize,
    Pick,
    Program,
    Rank,
    Save,
    Scorer,
    Softmax,
    Sources,
    Square,
    Stack,
    State,
    Sum,
    Where,
    ops,
    trace,
)
from sparse_lightning.flow.context import Context, Op, Value
from sparse_lightning.flow.ops import BlockReduction, Elementwise
from sparse_lightning.kernels.stage import OPERATIONS

pytestmark = pytest.mark.usefixtures("poison")


def test_every_operation_of_a_stage_can_be_emitted():
    """By an elementwise operation of a flow, or by the norm of a block; no other has to be supported by the kernels."""
    emitted = {step.operation for step in norm(3).steps}
    for kind in [kind for kind in vars(ops).values() if isinstance(kind, type) and issubclass(kind, ops.Elementwise)]:
        if kind is not ops.Elementwise:
            others = range(1, kind.arity)

            def flow(x, kind=kind, others=others):
                found = kind()(x.weight > 0 if kind is Where else x.weight, *(x.weight for _ in others))
                return Sum()(Where()(found, 1.0, 0.0) if kind.returns_bool else found)

            emitted |= {step.operation for step in Program.of(trace(criterion_of(flow))).stage.steps}
    assert emitted == set(OPERATIONS)


def test_an_operation_outside_of_a_trace_raises_an_error():
    value = trace(criterion_of(lambda x: Sum()(x.weight))).result
    with pytest.raises(FlowError, match="Abs is called outside of a trace"):
        Abs()(value)


class Cube(Elementwise):
    """An operation of a user's own that no lowering knows."""

    arity = 1

    def execute(self, x):
        return x**3


class LoudAbs(Elementwise):
    """It names an operation that lowerings know, and computes another."""

    operation, arity = "abs", 1

    def execute(self, x):
        return 2 * x.abs()


class Misspelt(Elementwise):
    operation, arity = "cubed", 1


class Median(BlockReduction):
    def execute(self, elements):
        return elements.median(-1).values


class Quartic(BlockReduction):
    kind, prepares = "sum", "quartic"

    def execute(self, elements):
        return elements.pow(4).sum(-1)


class LoudMax(Max):
    """Its definition is not that of the fold that it inherits."""

    def execute(self, elements):
        return 2 * elements.amax(-1)


class Total(Op):
    """A reduction that is not a BlockReduction."""

    def profile(self, context, *inputs):
        output = context.value(str(self), FORMAT.RAGGED)
        context.record(self, inputs, output)
        return output

    def execute(self, x):
        return x.sum()


def saved_twice(x):
    kept = Sum()(x.weight)
    Save()(kept, x.state["kept"])
    Save()(kept * 2, x.state["kept"])
    return kept


INVALID = [
    (saved_twice, r"Save: .*the field kept .* is already saved by this flow.*: save one value"),
    (lambda x: Sum()(Cube()(x.weight)), r"Cube has no rule for ELEMENT values.*: .*operation"),
    (lambda x: Sum()(LoudAbs()(x.weight)), r"LoudAbs has no rule for ELEMENT values"),
    (lambda x: Sum()(Misspelt()(x.weight)), r"Misspelt has no rule for ELEMENT values"),
    (lambda x: (Cube()(x.weight), Sum()(x.weight))[1], r"Cube has no rule for ELEMENT values"),
    (lambda x: Median()(x.weight), r"Median has no rule for ELEMENT values"),
    (lambda x: Quartic()(x.weight), r"Quartic has no rule for ELEMENT values"),
    (lambda x: LoudMax()(x.weight), r"LoudMax has no rule for ELEMENT values"),
    (lambda x: Misspelt()(Sum()(x.weight)), r"Misspelt: there is no operation 'cubed'"),
    (lambda x: Total()(x.weight), r"Total has no rule for ELEMENT values"),
    (lambda x: Sum()(Sum()(x.weight)), r"Sum: argument 1 must be ELEMENT, but Sum .* is RAGGED"),
    (lambda x: x.weight, r"must return one number per block .*reduce elements"),
    (lambda x: x.weight + Sum()(x.grad), r"Add: weight .* and Sum .* have different formats"),
    (lambda x: Sum()(x.weight) + x.state["kept"], r"argument 2 must be ELEMENT or RAGGED, but kept .*Load it first"),
    (lambda x: Normalize()(x.weight), r"must be RAGGED, but weight .*reduce it over its blocks first"),
    (lambda x: Load()(x.state["wide"]), r"inner shape \[1, 1\]"),
    (lambda x: Save()(x.weight, x.state["kept"]), r"Save: argument 1 must be RAGGED"),
    (lambda x: Save()(Sum()(x.weight), x.state["wide"]), r"does not have the inner shape \[2, 1\]"),
    (lambda x: Load()(x.state["flat"]), r"must have rank 3, \[entries, D0, D1\], but flat .* has rank 2"),
    (lambda x: Load()(x.state["wide"]) + Load()(x.state["tall"]), r"inner shapes of .* and .* do not broadcast"),
    (
        lambda x: x.state["keptt"],
        r"'keptt' is not one of the states .* \(kept, wide, tall, flat\): did you mean 'kept'\?",
    ),
    (lambda x: x.state["salency"], r"'salency' is not one of the states .* \(kept, wide, tall, flat\)$"),
    (lambda x: x.state.kept, r'x.state.kept is not an attribute: use x.state\["kept"\]'),
    (lambda x: x.gradient, r"'gradient' is not an input of a flow \(weight, grad, .*, state\): did you mean 'grad'\?"),
    (lambda x: x.weights, r"'weights' is not an input .*: did you mean 'weight'\?"),
    (lambda x: x.loss, r"'loss' is not an input of a flow \(weight, grad, .*, state\)$"),
    (lambda x: x.optimizer.exp_avg, r'x.optimizer.exp_avg is not an attribute: use x.optimizer\["exp_avg"\]'),
    (
        lambda x: "exp_avg" in x.optimizer,
        r"optimizer state are unknown while a flow is traced: read an entry by its name",
    ),
    (lambda x: Sum()(3.0), r"Sum: argument 1 must be a value of the flow, not 3.0"),
    (lambda x: Abs()(1.0), r"all arguments are numbers, but at least one must be a value"),
    (lambda x: Sum()(x.weight, x.grad), r"Sum got 2 arguments instead of 1"),
    (lambda x: Sum()(x.weight > 0), r"is a condition, not a number: convert it with Where"),
    (lambda x: (x.weight > 0) + 1, r"is a condition, not a number"),
    (lambda x: Sum()(Where()(x.weight, 1.0, 0.0)), r"Where: argument 1 must be a condition"),
    (lambda x: Sum()(x.weight) if x.weight > 0 else 0, r"use Where instead of if"),
    (
        lambda x: Pick(3)(Stack()(Sum()(x.weight), Sum()(x.grad))),
        r"Pick: index 3 is out of range: Stack .* has 2 statistics",
    ),
    (lambda x: Stack()(Load()(x.state["wide"])), r"Stack takes values of inner shape \[1, 1\], not \[\[2, 1\]\]"),
    (lambda x: Sum()(x.weight) > 0, r"returns the condition .*: convert it with Where"),
    (lambda x: Rank(per="layer")(Sum()(x.weight)), r'Rank: per=\'layer\' is not a group: pass "parameter" or "scope"'),
    (lambda x: list(x.optimizer), r"optimizer state are unknown while a flow is traced: read an entry by its name"),
]
STATES = {"kept": State(), "wide": State(inner=(2, 1)), "tall": State(inner=(3, 1)), "flat": State(inner=(2,))}


@pytest.mark.parametrize(("flow", "text"), INVALID)
def test_an_invalid_flow_raises_an_error_when_it_is_traced(flow, text):
    with pytest.raises(FlowError, match=text):
        trace(criterion_of(flow, **STATES))


def test_an_operation_of_a_users_own_works_on_grids():
    """After the reduction there is one lowering, which calls `execute`."""
    scope = rows([1.0, 2.0])
    assert scores_of(criterion_of(lambda x: Cube()(Sum()(x.weight))), scope)[scope.block].tolist() == [[1, 8]]


def test_a_reduction_of_a_users_own_names_its_fold():
    class RootMeanSquare(BlockReduction):
        kind, prepares = "sum", "square"

        def finish(self, folded, blocks):
            return (folded / blocks.sizes).sqrt()

        def execute(self, elements):
            return elements.square().mean(-1).sqrt()

    spec = BlockSpec(torch.tensor([[1.0, 7.0, 2.0, 2.0]]), (1, 2))
    assert scores_of(criterion_of(lambda x: RootMeanSquare()(x.weight)), ScopeSpec(spec))[spec].tolist() == [[5, 2]]


def test_triton_without_a_gpu_or_the_interpreter_raises_an_error_at_construction(monkeypatch):
    pytest.importorskip("triton")
    weight = criterion_of(lambda x: Sum()(x.weight))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(FlowError, match=r"'triton' needs parameters on a CUDA device, not on cpu.*TRITON_INTERPRET=1"):
        Scorer(weight, lowering="triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(FlowError, match=r"'triton' needs a CUDA device, and there is none.*TRITON_INTERPRET=1"):
        Sparsifier([Blocks("weight", (1, 1))], Constant(0.5), lowering="triton")
    with pytest.raises(FlowError, match="no lowering 'tritn': did you mean 'triton'"):
        Sparsifier([Blocks("weight", (1, 1))], Constant(0.5), lowering="tritn")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert Scorer(weight, lowering="triton").lowering == "triton"


def test_a_value_of_another_device_or_trace_raises_an_error_when_it_is_traced():
    elsewhere = trace(criterion_of(lambda x: Sum()(x.weight)), device="meta").result
    with pytest.raises(FlowError, match="belongs to another trace"):
        trace(criterion_of(lambda x: Sum()(x.weight) + elsewhere))

    def moved(x):
        total = Sum()(x.weight)
        return Abs()(Value(total.context, total.id, total.format, (1, 1), total.dtype, torch.device("meta"), "moved"))

    with pytest.raises(FlowError, match=r"Abs: argument 1 must be on cpu, but moved .* is on meta"):
        trace(criterion_of(moved))


def test_unused_operations_are_eliminated_and_saves_are_kept_with_all_that_they_depend_on():
    def flow(x):
        Exp()(Sum()(x.grad))
        Save()(Square()(Sum()(x.weight)), x.state["kept"])
        return Max()(x.weight)

    context = trace(criterion_of(flow, kept=State()))
    assert [str(node.op) for node in context.nodes] == ["Sum", "Exp", "Sum", "Square", "Save", "Max"]
    assert [str(node.op) for node in context.live_nodes()] == ["Sum", "Square", "Save", "Max"]
    program = Program.of(context)
    assert program.elements == ("weight",), "the gradient is read, but not used"
    assert len(program.stage.folds) == 2


def test_values_have_shape_dtype_device_and_format():
    context = trace(criterion_of(lambda x: Sum()(x.weight * 2)))
    assert context.result.shape == ("ragged", 1, 1)
    assert context.inputs["weight"].format is FORMAT.ELEMENT
    assert (context.result.dtype, context.result.device) == (torch.float32, torch.device("cpu"))
    assert len({node.output.id for node in context.nodes}) == len(context.nodes)


def test_a_state_of_a_criterion_without_states_raises_an_error():
    with pytest.raises(FlowError, match=r"'kept' is not one of the states that the criterion declares \(none\)"):
        trace(criterion_of(lambda x: x.state["kept"]))


def test_inputs_support_hasattr_getattr_copy_and_pickle():
    x = Inputs(Context(torch.device("cpu")))
    for named in (x, x.state, x.optimizer):
        assert not hasattr(named, "gradient")
        assert not hasattr(named, "__array__")
        assert getattr(named, "gradient", 7) == 7
        for made in (copy.copy(named), copy.deepcopy(named), pickle.loads(pickle.dumps(named))):
            assert type(made) is type(named)
    assert hasattr(x, "grad")
    with pytest.raises(AttributeError, match="'Inputs' object has no attribute '__missing__'") as error:
        x.__missing__  # noqa: B018
    assert not isinstance(error.value, FlowError), "a name that Python looks up by itself is not an error of the flow"


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


def test_missing_inputs_raise_errors_that_name_what_to_do():
    bare = nn.Parameter(torch.ones(2, 2))
    scope = ScopeSpec(BlockSpec(bare, (1, 1)))
    with pytest.raises(FlowError, match=r"grad of w is missing: call backward\(\) first"):
        scores_of(criterion_of(lambda x: Sum()(x.grad)), scope)
    with pytest.raises(FlowError, match="input_norm of w is missing: collect it with InputNorms"):
        scores_of(criterion_of(lambda x: Sum()(x.input_norm)), scope)
    adam = Sources(optimizers=[torch.optim.AdamW([bare])])
    wrong = scorer_for(criterion_of(lambda x: Sum()(x.optimizer["exp_avg_square"])), scope)
    with pytest.raises(
        FlowError, match=r"optimizer.exp_avg_square of w is missing: did you mean 'optimizer.exp_avg_sq'"
    ):
        wrong.check(adam)
    with pytest.raises(FlowError, match="no optimizer has a state tensor of the shape of the parameter"):
        wrong.check(Sources(optimizers=[torch.optim.SGD([bare])]))
    scorer_for(criterion_of(lambda x: Sum()(x.optimizer["exp_avg_sq"])), scope).check(adam)
    with pytest.raises(FlowError, match="no lowering 'compile': did you mean 'compiled'"):
        Scorer(criterion_of(lambda x: Sum()(x.weight)), lowering="compile")


def test_step_and_target_are_one_number_for_all_blocks():
    scope = rows([1.0, 2.0])
    scorer = scorer_for(criterion_of(lambda x: Sum()(x.weight) * x.target + x.step), scope)
    assert scorer.score(Sources(step=3, target=0.5))[scope.block].tolist() == [[3.5, 4.0]]


def test_scores_are_writable_even_if_all_blocks_have_the_same():
    scope = rows([1.0, 1.0, 1.0, 1.0])
    scorer = scorer_for(criterion_of(lambda x: x.step), scope)
    scores = scorer.score(Sources(step=3))[scope.block]
    scores[0, 0] = 7
    assert scores.flatten().tolist() == [7, 3, 3, 3]
    assert scorer.score(Sources(step=3))[scope.block].flatten().tolist() == [3, 3, 3, 3]
