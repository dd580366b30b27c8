"""Couplings of models of Hugging Face, from small configurations with random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from forked import printed_by
from graph_models import IMAGES, TOKENS, Case, hugging_face
from large_model import analyse_large_model
from test_graph import worst_error
from torch import nn

from sparse_lightning.graph import couplings
from sparse_lightning.graph.proof import TOLERANCE

BASE: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 24,
}
WORDS: dict[str, Any] = {**BASE, "vocab_size": 32, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
GPT2: dict[str, Any] = {"vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 4, "bos_token_id": 0, "eos_token_id": 1}
T5: dict[str, Any] = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
IDS = {"input_ids": TOKENS}
NORM = "aten.mean"

QUICK = {
    "bert": Case(
        hugging_face("BertModel", **{**WORDS, "pad_token_id": 0}),
        IDS,
        {"encoder.layer.0.attention (heads)": 4, "encoder.layer.0 (units)": 24},
        {"embeddings.LayerNorm.weight": ("aten.layer_norm", "embeddings.LayerNorm")},
    ),
    "gpt2": Case(
        hugging_face("GPT2LMHeadModel", **GPT2),
        IDS,
        {"transformer.h.0.attn (heads)": 4, "transformer.h.0.mlp (units)": 64},
        {"transformer.wte.weight": ("aten.embedding", "transformer.wte")},
    ),
    "llama, two query heads for each key": Case(
        hugging_face("LlamaForCausalLM", **WORDS, num_key_value_heads=2),
        IDS,
        {"model.layers.0.self_attn (heads)": 2, "model.layers.0.mlp (units)": 24},
        {"model.layers.0.input_layernorm.weight": (NORM, "model.layers.0.input_layernorm")},
    ),
    "vit": Case(
        hugging_face("ViTModel", **BASE, image_size=8, patch_size=4),
        (IMAGES,),
        {"layers.0.attention (heads)": 4, "layers.0.mlp (units)": 24},
        {"embeddings.patch_embeddings.projection.bias": ("aten.layer_norm", "layers.0.layernorm_before")},
    ),
    "neox, interleaved": Case(
        hugging_face("GPTNeoXForCausalLM", **WORDS),
        IDS,
        {"gpt_neox.layers.0.attention (heads)": 4, "gpt_neox.layers.0.mlp (units)": 24},
        {"gpt_neox.embed_in.weight": ("aten.embedding", "gpt_neox.embed_in")},
    ),
}
LONG = {
    "llama, eager": Case(
        hugging_face("LlamaForCausalLM", **WORDS, num_key_value_heads=2, attn_implementation="eager"),
        IDS,
        {"model.layers.0.self_attn (heads)": 2, "model.layers.0.mlp (units)": 24},
        {},
    ),
    "qwen, norms of heads, one key for all": Case(
        hugging_face("Qwen3ForCausalLM", **WORDS, num_key_value_heads=1, head_dim=4),
        IDS,
        {"model.layers.0.self_attn (heads)": 4, "model.layers.0.mlp (units)": 24},
        {"model.layers.0.self_attn.k_norm.weight": (NORM, "model.layers.0.self_attn.q_norm")},
    ),
    "t5, whose layers share a bias of each head": Case(
        hugging_face("T5ForConditionalGeneration", **T5),
        {"input_ids": TOKENS, "decoder_input_ids": TOKENS},
        {
            "encoder.block (heads)": 4,
            "encoder.block.0.layer.1.DenseReluDense (units)": 24,
            "encoder.block.1.layer.1.DenseReluDense (units)": 24,
            "decoder.block.0.layer.0.SelfAttention.q (heads)": 4,
            "decoder.block.0.layer.1.EncDecAttention.q (heads)": 4,
            "decoder.block.0.layer.2.DenseReluDense (units)": 24,
            "decoder.block.1.layer.2.DenseReluDense (units)": 24,
        },
        {"shared.weight": ("aten.embedding", "encoder.embed_tokens")},
    ),
    "mixtral": Case(
        hugging_face("MixtralForCausalLM", **WORDS, num_key_value_heads=2, num_local_experts=4),
        IDS,
        {"model.layers.0.self_attn (heads)": 2, "model.layers.0.mlp.experts (units)": 24},
        {"model.layers.0.mlp.gate.weight": ("aten.softmax", "model.layers.0.mlp.gate")},
    ),
    "falcon, groups of queries with their key and value": Case(
        hugging_face(
            "FalconForCausalLM",
            vocab_size=32,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_kv_heads=2,
            new_decoder_architecture=True,
        ),
        IDS,
        {"transformer.h.0.self_attention (heads)": 2, "transformer.h.0.mlp (units)": 64},
        {},
    ),
}


def check(case: Case) -> None:
    torch.manual_seed(0)
    found = couplings(case.build(), case.inputs)
    assert {family.name: family.units for family in found} == case.units, f"\n{found}"
    wrong = {family: error for family, error in worst_error(found).items() if not error <= TOLERANCE}
    assert not wrong, f"zeroing and removing give other outputs in {wrong}"
    for parameter, (operation, module) in case.refused.items():
        reasons = [(r.reason.operation, r.reason.module) for r in found.refusals if parameter in r.parameters]
        assert any(o.startswith(operation) and m == module for o, m in reasons), f"{parameter}: {reasons}"


@pytest.mark.parametrize("name", QUICK)
def test_small_models_have_the_families_worked_out_by_hand_and_each_is_proven(name):
    check(QUICK[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LONG)
def test_more_models_have_the_families_worked_out_by_hand_and_each_is_proven(name):
    check(LONG[name])


def test_inner_units_of_grouped_queries_are_query_heads_of_each_group():
    case = QUICK["llama, two query heads for each key"]
    names = {family.name: family.units for family in couplings(case.build(), case.inputs, prefer="inner")}
    assert names["model.layers.0.self_attn (q heads of each group)"] == 2


SEVEN = (32, 4096, 11008, 32, 32, 32000)
SEVENTY = (80, 8192, 28672, 64, 8, 128256)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("shape", "printed"),
    [
        (SEVEN, ["32 families of 32 units", "32 families of 11008 units", "6.7 B parameters"]),
        (SEVENTY, ["80 families of 8 units", "80 families of 28672 units", "70.6 B parameters"]),
    ],
    ids=["7 B", "70 B"],
)
def test_large_models_are_analysed_on_the_meta_device_in_little_memory(shape, printed, tmp_path):
    lines = printed_by(analyse_large_model, *shape, file=tmp_path / "printed", seconds=600)
    assert all(line in lines for line in printed), lines


def test_a_model_that_caches_is_traced_inside_of_another():
    class Wrapper(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, tokens):
            return self.model(input_ids=tokens)

    model = Wrapper(QUICK["llama, two query heads for each key"].build())
    config = model.model.config
    assert config.use_cache
    found = couplings(model, (TOKENS,))
    assert any("mlp" in family.name for family in found)
    assert config.use_cache, "the configuration is left as it was"
