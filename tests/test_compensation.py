"""Compensation: kept weights against plain least squares, SparseGPT and brute force; the criterion OBS."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sparse_lightning import (
    NM,
    OBS,
    Blocks,
    BlockSpec,
    FlowError,
    Magnitude,
    Neurons,
    PatternError,
    Refit,
    ScopeSpec,
    Scorer,
    SparseLightningError,
    SparsityError,
    Wanda,
    prune,
)
from sparse_lightning.compensation import GramMatrices
from sparse_lightning.compensation.least_squares import refit_groups, refit_rows
from sparse_lightning.compensation.removal import alone, one_by_one, removal_errors
from sparse_lightning.flow import Sources


def inputs_of(features: int, rows: int = 200, seed: int = 0, rank: int | None = None) -> torch.Tensor:
    """Return inputs that depend on each other, as activations do."""
    generator = torch.Generator().manual_seed(seed)
    rank = rank or features
    mixed = torch.randn(rows, rank, generator=generator) @ torch.randn(rank, features, generator=generator)
    return (mixed + 0.3 * torch.randn(rows, features, generator=generator)).double()


def least_squares(x, rows, pruned):
    """Return the plain solution, row by row: the kept weights that give the outputs of all."""
    fitted = torch.zeros_like(rows)
    for i, row in enumerate(rows):
        kept = ~pruned[i]
        if kept.any():
            fitted[i, kept] = torch.linalg.lstsq(x[:, kept], x @ row).solution
    return fitted


def error(x, one, other) -> float:
    """Return the squared difference of the outputs of two matrices."""
    return float((x @ (one - other).T).square().sum())


# Least squares


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 99))
def test_each_solver_gives_the_plain_least_squares_solution(outputs, features, seed):
    x, generator = inputs_of(features, seed=seed), torch.Generator().manual_seed(seed)
    rows = torch.randn(outputs, features, generator=generator).double()
    pruned = torch.rand(outputs, features, generator=generator) < 0.5
    wanted = least_squares(x, rows, pruned)
    for solve in (refit_groups, refit_rows):
        found = solve(rows, pruned, x.T @ x, "fc.weight")
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)
        assert (found[pruned] == 0).all()
        assert torch.equal(found[~pruned.any(1)], rows[~pruned.any(1)]), "a dense row changes"


@given(st.integers(0, 99), st.floats(0, 0.1))
def test_damping_gives_the_solution_that_stays_near_the_weights(seed, damp):
    """It is least squares with one more input for each weight, which asks it to stay as it is."""
    x, rows = inputs_of(6, seed=seed), torch.randn(3, 6, generator=torch.Generator().manual_seed(seed)).double()
    pruned = torch.tensor([True, False, False, True, False, False]).expand(3, 6)
    gram = x.T @ x
    pulled = (damp * gram.diagonal().mean()).sqrt() * torch.eye(6).double()
    wanted = least_squares(torch.cat([x, pulled]), rows, pruned)
    torch.testing.assert_close(Refit(damp).fit(rows, pruned, gram, "fc"), wanted, rtol=1e-6, atol=1e-8)


def sparse_gpt(weight, gram, n=2, m=4, damp=0.01):
    """Return a matrix pruned by SparseGPT, as its authors describe it: column by column, masks chosen on the way."""
    weight, gram = weight.clone(), gram + damp * gram.diagonal().mean() * torch.eye(len(gram)).double()
    upper = torch.linalg.cholesky(torch.linalg.inv(gram), upper=True)
    for j in range(weight.shape[1]):
        if j % m == 0:
            scores = (weight[:, j : j + m] / upper.diagonal()[j : j + m]).square()
            pruned = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.argsort(1)[:, : m - n], True)
        lost = torch.where(pruned[:, j % m], weight[:, j], 0.0) / upper[j, j]
        weight[:, j:] -= lost[:, None] * upper[j, j:]
        weight[pruned[:, j % m], j] = 0.0
    return weight


@pytest.mark.parametrize("criterion", [Magnitude(), Wanda(), OBS()], ids=lambda c: type(c).__name__)
@pytest.mark.parametrize(
    ("features", "rank"), [(64, 64), (128, 16), pytest.param(256, 64, marks=pytest.mark.exhaustive)]
)
def test_n_of_m_with_refit_is_as_good_as_sparse_gpt(criterion, features, rank):
    x = inputs_of(features, 1000, rank=rank)
    layer = nn.Sequential(nn.Linear(features, 48, bias=False).double())
    dense = layer[0].weight.detach().clone()
    prune(layer, [NM("0.weight")], 0.5, [x], criterion, Refit(), progress=False)
    pruned = layer[0].weight.detach()
    assert ((pruned == 0).view(48, -1, 4).sum(-1) == 2).all()
    assert error(x, pruned, dense) <= 1.05 * error(x, sparse_gpt(dense, x.T @ x), dense)


# Whole models


def mlp(hidden=24, dtype=torch.float64):
    """Return a random network."""
    return nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 5)).to(dtype)


def with_ones(x):
    """Add the constant that a bias reads."""
    return torch.cat([x, x.new_ones(len(x), 1)], 1)


def test_units_are_refitted_as_by_plain_least_squares_with_the_bias():
    model, x = mlp(), torch.randn(300, 8).double()
    hidden = model[:2](x).detach()
    rows = torch.cat([model[2].weight, model[2].bias[:, None]], 1).detach()
    kept_rows = model[0].weight.detach().clone()
    mask = prune(model, [Neurons("0", "2")], 0.5, [x[:100], x[100:]], "wanda", Refit(damp=0), progress=False)
    pruned = mask["0 (neurons)"].flatten()
    assert int(pruned.sum()) == 12
    wanted = least_squares(with_ones(hidden), rows, torch.cat([pruned, pruned.new_zeros(1)]).expand(5, -1))
    torch.testing.assert_close(model[2].weight, wanted[:, :-1], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(model[2].bias, wanted[:, -1], rtol=1e-6, atol=1e-8)
    assert (model[2].weight[:, pruned] == 0).all()
    assert (model[0].weight[pruned] == 0).all()
    assert (model[0].bias[pruned] == 0).all()
    assert torch.equal(model[0].weight[~pruned], kept_rows[~pruned]), "what computes a unit is not changed"


class Conv1D(nn.Module):
    """A layer with its inputs first, as in GPT-2."""

    def __init__(self, features, outputs):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(features, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


LAYERS = {
    "linear": (lambda: nn.Linear(8, 12), torch.randn(64, 8), (4, 2)),
    "without a bias": (lambda: nn.Linear(8, 12, bias=False), torch.randn(9, 7, 8), (4, 2)),
    "inputs first": (lambda: Conv1D(8, 12), torch.randn(64, 8), (2, 4)),
    "convolution": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), torch.randn(5, 4, 7, 8), (3, 2, 1, 3)),
    "channels last": (
        lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last),
        torch.randn(5, 4, 7, 8),
        (3, 2, 3, 3),
    ),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_tiles_are_refitted_as_by_plain_least_squares_on_the_outputs(kind):
    """At the least-squares solution, no kept weight and no bias has a gradient of the squared output error."""
    make, x, block = LAYERS[kind]
    model, x = nn.Sequential(make()).double(), x.double()
    layer = model[0]
    dense = copy.deepcopy(model)
    prune(model, [Blocks("0.weight", block)], 0.5, [x], Magnitude(), Refit(damp=0), progress=False)
    assert 0.4 < float((layer.weight == 0).double().mean()) < 0.6
    wanted = dense(x).detach()
    kept = layer.weight.detach() != 0
    assert error_of(model, x, wanted) < error_of(_masked(dense, kept), x, wanted)
    params = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    found = torch.func.functional_call(layer, dict(zip(dict(layer.named_parameters()), params, strict=True)), x)
    gradients = torch.autograd.grad((found - wanted).square().sum(), params)
    scale = float(wanted.square().sum())
    assert float(gradients[0][kept].abs().max()) < 1e-6 * scale, "a kept weight could lower the error"
    assert len(params) == 1 or float(gradients[1].abs().max()) < 1e-6 * scale, "the bias could lower the error"


def _masked(model, kept):
    plain = copy.deepcopy(model)
    plain[0].weight.data[~kept] = 0.0
    return plain


def error_of(model, x, wanted) -> float:
    """Return the squared output error of a model."""
    with torch.no_grad():
        return float((model(x) - wanted).square().sum())


def test_gram_matrices_are_summed_in_fp32_with_half_precision_and_autocast():
    x = torch.randn(512, 8) + 30  # a sum in bf16 stops to grow
    model = mlp(dtype=torch.bfloat16)
    plain = nn.Linear(8, 4)
    for net, weight in ((model, model[0].weight), (plain, plain.weight)):
        grams = GramMatrices(net, [("weight", weight)])
        with torch.autocast("cpu", torch.bfloat16, enabled=net is plain):
            net(x.to(weight.dtype))
        wide = with_ones(x.to(weight.dtype).double())
        assert grams[weight].dtype == torch.float32
        torch.testing.assert_close(grams[weight].double(), wide.T @ wide, rtol=1e-5, atol=1e-2)
        grams.close()
    before, wanted = copy.deepcopy(model), model(x.bfloat16())
    prune(model, [Neurons("0", "2")], 0.5, [x.bfloat16()], compensation=Refit(), progress=False)
    prune(before, [Neurons("0", "2")], 0.5, [x.bfloat16()], progress=False)
    assert error_of(model, x.bfloat16(), wanted) < 0.5 * error_of(before, x.bfloat16(), wanted)


def test_a_singular_gram_matrix_is_an_error_that_names_the_layer_and_damping_solves_it():
    model, x = mlp(), torch.randn(9, 8).double()  # fewer samples than neurons
    wanted = model(x).detach()
    with pytest.raises(SparseLightningError, match=r"inputs of 2\.weight cannot be factored.*damp=0\.01"):
        prune(copy.deepcopy(model), [Neurons("0", "2")], 0.5, [x], Magnitude(), Refit(damp=0), progress=False)
    fitted = copy.deepcopy(model)
    prune(fitted, [Neurons("0", "2")], 0.5, [x], Magnitude(), Refit(damp=0.01), progress=False)
    prune(model, [Neurons("0", "2")], 0.5, [x], Magnitude(), progress=False)
    assert error_of(fitted, x, wanted) < error_of(model, x, wanted)


def test_what_cannot_be_compensated_is_refused():
    with pytest.raises(SparsityError, match=r"damp=-1 is out of range"):
        Refit(damp=-1)
    table = nn.Sequential(nn.Embedding(8, 4))
    tiles = [Blocks("0.weight", (2, 2))]
    with pytest.raises(PatternError, match=r"0\.weight of shape \(8, 4\) is not the weight of a linear layer"):
        prune(table, tiles, 0.5, [torch.zeros(3, dtype=torch.long)], Magnitude(), Refit(), progress=False)
    rows = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(PatternError, match=r"Refit\(damp=0\.01\) has no layer to change"):
        prune(rows, [Blocks("0.weight", (1, -1))], 0.5, [torch.zeros(1, 4)], Magnitude(), Refit(), progress=False)
    with pytest.raises(FlowError, match=r"has no removal errors: no linear layer reads its blocks"):
        prune(rows, [Blocks("0.weight", (1, -1))], 0.5, [torch.zeros(1, 4)], OBS(), progress=False)
    with pytest.raises(SparsityError, match=r"compensation='refit' is not a compensation: pass Refit"):
        prune(rows, [Blocks("0.weight", (2, 2))], 0.5, [torch.zeros(1, 4)], Magnitude(), "refit", progress=False)
    unused = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    with pytest.raises(SparseLightningError, match=r"b\.weight has had no inputs"):
        prune(unused, [Blocks("b.weight", (2, 2))], 0.5, [torch.zeros(1, 4)], Magnitude(), Refit(),
              step=lambda model, batch: model["a"](batch), progress=False)  # fmt: skip


# OBS


def removal(x, rows, removed):
    """Return the squared output error of removing columns and refitting the rest."""
    pruned = torch.zeros(rows.shape[1], dtype=torch.bool)
    pruned[list(removed)] = True
    return error(x, least_squares(x, rows, pruned.expand(len(rows), -1)), rows)


@given(st.integers(1, 3), st.integers(2, 4), st.integers(0, 99))
def test_removal_errors_are_those_of_removing_and_refitting(size, units, seed):
    features = size * units + 1  # the last one is in no block
    x, rows = inputs_of(features, seed=seed), torch.randn(4, features, generator=torch.Generator().manual_seed(seed))
    rows, columns = rows.double(), torch.arange(size * units).view(units, size)
    inverse = torch.linalg.inv(x.T @ x)
    wanted = [removal(x, rows, own.tolist()) for own in columns]
    torch.testing.assert_close(alone(rows, inverse, columns), torch.tensor(wanted).double(), rtol=1e-6, atol=1e-9)
    left, gone, errors = set(range(units)), [], [0.0] * units
    while left:
        costs = {u: removal(x, rows, [c for v in (*gone, u) for c in columns[v].tolist()]) for u in left}
        best = min(costs, key=costs.get)
        errors[best] = costs[best]
        gone.append(best)
        left.remove(best)
    torch.testing.assert_close(one_by_one(rows, inverse, columns), torch.tensor(errors).double(), rtol=1e-5, atol=1e-9)


def test_blocks_of_different_sizes_have_their_own_columns():
    x, rows = inputs_of(5), torch.randn(4, 5).double()
    found = alone(rows, torch.linalg.inv(x.T @ x), torch.tensor([[0, 1], [2, 3], [4, -1]]))
    wanted = [removal(x, rows, own) for own in ([0, 1], [2, 3], [4])]
    torch.testing.assert_close(found, torch.tensor(wanted).double(), rtol=1e-6, atol=1e-9)


def test_obs_prunes_the_units_that_brute_force_would_where_they_are_independent():
    torch.manual_seed(3)
    x, model = torch.randn(400, 8).double(), mlp(hidden=6)
    hidden = with_ones(model[:2](x).detach())
    rows = torch.cat([model[2].weight, model[2].bias[:, None]], 1).detach()
    first = min(range(6), key=lambda u: removal(hidden, rows, [u]))
    masks = prune(model, [Neurons("0", "2")], 1 / 6, [x], OBS(), Refit(damp=0), progress=False)
    assert masks["0 (neurons)"].flatten().nonzero().flatten().tolist() == [first]


def test_tiles_are_scored_row_by_row_of_tiles():
    x, layer = inputs_of(6), nn.Sequential(nn.Linear(6, 4, bias=False).double())
    weight = layer[0].weight
    spec = BlockSpec(weight, (2, 2))
    grams = GramMatrices(layer, [("0.weight", weight)])
    layer(x)
    found = removal_errors(spec, grams, damp=0)
    for r, rows in enumerate(weight.detach().view(2, 2, 6)):
        inverse, columns = torch.linalg.inv(x.T @ x), torch.arange(6).view(3, 2)
        torch.testing.assert_close(found[r], one_by_one(rows, inverse, columns), rtol=1e-6, atol=1e-9)
    grams.close()
    scorer = Scorer(OBS())
    scorer.attach("0.weight", ScopeSpec(spec))
    with pytest.raises(FlowError, match=r"removal_error of 0\.weight is missing"):
        scorer.check(Sources())
