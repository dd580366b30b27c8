"""Experts: whole experts of a mixture with their part of the router, listed and stacked."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from sparse_lightning import Constant, Experts, Magnitude, PatternError, Sparsifier, Taylor, prune
from sparse_lightning.patterns import resolve


class Mixture(nn.Module):
    """Experts in a list, mixed by the router's probabilities of the best two."""

    def __init__(self, experts=4, width=8):
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 12), nn.ReLU(), nn.Linear(12, width)) for _ in range(experts)
        )

    def forward(self, x):
        best = self.gate(x).softmax(-1).topk(2)
        outputs = torch.stack([expert(x) for expert in self.experts], -2)
        chosen = outputs.gather(-2, best.indices[..., None].expand(*best.indices.shape, x.shape[-1]))
        return (best.values[..., None] * chosen).sum(-2)


class Layers(nn.Module):
    """Two mixtures."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Mixture(), Mixture()])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


PATTERN = Experts("layers.*.experts", router="layers.*.gate")


def mixtral():
    """Return a small model of transformers, whose experts are stacked."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads))


def test_a_listed_expert_is_pruned_with_its_route_and_stays_so_in_training():
    model = Layers()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    sparsifier = Sparsifier([PATTERN], Constant(0.5), Taylor(), update_every=2)
    sparsifier.attach(model, optimizer)
    for _ in range(5):
        model(torch.randn(16, 8)).square().mean().backward()
        sparsifier.before_step()
        optimizer.step()
        optimizer.zero_grad()
    for i, layer in enumerate(model.layers):
        pruned = [bool(sparsifier.masks[f"layers.{i}.experts (experts)/{e}"].all()) for e in range(4)]
        assert sum(pruned) == 2
        for e, expert in enumerate(layer.experts):
            zero = [not p.any() for p in expert.parameters()]
            assert all(zero) if pruned[e] else not any(zero)
            assert bool((layer.gate.weight[e] == 0).all()) is pruned[e]
            assert bool(layer.gate.bias[e] == 0) is pruned[e]
            assert pruned[e] is not bool(expert(torch.randn(3, 8)).any()), "a pruned expert computes zero"


def test_stacked_experts_of_transformers_are_one_scope_for_each_layer():
    model = mixtral()
    found = resolve([Experts("*.experts", router="*.gate")], model)
    assert [each.scope.numblk_per_scope() for each in found] == [4, 4]
    tokens = torch.randint(64, (2, 9))
    masks = prune(model, [Experts("*.experts", router="*.gate")], 0.25, [{"input_ids": tokens}], Magnitude(),
                  progress=False)  # fmt: skip
    for name, mask in masks.items():
        [pruned] = mask.flatten().nonzero().flatten().tolist()
        layer = model.get_submodule(name.removesuffix(" (experts)").removesuffix(".experts"))
        sizes = [int((p != 0).flatten(1).any(1).sum()) for p in layer.experts.parameters()]
        assert sizes == [3] * len(sizes)
        assert not layer.gate.weight[pruned].any()
    assert torch.isfinite(model(tokens).logits).all()


def test_what_does_not_fit_raises_an_error_with_the_names():
    with pytest.raises(PatternError, match=r"'expert' matches no module: did you mean 'experts'"):
        resolve([Experts("expert", router="gate")], Mixture())
    wrong = Mixture()
    wrong.gate = nn.Linear(8, 3)
    with pytest.raises(PatternError, match=r"experts has 4 experts, but gate\.weight of shape \(3, 8\) routes to 3"):
        resolve([Experts("experts", router="gate")], wrong)
    with pytest.raises(PatternError, match=r"not stacks of the 4 experts of gate\.weight"):
        resolve([Experts("experts.0", router="gate")], Mixture())
    with pytest.raises(PatternError, match=r"has no partner in router"):
        resolve([Experts("layers.*.experts", router="layers.1.gate")], Layers())
