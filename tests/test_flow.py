"""Flows: traced, checked, eliminated, and what they ask for."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from flow_cases import criterion_of, rows, scorer_for, scores_of
from poison import poison  # noqa: F401
from torch import nn

from sparse_lightning import BlockSpec, FlowError, ScopeCoupling, ScopeSpec
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
    trace,
)
from sparse_lightning.flow.context import Context, Value

pytestmark = pytest.mark.usefixtures("poison")


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
    (lambda x: x.state["keptt"], r"states .* declares are kept, wide, tall, flat, not 'keptt': did you mean 'kept'"),
    (lambda x: x.state["salency"], r"are kept, wide, tall, flat, not 'salency'$"),
    (lambda x: x.state.kept, r'asked for by its name, x.state\["kept"\]'),
    (lambda x: x.gradient, r"can ask x for weight, grad, .*, state, not 'gradient': did you mean 'grad'\?"),
    (lambda x: x.weights, r"not 'weights': did you mean 'weight'\?"),
    (lambda x: x.loss, r"can ask x for weight, grad, .*, state, not 'loss'$"),
    (lambda x: x.optimizer.exp_avg, r'asked for by its name: x.optimizer\["exp_avg"\]'),
    (lambda x: "exp_avg" in x.optimizer, r"ask for it by name"),
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


def test_without_states_a_state_is_refused_too():
    with pytest.raises(FlowError, match="the states that the criterion declares are nothing, not 'kept'"):
        trace(criterion_of(lambda x: x.state["kept"]))


def test_what_a_flow_asks_can_be_looked_for_and_copied_as_any_object():
    x = Inputs(Context(torch.device("cpu")))
    for named in (x, x.state, x.optimizer):
        assert not hasattr(named, "gradient")
        assert not hasattr(named, "__array__")
        assert getattr(named, "gradient", 7) == 7
        for made in (copy.copy(named), copy.deepcopy(named), pickle.loads(pickle.dumps(named))):
            assert type(made) is type(named)
    assert hasattr(x, "grad")
    with pytest.raises(AttributeError, match="Inputs has no __missing__") as error:
        x.__missing__  # noqa: B018
    assert not isinstance(error.value, FlowError), "what Python looks for is no mistake in a flow"


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


def test_scores_are_the_callers_to_change_also_where_all_blocks_have_the_same():
    scope = rows([1.0, 1.0, 1.0, 1.0])
    scorer = scorer_for(criterion_of(lambda x: x.step), scope)
    scores = scorer.score(Sources(step=3))[scope.block]
    scores[0, 0] = 7
    assert scores.flatten().tolist() == [7, 3, 3, 3]
    assert scorer.score(Sources(step=3))[scope.block].flatten().tolist() == [3, 3, 3, 3]
