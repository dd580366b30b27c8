"""Models of ten families of transformers: pruned heads and neurons contribute nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from sparse_lightning import Heads, Neurons, Sparsifier, check_pruned
from sparse_lightning.errors import PatternError
from sparse_lightning.patterns import resolve

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61, "intermediate_size": 24}
MOE = {**SIZES, "num_key_value_heads": 2, "moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 4}
NO_PAD = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = [Heads("*.self_attn"), Neurons("*.experts.gate_up_proj", "*.experts.down_proj")]
SHARED = Neurons("*.shared_expert.up_proj", "*.shared_expert.down_proj", gate="*.shared_expert.gate_proj")

CONFIGS = {
    "Bert": SIZES,
    "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 61, "n_positions": 16},
    "Llama": {**SIZES, "num_key_value_heads": 2},
    "ViT": {**{k: v for k, v in SIZES.items() if k != "vocab_size"}, "image_size": 8, "patch_size": 4},
    "T5": {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": 61},
    "Mixtral": {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 4},
    "Qwen2Moe": {**MOE, "shared_expert_intermediate_size": 20},
    "Qwen3Moe": {**MOE, "head_dim": 4},
    "OPT": {**SIZES, "ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": 16},
    "Phi3": {**SIZES, **NO_PAD, "num_key_value_heads": 2},
}
PATTERNS = {
    "Mixtral": EXPERTS,
    "Qwen2Moe": [*EXPERTS, SHARED],
    "Qwen3Moe": EXPERTS,
    "OPT": [Heads("*.self_attn"), Neurons("*.fc1", "*.fc2")],
    "Phi3": [Heads("*.self_attn"), Neurons("*.gate_up_proj", "*.down_proj")],
}


def documented() -> dict[str, list]:
    """Return the patterns of the page, by family."""
    page = Path(__file__).parents[1].joinpath("docs", "adding-a-pattern.md").read_text()
    [code] = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "HUGGING_FACE" in code]
    made: dict = {}
    exec(code, made)
    return made["HUGGING_FACE"]


def tiny(family):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**CONFIGS[family])
    return getattr(transformers, f"{family}Model")(config)


def inputs(family):
    if family == "ViT":
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))}
    ids = torch.arange(1, 11).reshape(2, 5)
    return {"input_ids": ids, "decoder_input_ids": ids} if family == "T5" else {"input_ids": ids}


def check_family(family):
    patterns = {**PATTERNS, **documented()}[family]
    differences = check_pruned(tiny(family), inputs(family), patterns)
    layers = 4 if family == "T5" else 2
    assert len(differences) == layers * len(patterns), "one scope for each layer and pattern"


def test_the_page_shows_five_families():
    assert set(documented()) == {"Bert", "GPT2", "Llama", "ViT", "T5"}


@pytest.mark.parametrize("family", ["Bert", "T5", "Qwen2Moe"])
def test_pruned_units_contribute_nothing(family):
    check_family(family)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", CONFIGS)
def test_pruned_units_contribute_nothing_in_all_families(family):
    check_family(family)


def test_the_error_shows_expressions_that_work():
    bert = tiny("Bert")
    with pytest.raises(
        PatternError, match=r"attention\.output\.dense has no partner in up.*also matches dots"
    ) as caught:
        resolve([Neurons("*.intermediate.dense", "*.output.dense")], bert)
    shown = dict(re.findall(r"(up|down)='(re:[^']*)'", str(caught.value).replace("\\\\", "\\")))
    assert len(resolve([Neurons(**shown)], bert)) == 2
    with pytest.raises(PatternError, match=r"Use globs whose wildcards match the same text"):
        resolve([Neurons("*.intermediate.dense", "embeddings.*")], bert)


def test_experts_are_pruned_alike_and_one_by_one():
    """Each expert keeps the same number of neurons, and which ones differs from expert to expert."""
    model = tiny("Mixtral")
    ours = Sparsifier(EXPERTS[1], 0.5, "magnitude")
    ours.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ours.update_now()
    experts = model.layers[0].mlp.experts
    [mask, _] = [mask.reshape(4, 24) for mask in ours.masks.values()]
    assert (mask.sum(1) == 12).all()
    assert len({tuple(row.tolist()) for row in mask}) > 1
    fused = experts.gate_up_proj.unflatten(1, (2, 24))
    assert torch.equal((fused == 0).all(3).all(1), mask)
    assert torch.equal((experts.down_proj == 0).all(1), mask)


@pytest.mark.parametrize("family", ["GptOss", "Llama4Text"])
def test_experts_in_other_orders(family):
    """Transposed, with gates and values that alternate and biases; and transposed without a word about it."""
    torch.manual_seed(0)
    if family == "GptOss":
        config = {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 4, "head_dim": 4}
        model = transformers.GptOssModel(transformers.GptOssConfig(**config))
    else:
        config = {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 4, "head_dim": 4}
        made = transformers.Llama4TextConfig(**config, intermediate_size_mlp=24)
        model = transformers.models.llama4.modeling_llama4.Llama4TextModel(made)
    check_pruned(model, {"input_ids": torch.arange(1, 11).reshape(2, 5)}, EXPERTS[1])


def test_experts_that_do_not_fit_raise():
    model = tiny("Mixtral")
    with pytest.raises(PatternError, match=r"experts of .*\(4, 16, 24\).* do not fit: up and gate must have the shape"):
        resolve([Neurons("*.experts.down_proj", "*.experts.gate_up_proj")], model)
