"""Coupled patterns: what is masked could as well be removed; removing it by hand gives the same output.

What is removed by hand is removed from a copy of the model before it was masked, so that a kept unit which lost
weights is noticed too.
"""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law_examples import EXAMPLES
from torch import nn
from torch.nn import functional as F

from sparse_lightning.errors import PatternError
from sparse_lightning.patterns import Filters, Heads, Neurons, resolve
from sparse_lightning.patterns.names import Names

few = settings(max_examples=min(30, EXAMPLES // 3))
SIZES = st.integers(1, 5)


def only(pattern, model):
    [attachment] = resolve([pattern], model)
    return attachment


def prune(attachment):
    """Mask units at random through the scope; return the indices of those that are kept."""
    [block] = attachment.scope.blocks()
    mask = torch.rand(block.grid_shape) < 0.5
    block.apply_mask(mask)
    return (~mask).flatten().nonzero().flatten()


def prune_all(attachment):
    [block] = attachment.scope.blocks()
    block.apply_mask(torch.ones(block.grid_shape, dtype=torch.bool))


def rows_of(indices, size):
    """Row indices of units that have `size` neighbouring rows each."""
    return (indices[:, None] * size + torch.arange(size)).flatten()


def pick(tensor, dim, indices):
    return None if tensor is None else tensor.detach().index_select(dim, indices)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


class Conv1D(nn.Module):
    """Hugging Face's linear layer: the weight is (inputs, outputs)."""

    def __init__(self, inputs, outputs, bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs)) if bias else None

    def forward(self, x):
        return x @ self.weight + (0 if self.bias is None else self.bias)


def linear(inputs, outputs, bias, transposed):
    return Conv1D(inputs, outputs, bias) if transposed else nn.Linear(inputs, outputs, bias)


def upright(layer):
    """The weight as (outputs, inputs)."""
    return layer.weight.T if isinstance(layer, Conv1D) else layer.weight


class MLP(nn.Module):
    def __init__(self, width, hidden, bias=True, transposed=False, gated=False, fused=False):
        super().__init__()
        self.up = linear(width, hidden * (2 if fused else 1), bias, transposed)
        self.gate = linear(width, hidden, bias, transposed) if gated else None
        self.down = linear(hidden, width, bias, transposed)

    def forward(self, x):
        if self.gate is not None:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        up = self.up(x)
        if up.shape[-1] != upright(self.down).shape[1]:
            gate, up = up.chunk(2, -1)
            return self.down(F.silu(gate) * up)
        return self.down(F.gelu(up + 0.5) - F.gelu(torch.tensor(0.5)))


@few
@given(SIZES, st.integers(1, 9), st.booleans(), st.booleans())
def test_neurons(width, hidden, bias, transposed):
    model = nn.ModuleDict({"mlp": MLP(width, hidden, bias, transposed)})
    attachment = only(Neurons("*.up", "*.down"), model)
    assert attachment.name == "mlp (neurons)"
    assert attachment.scope.numblk_per_scope() == hidden
    mlp, x = deepcopy(model["mlp"]), torch.randn(3, width)
    kept = prune(attachment)
    inner = F.linear(x, pick(upright(mlp.up), 0, kept), pick(mlp.up.bias, 0, kept))
    removed = F.linear(F.gelu(inner + 0.5) - F.gelu(torch.tensor(0.5)), pick(upright(mlp.down), 1, kept), mlp.down.bias)
    close(model["mlp"](x), removed)


@few
@given(SIZES, st.integers(1, 9), st.booleans(), st.booleans())
def test_gated_neurons(width, hidden, bias, transposed):
    model, x = MLP(width, hidden, bias, transposed, gated=True), torch.randn(3, width)
    mlp = deepcopy(model)
    kept = prune(only(Neurons(up="up", gate="gate", down="down"), model))
    up, gate = (F.linear(x, pick(upright(m), 0, kept), pick(m.bias, 0, kept)) for m in (mlp.up, mlp.gate))
    close(model(x), F.linear(F.silu(gate) * up, pick(upright(mlp.down), 1, kept), mlp.down.bias))


@few
@given(SIZES, st.integers(1, 9), st.booleans())
def test_neurons_with_gate_and_up_in_one_layer(width, hidden, transposed):
    model, x = MLP(width, hidden, transposed=transposed, fused=True), torch.randn(3, width)
    attachment, mlp = only(Neurons("up", "down"), model), deepcopy(model)
    assert attachment.scope.numblk_per_scope() == hidden
    kept = prune(attachment)
    both = torch.cat([kept, kept + hidden])
    gate, up = F.linear(x, pick(upright(mlp.up), 0, both), pick(mlp.up.bias, 0, both)).chunk(2, -1)
    close(model(x), F.linear(F.silu(gate) * up, pick(upright(mlp.down), 1, kept), mlp.down.bias))


def test_neurons_of_convolutions_and_names_of_weights():
    model = nn.Sequential(nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 4, 3, padding=1))
    model.to(memory_format=torch.channels_last)
    (up, _, down), x = deepcopy(model), torch.randn(2, 3, 5, 5)
    kept = prune(only(Neurons("0.weight", "2.weight"), model))
    inner = F.relu(F.conv2d(x, pick(up.weight, 0, kept), pick(up.bias, 0, kept)))
    close(model(x), F.conv2d(inner, pick(down.weight, 1, kept), down.bias, padding=1))


def test_all_neurons_pruned_leave_only_the_bias_behind():
    mlp = MLP(3, 7, gated=True)
    before = mlp.down.bias.clone()
    prune_all(only(Neurons(up="up", gate="gate", down="down"), mlp))
    for name, parameter in mlp.named_parameters():
        assert name == "down.bias" or not parameter.any(), f"{name} has weights of pruned neurons"
    assert torch.equal(mlp.down.bias, before)


def attend(q, k, v, size):
    """Softmax attention of `(batch, length, heads · size)`; each key head serves a group of query heads."""
    q, k, v = (t.unflatten(-1, (t.shape[-1] // size, size)).transpose(1, 2) for t in (q, k, v))
    groups = q.shape[1] // max(1, k.shape[1])
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    return ((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Self-attention with separate or fused projections, with as many key heads or fewer."""

    def __init__(self, width, size, kv_heads, groups, bias=True, fused=False, transposed=False):
        super().__init__()
        self.head_dim, self.kv_heads, self.groups = size, kv_heads, groups
        queries, keys = size * kv_heads * groups, size * kv_heads
        if fused:
            self.qkv = linear(width, queries + 2 * keys, bias, transposed)
        else:
            self.q_proj, self.k_proj, self.v_proj = (linear(width, n, bias, transposed) for n in (queries, keys, keys))
        self.proj = linear(queries, width, bias, transposed)

    def weights(self):
        """The weight and bias of q, k and v, upright."""
        if not hasattr(self, "qkv"):
            return [(upright(layer), layer.bias) for layer in (self.q_proj, self.k_proj, self.v_proj)]
        sizes = [self.head_dim * self.kv_heads * n for n in (self.groups, 1, 1)]
        biases = [None] * 3 if self.qkv.bias is None else self.qkv.bias.split(sizes)
        return list(zip(upright(self.qkv).split(sizes), biases, strict=True))

    def forward(self, x):
        q, k, v = (F.linear(x, weight, bias) for weight, bias in self.weights())
        return self.proj(attend(q, k, v, self.head_dim))

    def without(self, kept, x):
        """The output with only the heads that are kept, the others removed by hand."""
        queries, keys = rows_of(kept, self.head_dim * self.groups), rows_of(kept, self.head_dim)
        chosen = zip(self.weights(), (queries, keys, keys), strict=True)
        q, k, v = (F.linear(x, pick(weight, 0, rows), pick(bias, 0, rows)) for (weight, bias), rows in chosen)
        return F.linear(attend(q, k, v, self.head_dim), pick(upright(self.proj), 1, queries), self.proj.bias)


NAMED = {
    False: Heads(q="*.q_proj", k="*.k_proj", v="*.v_proj", out="*.proj"),
    True: Heads(qkv="*.qkv", out="*.proj", order="qkv"),
}


@few
@given(SIZES, st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.tuples(*[st.booleans()] * 4))
def test_heads(width, size, kv_heads, groups, flags):
    """Separate and fused, grouped or not, with and without biases, transposed or not, named or found."""
    bias, fused, transposed, named = flags
    model = nn.ModuleDict({"attn": Attention(width, size, kv_heads, groups, bias, fused, transposed)})
    attachment = only(NAMED[fused] if named else Heads("attn", order="qkv"), model)
    assert attachment.name == "attn (heads)"
    assert attachment.scope.numblk_per_scope() == kv_heads, "one decision for each key-value head"
    before, x = deepcopy(model["attn"]), torch.randn(2, 4, width)
    kept = prune(attachment)
    close(model["attn"](x), before.without(kept, x))


@pytest.mark.parametrize("fused", [False, True])
def test_all_heads_pruned_leave_only_the_bias_behind(fused):
    attention = Attention(6, 2, 2, 3, fused=fused)
    before = attention.proj.bias.clone()
    prune_all(only(Heads("attn", order="qkv"), nn.ModuleDict({"attn": attention})))
    for name, parameter in attention.named_parameters():
        assert name == "proj.bias" or not parameter.any(), f"{name} has weights of pruned heads"
    assert torch.equal(attention.proj.bias, before)


@pytest.mark.parametrize("options", [{}, {"kdim": 5, "vdim": 3}, {"bias": False}, {"add_bias_kv": True}])
def test_heads_of_multihead_attention(options):
    size, heads, x = 3, 4, torch.randn(2, 5, 12)
    masked = nn.MultiheadAttention(12, heads, batch_first=True, **options)
    for parameter in masked.parameters():
        nn.init.normal_(parameter)
    attention = deepcopy(masked)
    key, value = torch.randn(2, 6, options.get("kdim", 12)), torch.randn(2, 6, options.get("vdim", 12))
    kept = prune(only(Heads("attn"), nn.ModuleDict({"attn": masked})))
    rows, out = rows_of(kept, size), attention.out_proj
    if options.get("kdim"):
        weights = [attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight]
    else:
        weights = attention.in_proj_weight.chunk(3)
    biases = [None] * 3 if attention.in_proj_bias is None else attention.in_proj_bias.chunk(3)
    q, k, v = (
        F.linear(t, pick(weight, 0, rows), pick(bias, 0, rows))
        for t, weight, bias in zip((x, key, value), weights, biases, strict=True)
    )
    if attention.bias_k is not None:
        k = torch.cat([k, pick(attention.bias_k, 2, rows).expand(2, -1, -1)], 1)
        v = torch.cat([v, pick(attention.bias_v, 2, rows).expand(2, -1, -1)], 1)
    expected = F.linear(attend(q / size**0.5, k, v, size), pick(out.weight, 1, rows), out.bias)
    close(masked(x, key, value, need_weights=False)[0], expected)
    prune_all(only(Heads("attn"), nn.ModuleDict({"attn": masked})))
    alive = [name for name, parameter in masked.named_parameters() if parameter.any()]
    assert set(alive) <= {"out_proj.bias"}


class Named(nn.Module):
    """An attention module whose projections have the names given, with other modules between."""

    def __init__(self, names, **attributes):
        super().__init__()
        for name, rows in names.items():
            *path, last = name.split(".")
            module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.add_module(last, nn.Linear(8, rows))
        for name, value in attributes.items():
            setattr(self, name, value)


@pytest.mark.parametrize(
    "children",
    [
        ["q_proj", "k_proj", "v_proj", "o_proj"],
        ["q_proj", "k_proj", "v_proj", "out_proj"],
        ["to_q", "to_k", "to_v", "to_out.0"],
        ["self.query", "self.key", "self.value", "output.dense"],
        ["q", "k", "v", "o"],
        ["qkv", "proj"],
        ["c_attn", "c_proj"],
        ["in_proj", "out_proj"],
    ],
)
def test_projections_are_found_by_their_common_names(children):
    sizes = [24, 8] if len(children) == 2 else [8] * 4
    model = nn.ModuleDict({"attn": Named(dict(zip(children, sizes, strict=True)), head_dim=2)})
    attachment = only(Heads("attn", order="qkv"), model)
    assert attachment.scope.numblk_per_scope() == 4
    assert attachment.scope.numel() == 4 * 8 * 8 + 3 * 8


@pytest.mark.parametrize("attribute", [{"num_heads": 4}, {"n_head": 4}, {"num_attention_heads": 4}], ids=str)
def test_the_size_of_a_head_follows_from_their_number(attribute):
    model = nn.ModuleDict({"attn": Named({"qkv": 24, "proj": 8}, **attribute)})
    assert only(Heads("attn", order="qkv"), model).scope.numblk_per_scope() == 4


def test_heads_of_unknown_size_raise():
    model = nn.ModuleDict({"attn": Named({"qkv": 24, "proj": 8})})
    with pytest.raises(PatternError, match=r"attn\.qkv\.weight \(24, 8\).*Pass head_dim"):
        resolve([Heads("attn", order="qkv")], model)
    assert only(Heads("attn", head_dim=4, order="qkv"), model).scope.numblk_per_scope() == 2
    with pytest.raises(PatternError, match="heads of size 3 do not divide"):
        resolve([Heads("attn", head_dim=3, order="qkv")], model)


def test_a_head_size_that_contradicts_the_module_is_refused_with_both():
    model = nn.ModuleDict({"attn": Named({"q": 32, "k": 32, "v": 32, "o": 32}, head_dim=16)})
    with pytest.raises(PatternError, match=r"head_dim=8, but the heads of attn have size 16 .*pass 16"):
        resolve([Heads("attn", head_dim=8)], model)
    assert only(Heads("attn", head_dim=16), model).scope.numblk_per_scope() == 2


def test_a_config_of_the_attention_may_have_the_size():
    model = nn.ModuleDict({"attn": Named({"qkv": 24, "proj": 8})})
    model["attn"].config = type("Config", (), {"num_attention_heads": 2, "head_dim": None})()
    assert only(Heads("attn", order="qkv"), model).scope.numblk_per_scope() == 2


def test_unknown_names_of_projections_raise():
    model = nn.ModuleDict({"attn": Named({"make": 24, "proj": 8}, head_dim=4)})
    with pytest.raises(PatternError, match=r"projections in 'attn'.*\['make', 'proj'\].*qkv and out"):
        resolve([Heads("attn")], model)


def test_a_submodule_of_a_matching_attention_is_not_a_match():
    inner = {"attention.query": 8, "attention.key": 8, "attention.value": 8, "output.dense": 8}
    model = nn.ModuleDict({"0": nn.ModuleDict({"attention": Named(inner, num_heads=2)})})
    assert only(Heads("*.attention"), model).name == "0.attention (heads)"


@pytest.mark.parametrize("arguments", [{}, {"q": "a", "k": "b"}, {"qkv": "a"}, {"qkv": "a", "out": "b", "q": "c"}])
def test_heads_need_all_projections(arguments):
    with pytest.raises(PatternError, match="names no set of projections: pass q, k, v and out; or qkv and out"):
        Heads(**arguments)


class CNN(nn.Module):
    def __init__(self, channels, filters, bias, last_in_memory):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, filters, 3, bias=bias)
        self.bn1 = nn.BatchNorm2d(filters)
        self.conv2 = nn.Conv2d(filters, 4, 2)
        nn.init.normal_(self.bn1.weight)
        nn.init.normal_(self.bn1.bias)
        self.bn1.running_mean.normal_()
        self.eval()
        if last_in_memory:
            self.to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.conv2(F.relu(self.bn1(self.conv1(x))))


@few
@given(st.integers(1, 3), st.integers(1, 7), st.booleans(), st.booleans())
def test_filters_with_norm_and_reader(channels, filters, bias, last_in_memory):
    model = nn.ModuleDict({"a": CNN(channels, filters, bias, last_in_memory)})
    attachment = only(Filters("*.conv1", norm="*.bn1", into="*.conv2"), model)
    assert attachment.name == "a.conv1 (filters)"
    cnn, x = deepcopy(model["a"]), torch.randn(2, channels, 6, 6)
    kept = prune(attachment)
    if not len(kept):
        close(model["a"](x), cnn.conv2.bias.view(1, -1, 1, 1).expand(2, 4, 3, 3))
        return
    y = F.conv2d(x, pick(cnn.conv1.weight, 0, kept), pick(cnn.conv1.bias, 0, kept))
    statistics = (pick(t, 0, kept) for t in (cnn.bn1.running_mean, cnn.bn1.running_var, cnn.bn1.weight, cnn.bn1.bias))
    y = F.relu(F.batch_norm(y, *statistics))
    close(model["a"](x), F.conv2d(y, pick(cnn.conv2.weight, 1, kept), cnn.conv2.bias))


def test_filters_alone_go_with_their_bias():
    model = nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), nn.Conv2d(6, 4, 3), nn.Linear(4, 4))
    alone, with_bias = resolve([Filters("*")], model)
    assert (alone.name, with_bias.name) == ("0.weight", "1 (filters)")
    assert alone.scope.blocks()[0].numel_per_block() == 27
    assert with_bias.scope.blocks()[0].numel_per_block() == 6 * 9 + 1


def test_filters_into_a_linear_layer_behind_flatten():
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 4, 2))
    (conv, _, _, head), x = deepcopy(model), torch.randn(2, 3, 4, 4)
    kept = prune(only(Filters("0", into="3"), model))
    y = F.relu(F.conv2d(x, pick(conv.weight, 0, kept), pick(conv.bias, 0, kept))).flatten(1)
    close(model(x), F.linear(y, pick(head.weight, 1, rows_of(kept, 4)), head.bias))


def test_filters_of_a_transposed_convolution():
    model = nn.Sequential(nn.ConvTranspose2d(3, 5, 2), nn.ReLU(), nn.ConvTranspose2d(5, 2, 2, groups=1))
    (first, _, second), x = deepcopy(model), torch.randn(2, 3, 4, 4)
    kept = prune(only(Filters("0", into="2"), model))
    y = F.relu(F.conv_transpose2d(x, pick(first.weight, 1, kept), pick(first.bias, 0, kept)))
    close(model(x), F.conv_transpose2d(y, pick(second.weight, 0, kept), second.bias))


def test_filters_into_a_depthwise_convolution():
    model = nn.Sequential(nn.Conv2d(3, 5, 1), nn.Conv2d(5, 10, 3, groups=5, bias=False))
    (conv, depthwise), x = deepcopy(model), torch.randn(2, 3, 4, 4)
    kept = prune(only(Filters("0", into="1"), model))
    y = F.conv2d(x, pick(conv.weight, 0, kept), pick(conv.bias, 0, kept))
    outputs = rows_of(kept, 2)
    close(model(x).index_select(1, outputs), F.conv2d(y, pick(depthwise.weight, 0, outputs), groups=len(kept)))


def test_inputs_of_groups_that_no_strides_express_raise():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, groups=2))
    with pytest.raises(PatternError, match=r"1\.weight of shape \(4, 2, 3, 3\).*can't be merged"):
        resolve([Filters("0", into="1")], model)


def test_a_norm_that_does_not_fit_raises():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(4))
    with pytest.raises(PatternError, match=r"1\.weight of shape \(4,\) does not fit the 6 filters of 0\.weight"):
        resolve([Filters("0", norm="1")], model)


def test_layers_are_paired_by_the_text_that_wildcards_match():
    model = nn.ModuleDict({"a": nn.ModuleDict({"x": MLP(2, 3), "y": MLP(2, 5)})})
    first, second = resolve([Neurons("a.?.up", "a.?.down")], model)
    assert (first.scope.numblk(), second.scope.numblk()) == (3, 5)
    with pytest.raises(PatternError, match=r"a\.x\.up has no partner in down: .* wildcard text \('x',\), only"):
        resolve([Neurons("a.*.up", "*.down")], model)
    with pytest.raises(PatternError, match=r"matches both a\.x\.up\.weight and a\.y\.up\.weight"):
        resolve([Neurons(r"re:a\..\.up", "*.down")], model)


def test_units_that_do_not_agree_raise():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(6, 4))
    with pytest.raises(PatternError, match=r"0\.weight \(8, 4\), 1\.weight \(4, 6\).* 8 outputs, but 6 inputs"):
        resolve([Neurons("0", "1")], model)


def test_tied_layers_are_attached_once():
    shared = MLP(3, 5)
    assert only(Neurons("*.up", "*.down"), nn.ModuleDict({"a": shared, "b": shared})).name == "a (neurons)"
    attention = Attention(4, 2, 2, 1)
    assert only(Heads("*.attn"), nn.ModuleDict({n: nn.ModuleDict({"attn": attention}) for n in "ab"})).name


def llama(layers, width, hidden, heads, kv_heads):
    """The shape of a Llama, on the meta device: no weights are there."""
    size = width // heads
    with torch.device("meta"):
        blocks = []
        for _ in range(layers):
            attention = nn.ModuleDict(
                {
                    "q_proj": nn.Linear(width, width, bias=False),
                    "k_proj": nn.Linear(width, kv_heads * size, bias=False),
                    "v_proj": nn.Linear(width, kv_heads * size, bias=False),
                    "o_proj": nn.Linear(width, width, bias=False),
                }
            )
            attention.head_dim = size
            mlp = nn.ModuleDict(
                {
                    "gate_proj": nn.Linear(width, hidden, bias=False),
                    "up_proj": nn.Linear(width, hidden, bias=False),
                    "down_proj": nn.Linear(hidden, width, bias=False),
                }
            )
            blocks.append(nn.ModuleDict({"self_attn": attention, "mlp": mlp}))
    return nn.ModuleDict({"layers": nn.ModuleList(blocks)})


def test_a_large_model_without_weights_is_attached_without_making_tensors(copies):
    model = llama(80, 8192, 28672, 64, 8)
    with copies() as made:
        found = resolve([Heads("*.self_attn"), Neurons("*.up_proj", "*.down_proj", "*.gate_proj")], model)
    assert len(found) == 160
    assert made.largest == 0, "attaching made a tensor"
    assert [a.scope.numblk() for a in found[:1] + found[-1:]] == [8, 28672]
    covered = sum(a.scope.numel() for a in found)
    assert covered == sum(p.numel() for p in Names(model).parameters.values())
