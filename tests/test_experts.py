"""Experts: whole experts of a mixture with their part of the router, listed and stacked."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

from sparse_lightning import (
    Constant,
    Coupled,
    Experts,
    Magnitude,
    NothingToRemoveWarning,
    PatternError,
    Random,
    Sparsifier,
    Taylor,
    compact,
    couplings,
    prune,
)
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


SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 64}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2}


def mixtral():
    """Return a small model of transformers, whose experts are stacked."""
    return MixtralForCausalLM(MixtralConfig(**SIZES, **HEADS, num_local_experts=4))


def qwen():
    """Return one with an expert that all tokens share."""
    inner = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 20, "num_experts": 4}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**SIZES, **HEADS, **inner))


class Stacked(nn.Module):
    """The weights of all experts."""

    def __init__(self, experts=4, width=8, hidden=12):
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / 3)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / 3)

    def forward(self, x):
        return torch.einsum("beh,ehd->bed", torch.einsum("bd,edh->beh", x, self.up).relu(), self.down)


class Gated(nn.Module):
    """Every expert has a gate of its own: one with zero weights contributes nothing, whatever its gate is."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4), Stacked()

    def forward(self, x):
        return (self.experts(x) * self.router(x).sigmoid().unsqueeze(-1)).sum(1)


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
    assert [each.scope.numblk_per_scope() for each in found] == [4]
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


@pytest.mark.parametrize("criterion", [Magnitude(), Taylor(), Random()], ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("traced", [False, True])
def test_pruned_experts_with_gates_of_their_own_are_removed_by_compact(criterion, traced):
    """By names and by the graph alike: both find the expert with its row of the router."""
    model, x = Gated().double(), torch.randn(16, 8).double()
    pattern = Coupled("* (experts)", inputs=(x,)) if traced else Experts("experts", router="router")
    [found] = resolve([pattern], model)
    assert {spec.name for spec in found.scope.blocks()[0].blocks()} == set(dict(model.named_parameters()))
    masks = prune(model, [pattern], 0.5, [x], criterion, step=lambda net, batch: net(batch).square().mean(),
                  progress=False)  # fmt: skip
    [kept] = [(~mask).flatten().nonzero().flatten() for mask in masks.values()]
    small = compact(model, (x,))
    assert torch.equal(small.experts.up, model.experts.up[kept])
    assert torch.equal(small.router.weight, model.router.weight[kept])
    torch.testing.assert_close(small(x), model(x), rtol=1e-12, atol=1e-12)


def test_experts_in_a_list_are_compacted_to_what_their_router_still_needs():
    """A softmax over all experts, and a choice by number, need all of them: their neurons are removed."""
    model, x = Layers().double(), torch.randn(16, 8).double()
    masks = prune(model, [PATTERN], 0.5, (), Magnitude(), progress=False)
    with pytest.warns(UserWarning, match=r"^zero experts or classes, 2 of 4 in layers\.0\.gate, 2 of 4 in layers\.1"):
        small = compact(model, (x,))
    for name, mask in masks.items():
        expert = small.get_submodule(name.replace(" (experts)/", "."))
        assert expert[0].out_features == (1 if mask.all() else 12)
    torch.testing.assert_close(small(x), model(x), rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:the config of Qwen2MoeForCausalLM cannot hold the sizes")
@pytest.mark.parametrize("make", [mixtral, pytest.param(qwen, marks=pytest.mark.exhaustive)])
def test_neurons_of_stacked_experts_are_found_by_the_graph_and_removed(make):
    model = make().eval()
    tokens = {"input_ids": torch.randint(64, (2, 9))}
    found = couplings(model, tokens)
    reasons = [str(refusal.reason) for refusal in found.refusals]
    assert any("tokens choose their experts by number" in reason for reason in reasons), "whole experts"
    neurons = model.model.layers[0].mlp.experts.down_proj.shape[2]
    [mask] = prune(model, [Coupled("*.experts (units)", inputs=tokens)], 0.5, (), Magnitude(), progress=False).values()
    assert mask.numel() == neurons
    small = compact(model, tokens)
    assert small.model.layers[0].mlp.experts.down_proj.shape[2] == neurons // 2
    torch.testing.assert_close(small(**tokens).logits, model(**tokens).logits, rtol=1e-5, atol=1e-6)


def test_whole_experts_behind_a_softmax_stay_and_compact_tells_why():
    """No removal is exact: the masked model gives a pruned expert, whose logit is zero, a share, and chooses it."""
    model, tokens = mixtral().eval(), {"input_ids": torch.randint(64, (2, 9))}
    prune(model, [Experts("*.experts", router="*.gate")], 0.5, (), Magnitude(), progress=False)
    said = r"has nothing to remove: zero experts or classes, 2 of 4 in .*mlp\.gate.* stay .*outputs would change"
    with pytest.warns(NothingToRemoveWarning, match=said) as found:
        small = compact(model, tokens)
    assert len(found) == 1, "one sentence, not one for each reason"
    assert small.model.layers[0].mlp.gate.weight.shape == (4, 16)
    with torch.no_grad():
        chosen = model.model.layers[0].mlp.gate(torch.randn(200, 16))
    zero = (model.model.layers[0].mlp.gate.weight == 0).all(1).nonzero().flatten()
    assert torch.isin(chosen[-1], zero).any(), "tokens choose pruned experts"


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
