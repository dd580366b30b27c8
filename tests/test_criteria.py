"""Every criterion against its formula, written plainly; norms of inputs against a captured forward pass."""

from __future__ import annotations

import math
import subprocess
import sys

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
from sparse_lightning.input_norms import InputNorms

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
    """The exponential mean of a list, corrected for its start at zero."""
    weights = [(1 - decay) * decay ** (len(values) - 1 - i) for i in range(len(values))]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


def sensitivity(w, gs):
    terms = [(w * g).abs().sum(-1) for g in gs]
    means = [mean_of(terms[: i + 1], 0.85) for i in range(len(terms))]
    deviations = [(t - m).abs() for t, m in zip(terms, means, strict=True)]
    return means[-1] * mean_of(deviations, 0.95)


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
def test_a_criterion_is_its_formula_over_several_runs(criterion, formula):
    weight, spec = tiles()
    scorer = Scorer(criterion)
    scorer.attach("fc", ScopeSpec(spec))
    gradients = [torch.randn(8, 12) for _ in range(RUNS)]
    for gradient in gradients:
        weight.grad = gradient
        scores = scorer.score()[spec]
    wanted = formula(blocks_of(weight.detach()), [blocks_of(g) for g in gradients])
    torch.testing.assert_close(scores, wanted, rtol=1e-4, atol=1e-5)


def test_adam_fisher_reads_what_adam_keeps():
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
    """The inputs of a layer in a forward pass, side by side."""
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
    with pytest.raises(FlowError, match="input_norm is not there"):
        scorer.score(Sources(input_norms=norms))
    layer(input=torch.randn(1, 12))
    assert layer.weight in norms
    norms.close()
    assert not layer._forward_pre_hooks


@pytest.mark.parametrize("groups", [1, 2])
def test_wanda_on_a_convolution_takes_the_norm_of_each_channel(groups):
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


def test_a_parameter_that_no_hook_watches_is_found_before_training():
    table = nn.Embedding(4, 4)
    scorer = Scorer(Wanda())
    scorer.attach("table", ScopeSpec(BlockSpec(table.weight, (1, 1))))
    with pytest.raises(FlowError, match="input_norm is not there for table: collect it with InputNorms"):
        scorer.check(Sources(input_norms=InputNorms(nn.Linear(4, 4))))


RANDOM = """
import torch
from sparse_lightning import BlockSpec, ScopeSpec
from sparse_lightning.criteria import Random
from sparse_lightning.flow import Scorer
torch.manual_seed({seed})
spec = BlockSpec(torch.randn(4, 4), (2, 2))
scorer = Scorer(Random(), seed=11)
scorer.attach("fc", ScopeSpec(spec))
print([scorer.score()[spec].flatten().tolist() for _ in range(2)])
"""


def test_random_scores_are_the_same_on_all_ranks_and_differ_from_run_to_run():
    said = [
        subprocess.run(
            [sys.executable, "-c", RANDOM.format(seed=seed)], capture_output=True, text=True, check=True
        ).stdout
        for seed in (1, 2)
    ]
    assert said[0] == said[1]
    first, second = eval(said[0])
    assert first != second
    assert all(0 <= x < 1 for x in first + second)


def test_random_scores_go_on_after_a_resume():
    _, spec = tiles()
    whole, part, resumed = (Scorer(Random(), seed=5) for _ in range(3))
    for scorer in (whole, part, resumed):
        scorer.attach("fc", ScopeSpec(spec))
    whole.score()
    part.score()
    resumed.load_state_dict(part.state_dict())
    assert torch.equal(resumed.score()[spec], whole.score()[spec])


@pytest.mark.parametrize("make", [lambda: Magnitude(p=3), lambda: Fisher(decay=1.0), lambda: EMA(Taylor(), decay=-0.1)])
def test_arguments_out_of_range_are_refused(make):
    with pytest.raises(FlowError, match=r"p = 1, 2 and inf|at least 0 and less than 1"):
        make()
