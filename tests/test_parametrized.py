"""Weights that are computed from other parameters: found by their plain names, or refused with the name to use."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from sparse_lightning import Blocks, Coupled, Neurons, PatternError, Shrink, Sparsifier, compact
from sparse_lightning.patterns import resolve


def two(wrap):
    torch.manual_seed(0)
    return nn.Sequential(wrap(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 8))


def test_spectral_norm_is_found_by_the_plain_name_and_stays_zero():
    model = two(parametrizations.spectral_norm)
    ours = Sparsifier(Blocks("*.weight", (4, 4)), 0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ours.attach(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().sum().backward()
        ours.before_step()
        optimizer.step()
    assert list(ours.masks) == ["0.weight", "2.weight"]
    zeros = (model[0].weight == 0).unflatten(0, (2, 4)).unflatten(2, (2, 4)).all(3).all(1)
    assert torch.equal(zeros, ours.masks["0.weight"])
    assert [each.name for each in resolve([Neurons("0", "2")], model)] == ["0 (neurons)"]


class Square(nn.Module):
    def forward(self, x):
        return x.square()


def with_square(layer):
    parametrize.register_parametrization(layer, "weight", Square())
    return layer


def pruned(layer):
    prune.l1_unstructured(layer, "weight", amount=0.5)
    return layer


COMPUTED = {
    "weight_norm": (parametrizations.weight_norm, "0.parametrizations.weight.original1"),
    "unknown": (with_square, "0.parametrizations.weight.original"),
    "old weight_norm": (nn.utils.weight_norm, "0.weight_v"),
    "old spectral_norm": (nn.utils.spectral_norm, "0.weight_orig"),
    "prune": (pruned, "0.weight_orig"),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("kind", COMPUTED)
@pytest.mark.parametrize("pattern", [Blocks("*.weight", (4, 4)), Neurons("0", "2")], ids=lambda p: p.label)
def test_other_computed_weights_are_refused_with_the_name_to_use(kind, pattern):
    wrap, name = COMPUTED[kind]
    model = two(wrap)
    text = rf"matches 0\.weight, which .* computes from .*Call .* before training; or name {name} if"
    with pytest.raises(PatternError, match=text):
        resolve([pattern], model)
    assert len(resolve([Blocks([name, "2.weight"], (4, 4))], model)) == 2


def test_modules_that_peft_trains_as_a_whole_have_their_plain_names():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(two(nn.Identity()), peft.LoraConfig(target_modules=["0"], modules_to_save=["2"]))
    found = {each.name: each.scope.unique_params()[0] for each in resolve([Blocks("*.weight", (4, 4))], model)}
    assert list(found) == ["0.weight", "2.weight"]
    assert found["2.weight"].requires_grad, "the copy that is trained, not the frozen original"
    [[original]] = [each.scope.unique_params() for each in resolve([Blocks("2.original_module.weight", (4, 4))], model)]
    assert not original.requires_grad


INPUTS = (torch.randn(5, 8, generator=torch.Generator().manual_seed(0)),)


def beside(wrap, at):
    """A perceptron of which one layer is wrapped."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 12), nn.Linear(12, 6), nn.Linear(6, 3)]
    layers[at] = wrap(layers[at])
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


def trained(model, shrink):
    """Train some steps with units that are pruned; return the number of weights at the end of each."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ours, sizes = Sparsifier(Coupled(inputs=INPUTS), 0.5, update_every=1, shrink=shrink), []
    ours.attach(model, optimizer, total_steps=6)
    for _ in range(6):
        optimizer.zero_grad()
        model(*INPUTS).square().sum().backward()
        ours.before_step()
        optimizer.step()
        sizes.append(sum(p.numel() for p in model.parameters()))
    ours.detach()
    return sizes


WRAPPED = {
    "spectral_norm": (parametrizations.spectral_norm, 1),
    "orthogonal": (parametrizations.orthogonal, 0),
    "unknown": (with_square, 1),
    "old spectral_norm": (nn.utils.spectral_norm, 1),
    "prune": (pruned, 0),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_units_beside_a_computed_weight_are_removed_while_it_trains(kind):
    """What is traced are the operations that compute it, with its originals."""
    plain, small = beside(*WRAPPED[kind]), beside(*WRAPPED[kind])
    whole, sizes = trained(plain, None), trained(small, Shrink(at_least=0.0))
    assert sizes[-1] < whole[-1], "nothing was removed"
    for (name, one), other in zip(plain.named_parameters(), small.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5), name


def test_coupled_has_the_plain_names_of_spectral_norm():
    model = beside(parametrizations.spectral_norm, 1)
    [found] = resolve([Coupled("2.weight", inputs=INPUTS)], model)
    assert [spec.name for spec in found.scope.blocks()[0].blocks()] == ["0.weight", "0.bias", "2.weight"]


def test_a_model_with_an_orthogonal_layer_is_compacted():
    model = beside(parametrizations.orthogonal, 0)
    trained(model, None)
    small = compact(model, INPUTS)
    assert torch.allclose(small(*INPUTS), model(*INPUTS), atol=1e-5)
    assert (len(small[0].bias), len(model[0].bias)) == (6, 12)
