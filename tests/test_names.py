"""Names: plain names through every wrapper, and globs that return the text of their wildcards."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sparse_lightning.errors import PatternError
from sparse_lightning.patterns.names import Names, captures, matches, nearest, plain_name

WRAPPERS = ["_orig_mod", "base_layer", "base_model.model", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"]
PARTS = st.sampled_from(["layers", "0", "1", "attn", "q_proj", "weight", "model", "lora_A", "my_orig_mod"])


@given(st.text("ab.[]!-*?^\\(", max_size=8), st.text("ab.[]-^", max_size=6))
def test_globs_are_those_of_fnmatch(pattern, name):
    assert matches(pattern, name) == fnmatchcase(name, pattern)


@given(st.lists(st.tuples(st.sampled_from(["*", "?", "[ab]"]), st.text("ab.", max_size=2)), max_size=3))
def test_captures_put_in_place_of_the_wildcards_give_the_name(pieces):
    pattern = "".join(wildcard + text for wildcard, text in pieces)
    for name in ["a", "ab", "a.b", "ba.b.ab", "abab", "b."]:
        caught = captures(pattern, name)
        assert (caught is not None) == fnmatchcase(name, pattern)
        if caught is not None and "**" not in pattern:
            assert "".join(x + text for x, (_, text) in zip(caught, pieces, strict=True)) == name


def test_a_regular_expression_matches_the_whole_name():
    assert captures(r"re:layers\.(\d+)\.up", "layers.12.up") == ("12",)
    assert not matches(r"re:layers\.\d", "layers.12")
    assert captures(r"re:(a)?b", "b") == ("",)
    with pytest.raises(PatternError, match=r"'re:\(' is not a regular expression"):
        matches("re:(", "a")


@given(st.lists(PARTS, min_size=1, max_size=5), st.data())
def test_wrappers_leave_no_trace_in_plain_names(parts, data):
    plain = ".".join(parts)
    wrapped = list(parts)
    for wrapper in data.draw(st.lists(st.sampled_from(WRAPPERS), max_size=3)):
        at = data.draw(st.integers(0, len(wrapped)))
        wrapped[at:at] = [wrapper]
    assert plain_name(".".join(wrapped)) == plain
    assert plain_name(plain) == plain


class LoRA(nn.Module):
    """A linear layer wrapped as PEFT does it."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})


class Peft(nn.Module):
    """`base_model.model` around a model, as PEFT has it."""

    def __init__(self, model):
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model


def mlp():
    return nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})


def test_peft_wrapping_keeps_plain_names():
    plain, model = Names(mlp()), mlp()
    model["up"] = LoRA(model["up"])
    names = Names(Peft(model))
    for pattern in ("*", "up.*", "*.weight", "re:(up|down)\\.bias"):
        assert names.find(pattern) == plain.find(pattern)
    assert isinstance(names.modules["up"], nn.Linear)


def test_lora_has_its_own_names_and_is_found_by_them_only():
    names = Names(nn.ModuleDict({"up": LoRA(nn.Linear(4, 8))}))
    assert list(names.parameters) == ["up.weight", "up.bias", "up.lora_A.default.weight", "up.lora_B.default.weight"]
    assert list(names.find("*.weight")) == ["up.weight"]
    assert list(names.find("*.lora_A.*")) == ["up.lora_A.default.weight"]


def test_full_names_match_too():
    names = Names(nn.ModuleDict({"up": LoRA(nn.Linear(4, 8))}))
    assert list(names.find("up.base_layer.weight")) == ["up.weight"]


def test_compiled_models_keep_plain_names():
    model = mlp()
    compiled = nn.ModuleDict({"net": torch.compile(model)})
    names = Names(compiled)
    assert list(names.parameters) == [f"net.{name}" for name, _ in model.named_parameters()]
    assert names.modules["net"] is model
    assert list(Names(torch.compile(model)).parameters) == [name for name, _ in model.named_parameters()]


def test_a_tied_parameter_has_all_its_names():
    model = nn.ModuleDict({"embedding": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embedding"].weight
    names = Names(model)
    assert names.parameters["embedding.weight"] is names.parameters["head.weight"]
    assert names.name_of(model["head"].weight) == "embedding.weight"


def test_two_parameters_of_one_plain_name_keep_their_full_names():
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(2))
    model.base_layer = nn.Linear(2, 2, bias=False)
    assert list(Names(model).parameters) == ["weight", "base_layer.weight"]


def test_the_nearest_name_is_one_that_matches():
    known = ["layers.0.mlp.up.weight", "layers.0.mlp.down.weight", "layers.11.mlp.up.weight", "head.weight"]
    hint = nearest("*.mpl.up.weight", known)
    assert hint == ": did you mean '*.mlp.up.weight'?"
    assert nearest("*.mpl.*", known) == ": did you mean '*.mlp.*'?"
    assert nearest("haed.weight", known) == ": did you mean 'head.weight'?"
    assert nearest("zzzz", known) == f": there are {', '.join(map(repr, known))}"
