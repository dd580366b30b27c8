"""check_pruned: pruned heads, neurons and channels contribute nothing, in models that others wrote."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparse_lightning import Blocks, Filters, Heads, Neurons, check_pruned
from sparse_lightning.errors import PatternError
from sparse_lightning.patterns import resolve

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61, "n_positions": 16}
MLP = {"intermediate_size": 48, "max_position_embeddings": 16}
NO_PAD = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

FAMILIES = {
    "gpt_neox": ("GPTNeoX", SIZES | MLP, Heads("*.attention"), 4),
    "gpt_neox_japanese": ("GPTNeoXJapanese", SIZES, Heads("*.attention"), 4),
    "bloom": ("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61}, Heads("*.self_attention"), 4),
    "falcon": ("Falcon", SIZES | {"multi_query": False}, Heads("*.self_attention"), 4),
    "falcon alibi": ("Falcon", SIZES | {"multi_query": False, "alibi": True}, Heads("*.self_attention"), 4),
    "falcon grouped": (
        "Falcon",
        SIZES | {"new_decoder_architecture": True, "num_kv_heads": 2},
        Heads("*.self_attention"),
        2,
    ),
    "persimmon": ("Persimmon", SIZES | MLP | NO_PAD, Heads("*.self_attn"), 4),
    "bigcode": ("GPTBigCode", GPT | {"multi_query": False}, Heads("*.attn"), 4),
    "gpt2": ("GPT2", GPT, Heads("*.attn"), 4),
    "phi3": ("Phi3", SIZES | MLP | NO_PAD | {"num_key_value_heads": 2}, Heads("*.self_attn"), 2),
    "llama": ("Llama", SIZES | MLP | {"num_key_value_heads": 2}, Heads("*.self_attn"), 2),
    "mpt": ("Mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 61}, Heads("*.attn"), 4),
    "bert": ("Bert", SIZES | MLP, Heads("encoder.layer.?.attention"), 4),
    "opt": (
        "OPT",
        SIZES | {"ffn_dim": 48, "max_position_embeddings": 16, "word_embed_proj_dim": 32},
        Heads("*.self_attn"),
        4,
    ),
}


def tiny(family, config):
    torch.manual_seed(0)
    made = getattr(transformers, f"{family}Config")(**config)
    return getattr(transformers, f"{family}Model")(made)


INPUTS = {"input_ids": torch.arange(1, 11).reshape(2, 5)}


@pytest.mark.parametrize("name", FAMILIES)
def test_pruned_heads_contribute_nothing_in_each_family(name):
    family, config, pattern, heads = FAMILIES[name]
    model = tiny(family, config)
    before = deepcopy(model.state_dict())
    differences = check_pruned(model, INPUTS, [pattern])
    assert len(differences) == 2, "one scope for each layer"
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items()), "the model itself is not changed"
    assert {each.scope.numblk_per_scope() for each in resolve([pattern], model)} == {heads}


INTERLEAVED = ["gpt_neox", "gpt_neox_japanese", "bloom", "falcon", "falcon grouped", "persimmon"]


@pytest.mark.parametrize("name", INTERLEAVED)
def test_rows_in_the_wrong_order_are_detected(name):
    family, config, _, _ = FAMILIES[name]
    wrong = Heads(qkv="*.query_key_value", out="re:(.*tion|.*attn).dense", order="qkv")
    with pytest.raises(PatternError, match=r"pruned units change what the other units compute.*order of its rows"):
        check_pruned(tiny(family, config), INPUTS, [wrong])


def test_the_wrong_order_is_detected_where_queries_come_first():
    with pytest.raises(PatternError, match="pruned units change"):
        check_pruned(tiny(*FAMILIES["gpt2"][:2]), INPUTS, [Heads("*.attn", order="head")])


def test_a_class_is_known_where_its_projections_are_named_one_by_one():
    family, config, _, _ = FAMILIES["gpt_neox"]
    check_pruned(tiny(family, config), INPUTS, [Heads(qkv="*.attention.query_key_value", out="*.attention.dense")])


class Interleaved(nn.Module):
    """An attention of one's own, under a name that says nothing about the order of rows."""

    def __init__(self, name="query_key_value"):
        super().__init__()
        self.head_dim, self.name = 4, name
        self.add_module(name, nn.Linear(16, 48))
        self.dense = nn.Linear(16, 16)

    def forward(self, x):
        made = getattr(self, self.name)(x).unflatten(-1, (4, 3, 4)).transpose(1, 2)
        return self.dense(F.scaled_dot_product_attention(*made.unbind(-2)).transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("name", ["query_key_value", "qkv"])
@pytest.mark.parametrize("named", [False, True])
def test_an_order_that_cannot_be_known_is_refused(name, named):
    """A class of nobody known may store its rows in either order, whatever its layer is called."""
    model = nn.Sequential()
    model.add_module("attn", Interleaved(name))
    pattern = Heads(qkv=f"attn.{name}", out="attn.dense") if named else Heads("attn")
    text = rf"order of the rows of attn\.{name}\.weight in Interleaved is unknown.*order='qkv'.*order='head'"
    with pytest.raises(PatternError, match=text):
        check_pruned(model, torch.randn(2, 3, 16), [pattern])
    check_pruned(model, torch.randn(2, 3, 16), [Heads("attn", order="head")])


def test_heads_of_a_known_class_in_neither_order_are_refused():
    codegen = tiny("CodeGen", GPT | {"rotary_dim": 4, "n_ctx": 16})
    with pytest.raises(PatternError, match=r"CodeGenAttention is unknown: its rows are queries, values and keys"):
        check_pruned(codegen, INPUTS, [Heads("*.attn")])


def test_an_order_that_does_not_exist_raises():
    with pytest.raises(PatternError, match=r"order='rows' is not an order of rows: pass 'qkv' or 'head'"):
        Heads("attn", order="rows")


def test_neurons_and_filters_are_checked_too():
    mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    assert max(check_pruned(mlp, (torch.randn(3, 4),), [Neurons("0", "2")]).values()) < 1e-5
    cnn = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    check_pruned(cnn, torch.randn(2, 3, 9, 9), [Filters("0", norm="1", into="3")])


def test_a_layer_between_that_mixes_units_is_detected():
    mlp = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    with pytest.raises(PatternError, match=r"0 \(neurons\): pruned units change"):
        check_pruned(mlp, torch.randn(3, 4), [Neurons("0", "2")])


def test_nothing_to_check_raises():
    with pytest.raises(PatternError, match="couple no layers"):
        check_pruned(nn.Linear(4, 4), torch.randn(1, 4), [Blocks("weight", (2, 2))])


def test_inputs_that_do_not_reach_the_units_raise():
    mlp = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.Dropout(0.0))
    mlp[2].forward = torch.zeros_like
    with pytest.raises(PatternError, match="pass inputs that use these layers"):
        check_pruned(mlp, torch.randn(1, 4), [Neurons("0", "1")])


NORMS = [nn.BatchNorm2d(8), nn.SyncBatchNorm(8), nn.InstanceNorm2d(8, affine=True)]
MIXING = [nn.GroupNorm(2, 8), nn.GroupNorm(8, 8), nn.LayerNorm(8), nn.RMSNorm(8), nn.Linear(8, 8)]


def with_norm(norm):
    return nn.Sequential(nn.Conv2d(3, 8, 3), deepcopy(norm), nn.ReLU(), nn.Conv2d(8, 4, 3))


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: type(norm).__name__)
@pytest.mark.parametrize("into", [None, "3"])
def test_filters_with_a_norm_that_treats_channels_apart(norm, into):
    check_pruned(with_norm(norm), torch.randn(2, 3, 9, 9), [Filters("0", norm="1", into=into)])


@pytest.mark.parametrize("norm", MIXING, ids=lambda norm: type(norm).__name__)
def test_filters_with_a_norm_over_several_channels_are_refused(norm):
    text = rf"norm='1'.*: 1 is a {type(norm).__name__}, .*statistics over several channels.*omit norm"
    with pytest.raises(PatternError, match=text):
        resolve([Filters("0", norm="1", into="3")], with_norm(norm))
