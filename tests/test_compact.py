"""Compact models: without the units that are zero, and with the outputs of the masked model."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from graph_models import IMAGES, PLAIN, SEQUENCE, SIZES_IN_CODE, TOKENS, VECTORS, hugging_face
from safetensors import safe_open
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from sparse_lightning import (
    Constant,
    Coupled,
    Filters,
    Heads,
    Magnitude,
    Neurons,
    NothingToRemoveWarning,
    PretrainedConfigWarning,
    Sparsifier,
    compact,
    prune,
)
from sparse_lightning.compaction import compact_program, compacted
from sparse_lightning.compaction.same_outputs import outputs, relative_error, tensors_in
from sparse_lightning.errors import CheckpointError, CouplingError, SparseLightningError
from sparse_lightning.export import ONNX, Compact, KeptBlocks, Tiled
from sparse_lightning.graph import couplings
from sparse_lightning.graph.inputs import ExampleInputs
from sparse_lightning.layout import Layout

SPARSIFIER = Sparsifier([Neurons("0", "2")], Constant(0.5))

REMOVABLE = [name for name, case in PLAIN.items() if case.units]
"""Plain models that have units to remove."""

SIZES = {"vocab_size": 32, "hidden_size": 32, "max_position_embeddings": 32, "intermediate_size": 24}
LLAMA = hugging_face(
    "LlamaForCausalLM", **SIZES, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, eos_token_id=None
)
GROUPED = {**SIZES, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4}
T5 = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
HUGGING_FACE = {
    "vit": hugging_face(
        "ViTModel",
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=24,
        image_size=8,
        patch_size=4,
    ),
    "llama, eager": hugging_face("LlamaForCausalLM", **GROUPED, attn_implementation="eager"),
    "mixtral": hugging_face("MixtralForCausalLM", **GROUPED, num_local_experts=4, experts_implementation="batched_mm"),
    "neox, interleaved": hugging_face("GPTNeoXForCausalLM", **SIZES, num_hidden_layers=2, num_attention_heads=4),
    "gpt2": hugging_face("GPT2LMHeadModel", vocab_size=32, n_embd=16, n_layer=2, n_head=4, n_positions=32),
    "bert": hugging_face("BertModel", **SIZES, num_hidden_layers=2, num_attention_heads=4),
    "llama": LLAMA,
    "qwen3": hugging_face(
        "Qwen3ForCausalLM", **SIZES, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, head_dim=8
    ),
    "t5": hugging_face("T5ForConditionalGeneration", **T5),
    "t5, gated": hugging_face("T5ForConditionalGeneration", **T5, feed_forward_proj="gated-gelu"),
}


def prune_units(model, inputs, seed, prefer="outer"):
    """Zero 25 to 75 % of the units of each family, another fraction in each; return how many of each are left."""
    found, choice = couplings(model, inputs, prefer=prefer), random.Random(seed)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    left = {}
    for family in found:
        count = min(family.units - 1, max(1, round(family.units * choice.choice([0.25, 0.5, 0.75]))))
        units = choice.sample(range(family.units), count)
        left[family.name] = family.units - count
        for piece in family.slices:
            tensor = parameters[piece.name].data
            piece.layout(Layout.of(tensor)).on(tensor)[units] = 0
    return left


def pruned(build, inputs, seed=0, prefer="outer"):
    """A model in float64 with random biases and pruned units, its inputs, and its outputs."""
    torch.manual_seed(seed)
    model = build().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    wide = ExampleInputs.of(model, inputs).of_dtype(torch.float64)
    given = wide.args or wide.kwargs
    left = prune_units(model, given, seed, prefer)
    called = wide.without_cache(model)
    return model, given, called, outputs(model, called), left


def error(expected, made):
    return max(relative_error(one, other) for one, other in zip(expected, made, strict=True))


def check_module(build, inputs, seed=0, prefer="outer"):
    model, given, called, expected, left = pruned(build, inputs, seed, prefer)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = compacted(model, given)
    assert {name: len(units.kept) for name, units in made.units.items()} == left
    assert type(made.model) is type(model)
    assert error(expected, outputs(made.model, called)) <= 1e-12
    assert sum(p.numel() for p in made.model.parameters()) < sum(p.numel() for p in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def check_graph(build, inputs, seed=0, prefer="outer"):
    model, given, _, expected, left = pruned(build, inputs, seed, prefer)
    made = compact_program(model, given)
    assert {name: len(units.kept) for name, units in made.units.items()} == left
    called = ExampleInputs.of(model, given)
    assert error(expected, tensors_in(made.program.module()(*called.args, **called.kwargs))) <= 1e-12


def tokens_of(name):
    if name == "vit":
        return {"pixel_values": IMAGES}
    return {"input_ids": TOKENS, "decoder_input_ids": TOKENS} if "t5" in name else {"input_ids": TOKENS}


@pytest.mark.parametrize("name", sorted(set(REMOVABLE) - SIZES_IN_CODE))
def test_a_compacted_module_has_the_outputs_of_the_masked_model(name):
    check_module(PLAIN[name].build, PLAIN[name].inputs)


@pytest.mark.parametrize("name", ["shuffle", "fused", "interleaved", "convolutions", "transposed", "grouped queries"])
def test_a_compacted_program_has_the_outputs_of_the_masked_model(name):
    check_graph(PLAIN[name].build, PLAIN[name].inputs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("prefer", ["outer", "inner"])
@pytest.mark.parametrize("name", REMOVABLE)
def test_plain_models_by_both_routes(name, prefer):
    for seed in (1, 2):
        check_graph(PLAIN[name].build, PLAIN[name].inputs, seed, prefer)
        if name not in SIZES_IN_CODE:
            check_module(PLAIN[name].build, PLAIN[name].inputs, seed, prefer)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_models_of_hugging_face_by_both_routes(name):
    for seed in (1, 2):
        check_module(HUGGING_FACE[name], tokens_of(name), seed)
        check_graph(HUGGING_FACE[name], tokens_of(name), seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["gpt2", "t5", "t5, gated"])
def test_models_of_hugging_face_with_tied_weights_generate_from_a_file(name, tmp_path):
    build = HUGGING_FACE[name]
    model, given, called, expected, _ = pruned(build, tokens_of(name), 2)
    small = Compact.load(Compact(inputs=given)(tmp_path, model, SPARSIFIER), into=build().double().eval())
    assert small.get_output_embeddings().weight is small.get_input_embeddings().weight
    assert error(expected, outputs(small, called)) <= 1e-12
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": 0}
    assert torch.equal(model.generate(TOKENS, **options), small.generate(TOKENS, **options))


@pytest.mark.parametrize("name", sorted(SIZES_IN_CODE))
def test_sizes_in_the_code_of_a_model_are_one_clear_error(name):
    model, given, *_ = pruned(PLAIN[name].build, PLAIN[name].inputs)
    with pytest.raises(SparseLightningError, match=r'cannot be compacted as a module: .*route="graph"'):
        compact(model, given)


class NanoAttention(nn.Module):
    """Attention with a size written into its code."""

    def __init__(self):
        super().__init__()
        self.n_embd, self.n_head = 16, 4
        self.c_attn, self.c_proj = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        batch, tokens, width = x.shape
        split = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (each.view(batch, tokens, self.n_head, width // self.n_head).transpose(1, 2) for each in split)
        made = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(made.transpose(1, 2).reshape(batch, tokens, -1))


class Nano(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = NanoAttention()

    def forward(self, x):
        return x + self.attn(x)


class MultiheadSelf(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x):
        return self.attn(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (Nano, r"attn \(NanoAttention\) computes with its attribute n_embd=16"),
        (MultiheadSelf, r"attn \(MultiheadAttention\) computes with its attribute"),
    ],
)
def test_the_error_names_the_module_and_the_attribute_and_the_graph_route_works(build, named):
    model, given, *_ = pruned(build, (SEQUENCE,))
    with pytest.raises(SparseLightningError, match=named + r'.*route="graph"'):
        compact(model, given)
    check_graph(build, (SEQUENCE,))


@pytest.mark.parametrize("prefer", ["outer", pytest.param("inner", marks=pytest.mark.exhaustive)])
def test_llama_with_grouped_queries_generates_with_its_cache_as_the_masked_model(prefer):
    model, given, called, expected, left = pruned(LLAMA, {"input_ids": TOKENS}, prefer=prefer)
    with pytest.warns(PretrainedConfigWarning, match="cannot hold the sizes"):
        small = compact(model, given)
    assert error(expected, outputs(small, called)) <= 1e-12
    options = {"max_new_tokens": 8, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    assert torch.equal(model.generate(TOKENS, **options), small.generate(TOKENS, **options))
    assert len(left) == 4
    assert small.config.intermediate_size == 24, "its layers have different sizes, which a config cannot say"


def test_a_hugging_face_model_of_equal_layers_is_saved_and_loaded_with_its_config(tmp_path):
    torch.manual_seed(0)
    model = LLAMA().eval()
    units = Coupled(["*.mlp*", "*attn*"], {"input_ids": TOKENS})
    prune(model, [units], 0.5, criterion="magnitude", progress=False)
    small = compact(model, {"input_ids": TOKENS})
    assert (small.config.intermediate_size, small.config.num_attention_heads, small.config.num_key_value_heads) == (
        12,
        4,
        2,
    )
    assert model.config.num_attention_heads == 8
    small.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    with torch.no_grad():
        assert relative_error(model(TOKENS).logits, loaded(TOKENS).logits) < 1e-5


def coupled_case(name):
    torch.manual_seed(0)
    if name == "filters":
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())
        return net, Filters("0", norm="1", into="3"), torch.randn(2, 3, 8, 8), {"0.out_channels": 4}
    if name == "heads":
        from sparse_lightning.models.transformer import Block

        return Block(16, 4, causal=True), Heads("attn"), torch.randn(2, 5, 16), {"attn.num_heads": 2}
    if name == "coupled":
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))
        return (
            net,
            Coupled(inputs=(torch.randn(2, 6).double(),)),
            torch.randn(2, 6),
            {"0.out_features": 4, "2.out_features": 2},
        )
    net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))
    return net, Neurons("0", "2"), torch.randn(2, 6), {"0.out_features": 4}


@pytest.mark.parametrize("name", ["heads", "neurons", "filters", "coupled"])
def test_masks_of_coupled_patterns_are_removed(name):
    model, pattern, x, sizes = coupled_case(name)
    model = model.double()
    prune(model, [pattern], 0.5, criterion="magnitude", progress=False)
    small = compact(model, (x.double(),))
    for path, size in sizes.items():
        module, _, attribute = path.rpartition(".")
        assert getattr(small.get_submodule(module), attribute) == size
    assert relative_error(model.eval()(x.double()).detach(), small.eval()(x.double()).detach()) <= 1e-12


def test_single_tiles_leave_nothing_to_remove_and_a_warning_says_so():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    with torch.no_grad():
        model[0].weight[:4, :4] = 0
        model[2].weight[2:, 4:] = 0
    with pytest.warns(NothingToRemoveWarning, match=r"form no family: use sparse_lightning\.tiled"):
        small = compact(model, (torch.randn(2, 8),))
    assert {name: t.shape for name, t in small.state_dict().items()} == {
        name: t.shape for name, t in model.state_dict().items()
    }


def test_one_unit_is_left_of_a_layer_that_is_zero():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    for parameter in (model[0].weight, model[0].bias, model[2].weight):
        nn.init.zeros_(parameter)
    assert compact(model, (VECTORS,))[0].out_features == 1


def half_zero(hidden=8):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, hidden), nn.BatchNorm1d(hidden), nn.Dropout(), nn.Linear(hidden, 3))
    with torch.no_grad():
        model[1].bias.normal_()
        for part in (model[0].weight, model[0].bias, model[1].weight, model[1].bias):
            part[::2] = 0
        model[3].weight[:, ::2] = 0
    return model


def test_modes_gradients_ties_hooks_and_dtypes_are_those_of_the_model():
    model = half_zero().to(torch.bfloat16)
    model[0].weight.requires_grad_(False)
    model[1].eval()
    seen = []
    model[3].register_forward_hook(lambda module, args, output: seen.append(module))
    small = compact(model, (torch.randn(3, 4, dtype=torch.bfloat16),))
    assert not small[0].weight.requires_grad
    assert small[0].bias.requires_grad
    assert [m.training for m in small.modules()] == [m.training for m in model.modules()]
    assert {t.dtype for t in small.parameters()} == {torch.bfloat16}
    assert small[1].running_mean.shape == (4,)
    assert small[1].num_features == 4
    seen.clear()
    small(torch.randn(3, 4, dtype=torch.bfloat16))
    assert seen == [small[3]]
    tied, given, *_ = pruned(PLAIN["tied"].build, PLAIN["tied"].inputs)
    made = compact(tied, given)
    assert made.head.weight is made.embed.weight


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    ],
    ids=["AdamW", "SGD"],
)
def test_the_first_step_after_compaction_is_that_of_the_masked_model(make):
    model = half_zero().double().eval()
    optimizer = make(model.parameters())
    zero = {name: parameter == 0 for name, parameter in model.named_parameters()}

    def step(net, by):
        by.zero_grad()
        net(VECTORS.double()).pow(2).sum().backward()
        by.step()

    def masked_step():
        step(model, optimizer)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter[zero[name]] = 0

    masked_step()
    other = copy.deepcopy((model, optimizer))
    small = compact(other[0], (VECTORS.double(),), other[1])
    step(small, other[1])
    masked_step()
    assert {id(p) for group in other[1].param_groups for p in group["params"]} == {id(p) for p in small.parameters()}
    assert [tuple(p.shape) for p in small.parameters()] == [(4, 4), (4,), (4,), (4,), (3, 4), (3,)]
    expected = compact(model, (VECTORS.double(),))
    for (name, one), two in zip(expected.named_parameters(), small.parameters(), strict=True):
        assert relative_error(one.detach(), two.detach()) <= 1e-12, name


def test_state_of_an_optimizer_that_cannot_be_cut_is_refused_before_anything_changes():
    model = half_zero()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
    model.eval()(VECTORS).sum().backward()
    with torch.no_grad():
        optimizer.step()
        for part in (model[0].weight, model[0].bias, model[1].weight, model[1].bias):
            part[::2] = 0
        model[3].weight[:, ::2] = 0
    with pytest.raises(SparseLightningError, match=r"Adafactor has the state 'row_var'"):
        compact(model, (VECTORS,), optimizer)
    assert optimizer.param_groups[0]["params"][0] is model[0].weight


def test_a_state_dict_in_the_place_of_a_model_is_refused():
    with pytest.raises(CouplingError, match=r"is not a model: pass an nn\.Module"):
        compact(half_zero().state_dict(), (VECTORS,))


def test_compaction_beside_an_attached_sparsifier():
    model = half_zero()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruning = Sparsifier([Neurons("0", "3")], Constant(0.5), Magnitude())
    pruning.attach(model, [optimizer])
    pruning.update_now()
    with pytest.raises(SparseLightningError, match=r"a Sparsifier is attached to SGD.*call detach\(\)"):
        compact(model, (VECTORS,), optimizer)
    small = compact(model, (VECTORS,))
    assert small[0].out_features == 4
    model(VECTORS).sum().backward()
    optimizer.step()
    assert pruning.sparsity() == pytest.approx(0.5), "the whole model is still held"
    pruning.detach()
    assert compact(model, (VECTORS,), optimizer)[0].weight is optimizer.param_groups[0]["params"][0]


def test_an_optimizer_of_another_model_is_refused():
    model = half_zero()
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(SparseLightningError, match="SGD holds none of the parameters of the model"):
        compact(model, (VECTORS,), other)


def test_a_file_loads_into_a_fresh_model_and_is_as_small_as_the_kept_weights(tmp_path):
    torch.manual_seed(0)

    def build():
        return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))

    model, x = build(), torch.randn(2, 256)
    prune_units(model, (x,), 0)
    path = Compact(inputs=(x,))(tmp_path, model, SPARSIFIER)
    loaded = Compact.load(path, into=build())
    assert relative_error(model(x).detach(), loaded(x).detach()) < 1e-5
    kept = sum(parameter.numel() * parameter.element_size() for parameter in loaded.parameters())
    assert kept < path.stat().st_size < 1.01 * kept


@pytest.mark.parametrize("name", ["convolutions", "dense experts", "tied", "squeeze and excite"])
def test_what_is_loaded_is_what_was_compacted(name, tmp_path):
    model, given, called, expected, _ = pruned(PLAIN[name].build, PLAIN[name].inputs)
    path = Compact(inputs=given)(tmp_path, model, SPARSIFIER)
    fresh = PLAIN[name].build().double()
    assert error(expected, outputs(Compact.load(path, into=fresh), called)) <= 1e-12


def rewritten(path, change):
    """Write the file again with another header of Compact."""
    size = struct.unpack("<Q", path.read_bytes()[:8])[0]
    outer = json.loads(path.read_bytes()[8 : 8 + size])
    inner = json.loads(outer["__metadata__"]["sparse_lightning.compact"])
    change(inner, outer)
    outer["__metadata__"]["sparse_lightning.compact"] = json.dumps(inner)
    head = json.dumps(outer).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + path.read_bytes()[8 + size :])


def first_units(inner):
    return next(iter(inner["units"].values()))


BROKEN = {
    "negative units": (lambda inner, outer: first_units(inner).update(kept=[-1, 2]), "not one of its 8"),
    "repeated units": (lambda inner, outer: first_units(inner).update(kept=[1, 1, 3]), "keeps a unit twice"),
    "units beyond": (lambda inner, outer: first_units(inner).update(kept=[1, 10**12]), "not one of its 8"),
    "huge shape": (lambda inner, outer: inner["shapes"].update({"0.weight": [10**9, 10**9]}), r"0\.weight has the sh"),
    "huge size": (lambda inner, outer: inner["attributes"]["0"].update(out_features=10**12), "larger than 8"),
    "wrong size": (lambda inner, outer: inner["attributes"]["0"].update(out_features=3), "does not have the value 4"),
    "code": (lambda inner, outer: inner["attributes"]["0"].update(forward=1), "not a size that compact changes"),
    "text": (lambda inner, outer: inner["attributes"]["0"].update(out_features="4"), "not a size"),
    "bool": (lambda inner, outer: inner["attributes"].update({"2": {"training": 1}}), "not a size that compact"),
    "another module": (lambda inner, outer: inner["attributes"].update({"9": {"in_features": 1}}), "9"),
    "a missing key": (lambda inner, outer: inner.pop("units"), "does not have the keys"),
    "another format": (lambda inner, outer: inner.update(format=2), "has the format 2"),
    "a format that is no whole number": (lambda inner, outer: inner.update(format=1.0), r"has the format 1\.0"),
    "a list": (lambda inner, outer: inner.update(shapes=[1]), "not a mapping"),
    "huge tensors": (lambda inner, outer: outer["0.weight"].update(shape=[10**9, 10**9]), "the file is damaged"),
    "a name of no tensor": (lambda inner, outer: inner.update(unregistered=["0.forward"]), "not a tensor"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_with_its_reason_and_the_model_stays(name, tmp_path):
    change, reason = BROKEN[name]
    path = Compact(inputs=(torch.randn(2, 4),))(tmp_path, half_zero(), SPARSIFIER)
    rewritten(path, change)
    fresh = half_zero()
    with pytest.raises(CheckpointError, match=reason):
        Compact.load(path, into=fresh)
    assert fresh[0].weight.shape == (8, 4)
    assert fresh[0].out_features == 8


def test_a_file_that_was_cut_short_and_one_of_another_model_are_refused(tmp_path):
    path = Compact(inputs=(torch.randn(2, 4),))(tmp_path, half_zero(), SPARSIFIER)
    with pytest.raises(CheckpointError, match=r"0\.weight has the shape \(16, 4\) in the model, and \(8, 4\)"):
        Compact.load(path, into=half_zero(16))
    with pytest.raises(CheckpointError, match="in the file or in the model only"):
        Compact.load(path, into=nn.Sequential(nn.Linear(4, 8)))
    with pytest.raises(CheckpointError, match=r"torch\.float64 in the model"):
        Compact.load(path, into=half_zero().double())
    whole = path.read_bytes()
    for length in (0, 7, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"the file is damaged .* is not a compacted Sequential"):
            Compact.load(path, into=half_zero())


class Touch:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("load", [Compact.load, Tiled.load, lambda path, into: KeptBlocks.load(path)])
def test_pickles_pipes_devices_and_folders_are_refused_and_nothing_is_executed(load, tmp_path):
    ran, pickled, saved, pipe, link = (tmp_path / name for name in ("ran", "pickle", "torch", "pipe", "link"))
    pickled.write_bytes(pickle.dumps(Touch(ran)))
    torch.save({"0.weight": Touch(ran)}, saved)
    for path in (pickled, saved):
        with pytest.raises(CheckpointError, match="header"):
            load(path, into=half_zero())
    os.mkfifo(pipe)
    link.symlink_to(os.devnull)
    for path in (pipe, link, tmp_path):
        with pytest.raises(CheckpointError, match="it is a folder, a pipe or a device, not a file"):
            load(path, into=half_zero())
    assert not ran.exists()


def mutated(content, choice):
    """The content of a file that was cut short, or has other bytes or numbers in its header."""
    end = 8 + struct.unpack("<Q", content[:8])[0]
    head = content[8:end]
    kind = choice.randrange(3)
    if kind == 0:
        return content[: choice.randrange(len(content))]
    if kind == 1:
        at = choice.randrange(len(head))
        head = head[:at] + bytes([choice.randrange(256)]) + head[at + 1 :]
    else:
        number = choice.choice(list(re.finditer(rb"\d+", head)))
        head = head[: number.start()] + choice.choice(WRONG) + head[number.end() :]
    return struct.pack("<Q", len(head)) + head + content[end:]


WRONG = [b"-1", b"0", b"1e9", b"9" * 25, b"null", b"[]", b"{}", b"true", b"[[1]]"]


def test_a_file_with_random_damage_is_refused_or_loads_and_never_changes_half_of_a_model(tmp_path):
    path = Compact(inputs=(VECTORS,))(tmp_path, half_zero(), SPARSIFIER)
    whole, choice = path.read_bytes(), random.Random(0)
    for _ in range(60):
        path.write_bytes(mutated(whole, choice))
        fresh = half_zero()
        try:
            Compact.load(path, into=fresh)
        except CheckpointError:
            assert [tuple(p.shape) for p in fresh.parameters()] == [tuple(p.shape) for p in half_zero().parameters()]
            assert str(fresh) == str(half_zero())
        assert fresh.eval()(VECTORS).shape == (len(VECTORS), 3)


@pytest.mark.parametrize("route", ["module", "graph"])
def test_a_link_in_the_place_of_the_file_is_replaced_and_its_target_stays(route, tmp_path):
    exporter, other = Compact(route, inputs=(VECTORS,)), tmp_path / "other"
    other.write_text("keep")
    (tmp_path / exporter.file).symlink_to(other)
    path = exporter(tmp_path, half_zero(), SPARSIFIER)
    assert other.read_text() == "keep"
    assert path.is_file()
    assert not path.is_symlink()


def test_a_compacted_model_is_pruned_compacted_and_compiled_again():
    first = compact(half_zero().double().eval(), (VECTORS.double(),))
    with torch.no_grad():
        for part in (first[0].weight, first[0].bias, first[1].weight, first[1].bias):
            part[1:3] = 0
        first[3].weight[:, 1:3] = 0
    again = compact(torch.compile(first, backend="eager"), (VECTORS.double(),))
    assert (first[0].out_features, again[0].out_features) == (4, 2)
    made = torch.compile(again, backend="eager", fullgraph=True)(VECTORS.double())
    assert relative_error(first(VECTORS.double()).detach(), made.detach()) <= 1e-12


def test_a_route_that_does_not_exist_is_refused():
    with pytest.raises(CouplingError, match="use 'module' or 'graph'"):
        Compact(route="onnx")


def test_the_file_has_no_pickle(tmp_path):
    path = Compact(inputs=(torch.randn(2, 4),))(tmp_path, half_zero(), SPARSIFIER)
    with safe_open(path, framework="pt") as file:
        assert set(file.metadata()) == {"sparse_lightning.compact"}


@pytest.mark.slow
def test_a_program_runs_where_this_package_cannot_be_imported_with_other_batches_and_sequences(tmp_path):
    torch.manual_seed(0)
    model = Nano().eval()
    prune_units(model, (SEQUENCE[:1],), 0)
    Compact(route="graph", inputs=(SEQUENCE[:1],))(tmp_path, model, SPARSIFIER)
    given = {shape: torch.randn(*shape, 16) for shape in ((1, 3), (2, 5), (7, 11))}
    torch.save({shape: (x, model(x).detach()) for shape, x in given.items()}, tmp_path / "cases.pt")
    code = """
import sys
sys.modules["sparse_lightning"] = None
import torch
small = torch.export.load("compact.pt2").module()
for shape, (x, expected) in torch.load("cases.pt").items():
    assert torch.allclose(small(x), expected, atol=1e-6), shape
print(sum(p.numel() for p in small.parameters()))
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < sum(p.numel() for p in model.parameters())


@pytest.mark.slow
def test_onnxruntime_has_the_outputs_of_the_masked_model_for_other_sizes(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model = Nano().eval()
    prune_units(model, (SEQUENCE,), 0)
    path = ONNX((SEQUENCE,))(tmp_path, model, SPARSIFIER)
    session = onnxruntime.InferenceSession(Path(path), providers=["CPUExecutionProvider"])
    assert [each.shape for each in (*session.get_inputs(), *session.get_outputs())] == [["batch", "sequence", 16]] * 2
    for shape in ((2, 5), (3, 9)):
        x = torch.randn(*shape, 16)
        made = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
        assert relative_error(model(x).detach(), torch.from_numpy(made)) <= 1e-5
