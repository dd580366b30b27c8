"""Criteria: each against its formula in plain torch; input norms against captured forward passes."""

from __future__ import annotations

import math

import pytest
import torch
from poison import poison  # noqa: F401
from torch import nn

from sparse_lightning import BlockSpec, FlowError, ScopeSpec
from sparse_lightning.criteria import (
    EMA,
    AdamFisher,
    ElementwiseTaylor,
    Fisher,
    Gradient,
    Magnitude,
    Movement,
    Random,
    Sensitivity,
    Taylor,
    Wanda,
)
from sparse_lightning.flow import Scorer, Sources
from sparse_lightning.flow.input_norms import InputNorms

pytestmark = pytest.mark.usefixtures("poison")

RUNS = 3


def tiles():
    torch.manual_seed(3)
    weight = nn.Parameter(torch.randn(8, 12))
    return weight, BlockSpec(weight, (4, 3))


def blocks_of(tensor):
    """(4, 3) tiles of an (8, 12) tensor, element by element: (2, 4, 12)."""
    return torch.stack(
        [torch.stack([tensor[4 * i : 4 * i + 4, 3 * j : 3 * j + 3].reshape(-1) for j in range(4)]) for i in range(2)]
    )


def mean_of(values, decay):
    """The exponential moving average of a list, with bias correction."""
    weights = [(1 - decay) * decay ** (len(values) - 1 - i) for i in range(len(values))]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


def sensitivity(w, gs):
    terms = [(w * g).abs().sum(-1) for g in gs]
    means = [mean_of(terms[: i + 1], 0.85) for i in range(len(terms))]
    deviations = [(t - m).abs() for t, m in zip(terms, means, strict=True)]
    return means[-1] * (mean_of(deviations[1:], 0.95) if len(gs) > 1 else 1)  # the first has no deviation


FORMULAS = [
    (Magnitude(p=1), lambda w, gs: w.abs().sum(-1)),
    (Magnitude(), lambda w, gs: w.square().sum(-1).sqrt()),
    (Magnitude(p=math.inf), lambda w, gs: w.abs().amax(-1)),
    (Gradient(), lambda w, gs: gs[-1].square().sum(-1).sqrt()),
    (Taylor(), lambda w, gs: (w * gs[-1]).sum(-1).abs()),
    (ElementwiseTaylor(), lambda w, gs: (w * gs[-1]).abs().sum(-1)),
    (Movement(), lambda w, gs: -sum((w * g).sum(-1) for g in gs)),
    (Fisher(decay=0.7), lambda w, gs: mean_of([(w * g).sum(-1).square() for g in gs], 0.7)),
    (Sensitivity(), sensitivity),
    (EMA(Taylor(), decay=0.6), lambda w, gs: mean_of([(w * g).sum(-1).abs() for g in gs], 0.6)),
    (
        EMA(EMA(Taylor(), decay=0.6), decay=0.3),
        lambda w, gs: mean_of(
            [mean_of([(w * g).sum(-1).abs() for g in gs[: i + 1]], 0.6) for i in range(len(gs))], 0.3
        ),
    ),
]


@pytest.mark.parametrize(("criterion", "formula"), FORMULAS, ids=lambda x: type(x).__name__)
def test_a_criterion_matches_its_formula_over_several_runs(criterion, formula):
    weight, spec = tiles()
    scorer = Scorer(criterion)
    scorer.attach("fc", ScopeSpec(spec))
    gradients = [torch.randn(8, 12) for _ in range(RUNS)]
    for gradient in gradients:
        weight.grad = gradient
        scores = scorer.score()[spec]
    wanted = formula(blocks_of(weight.detach()), [blocks_of(g) for g in gradients])
    torch.testing.assert_close(scores, wanted, rtol=1e-4, atol=1e-5)


def test_adam_fisher_reads_the_state_of_adam():
    weight, spec = tiles()
    adam = torch.optim.AdamW([weight])
    for _ in range(2):
        weight.grad = torch.randn(8, 12)
        adam.step()
    scorer = Scorer(AdamFisher())
    scorer.attach("fc", ScopeSpec(spec))
    weight.grad = None
    wanted = blocks_of(weight.detach().square() * adam.state[weight]["exp_avg_sq"]).sum(-1)
    torch.testing.assert_close(scorer.score(Sources(optimizers=[adam]))[spec], wanted)


def captured(layer, batches):
    """The inputs of a layer in forward passes, concatenated."""
    seen = []
    handle = layer.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].detach().clone()))
    for batch in batches:
        layer(batch)
    handle.remove()
    return torch.cat(seen)


def test_wanda_on_a_linear_layer():
    layer = nn.Linear(12, 8)
    norms = InputNorms(layer)
    seen = captured(layer, [torch.randn(5, 7, 12), torch.randn(2, 7, 12)])
    wanted = layer.weight.detach().abs() * seen.reshape(-1, 12).norm(dim=0)
    spec = BlockSpec(layer.weight, (4, 3))
    scorer = Scorer(Wanda())
    scorer.attach("fc", ScopeSpec(spec))
    scorer.check(Sources(input_norms=norms))
    torch.testing.assert_close(scorer.score(Sources(input_norms=norms))[spec], blocks_of(wanted).sum(-1))
    norms.reset()
    with pytest.raises(FlowError, match="input_norm of fc is missing"):
        scorer.score(Sources(input_norms=norms))
    layer(input=torch.randn(1, 12))
    assert layer.weight in norms
    norms.close()
    assert not layer._forward_pre_hooks


@pytest.mark.parametrize("groups", [1, 2])
def test_wanda_on_a_convolution_uses_the_norm_of_each_channel(groups):
    layer = nn.Conv2d(4, 6, 3, groups=groups)
    norms = InputNorms(layer)
    seen = captured(layer, [torch.randn(2, 4, 5, 5)])
    channel = seen.transpose(0, 1).reshape(4, -1).norm(dim=1)
    per_filter = [channel[(o // (6 // groups)) * (4 // groups) :][: 4 // groups] for o in range(6)]
    wanted = (layer.weight.detach().abs() * torch.stack(per_filter)[:, :, None, None]).sum((1, 2, 3))
    spec = BlockSpec(layer.weight, (1, -1, -1, -1))
    scorer = Scorer(Wanda())
    scorer.attach("conv", ScopeSpec(spec))
    torch.testing.assert_close(scorer.score(Sources(input_norms=norms))[spec].flatten(), wanted)


def test_a_parameter_whose_inputs_are_not_observed_raises_an_error_before_training():
    table = nn.Embedding(4, 4)
    scorer = Scorer(Wanda())
    scorer.attach("table", ScopeSpec(BlockSpec(table.weight, (1, 1))))
    with pytest.raises(FlowError, match="input_norm of table is missing: collect it with InputNorms"):
        scorer.check(Sources(input_norms=InputNorms(nn.Linear(4, 4))))


FIRST, SECOND = [0.7793553, 0.188588, 0.5584652, 0.4039828], [0.53481, 0.8083702, 0.5183624, 0.7574373]


def random_scores(global_seed):
    """Two runs on 2×2 blocks."""
    torch.manual_seed(global_seed)
    spec = BlockSpec(torch.randn(4, 4), (2, 2))
    scorer = Scorer(Random(), seed=11)
    scorer.attach("fc", ScopeSpec(spec))
    return [scorer.score()[spec].flatten().tolist() for _ in range(2)]


def test_random_scores_depend_on_the_seed_the_run_and_the_name_only():
    """The numbers are those of every process, so that all ranks and a resumed run draw the same."""
    first, second = random_scores(global_seed=1)
    assert [first, second] == random_scores(global_seed=2)
    assert first == pytest.approx(FIRST, abs=1e-6)
    assert second == pytest.approx(SECOND, abs=1e-6)


def test_random_scores_continue_after_a_resume():
    _, spec = tiles()
    whole, part, resumed = (Scorer(Random(), seed=5) for _ in range(3))
    for scorer in (whole, part, resumed):
        scorer.attach("fc", ScopeSpec(spec))
    whole.score()
    part.score()
    resumed.load_state_dict(part.state_dict())
    assert torch.equal(resumed.score()[spec], whole.score()[spec])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Magnitude(p=3), "p=3 of Magnitude is not supported: pass 1, 2 or inf"),
        (lambda: Fisher(decay=1.0), "decay=1.0 is out of range: pass a number of at least 0 and less than 1"),
        (lambda: EMA(Taylor(), decay=-0.1), "decay=-0.1 is out of range"),
    ],
    ids=["p", "decay of Fisher", "decay of EMA"],
)
def test_arguments_out_of_range_raise_an_error(make, text):
    with pytest.raises(FlowError, match=text):
        make()
