"""LoRA of PEFT on pruned weights: zeros of merged models, equal outputs, what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from sparse_lightning import (
    NM,
    Blocks,
    Constant,
    Coupled,
    Cubic,
    Heads,
    Magnitude,
    Neurons,
    PatternError,
    Refit,
    Sparsifier,
    compact,
    couplings,
    prune,
)
from sparse_lightning.patterns import resolve
from sparse_lightning.patterns.names import plain_name

pytestmark = [
    # PEFT notices by itself which layers have their inputs first.
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to"),
    # PEFT reads the former name of an attribute of transformers.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]


class Attention(nn.Module):
    """Self-attention with separate projections, as in most pretrained models."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.num_heads = heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.o_proj = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in self._projections())
        return self.o_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def _projections(self):
        return self.q_proj, self.k_proj, self.v_proj


class Model(nn.Module):
    """An attention and an MLP, whose second layer may have its inputs first."""

    def __init__(self, transposed=False):
        super().__init__()
        self.attn, self.up = Attention(), nn.Linear(16, 24)
        self.down = Conv1D(16, 24) if transposed else nn.Linear(24, 16)

    def forward(self, x):
        return self.down(torch.relu(self.up(x + self.attn(x))))


TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "up", "down"]
PATTERNS = {
    "units": [Neurons("up", "down"), Heads("attn")],
    "rows and columns": [Blocks("attn.q_proj.weight", (2, -1)), Blocks("attn.o_proj.weight", (-1, 4))],
    "tiles": [Blocks(["up.weight", "attn.*.weight"], (4, 4)), Blocks("down.weight", (4, 4))],
    "groups": [NM(["up.weight", "down.weight"])],
    "mixed": [Neurons("up", "down"), Blocks("attn.*.weight", (4, 4))],
}


def adapted(model, **changes):
    """Return a model with adapters that are not zero."""
    options = {"r": 3, "target_modules": TARGETS, "lora_dropout": 0.0, **changes}
    wrapped = get_peft_model(model, LoraConfig(**options))
    for name, param in wrapped.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param, std=0.1)
    return wrapped


def train(model, sparsifier, steps=6):
    """Train the adapters, and only them."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.01)
    sparsifier.attach(model, optimizer, steps)
    x = torch.randn(8, 5, 16)
    for _ in range(steps):
        (model(x) - x).square().mean().backward()
        sparsifier.before_step()
        optimizer.step()
        optimizer.zero_grad()


def pruned_weights(model, patterns, masks):
    """Return for each base weight which of its elements are pruned, by name, from the masks of blocks."""
    found = {}
    names = {id(param): name for name, param in model.named_parameters()}
    for attachment in resolve(patterns, model):
        for name, block in attachment.scope.named_blocks(attachment.name).items():
            for spec, elements in block.get_masks(masks[name]).items():
                mask = found.setdefault(names[id(spec.param)], torch.zeros(spec.param.shape, dtype=torch.bool))
                spec.view.like(mask).data = spec.view.like(mask).read() | elements
    return found


@pytest.mark.parametrize("kind", PATTERNS)
@pytest.mark.parametrize("transposed", [False, True], ids=["linear", "inputs first"])
@pytest.mark.parametrize("start", ["gradual", "masks"])
def test_a_merged_model_has_the_zeros_and_outputs_of_the_trained_one(kind, transposed, start):
    patterns, model = PATTERNS[kind], Model(transposed)
    options = {"schedule": Cubic(0.5, begin=0, end=4), "update_every": 2}
    if start == "masks":
        seen = [torch.randn(8, 5, 16)]
        masks = prune(model, patterns, 0.5, seen, "magnitude", progress=False)
        options = {"schedule": Constant(0.5), "masks": masks}
    plain = copy.deepcopy(model)
    wrapped = adapted(model)
    keys = list(wrapped.state_dict())
    sparsifier = Sparsifier(patterns, criterion=Magnitude(), **options)
    train(wrapped, sparsifier)
    masks = {name: mask.clone() for name, mask in sparsifier.masks.items()}
    sparsifier.detach()
    assert list(wrapped.state_dict()) == keys
    x = torch.randn(3, 5, 16)
    with torch.no_grad():
        trained = wrapped(x)
        merged = wrapped.merge_and_unload()
        torch.testing.assert_close(merged(x), trained, rtol=1e-6, atol=1e-6)
    assert list(merged.state_dict()) == list(plain.state_dict())
    elements = pruned_weights(merged, patterns, masks)
    assert elements
    for name, mask in elements.items():
        value = merged.get_parameter(name)[mask]
        assert mask.any()
        assert not value.any(), f"{name} is not zero where it is pruned"
        assert not value.signbit().any()
        changed = merged.get_parameter(name)[~mask] != plain.get_parameter(name)[~mask]
        assert name.endswith("bias") or changed.float().mean() > 0.9, f"{name} was not adapted"


@pytest.mark.parametrize("kind", ["units", "tiles"])
def test_an_adapter_that_is_merged_and_unmerged_gives_the_same_outputs(kind):
    wrapped = adapted(Model())
    sparsifier = Sparsifier(PATTERNS[kind], Constant(0.5), Magnitude(), update_every=1)
    train(wrapped, sparsifier, 2)
    x = torch.randn(3, 5, 16)
    with torch.no_grad():
        before = wrapped(x)
        wrapped.merge_adapter(safe_merge=True)
        torch.testing.assert_close(wrapped(x), before, rtol=1e-5, atol=1e-6)
        wrapped.unmerge_adapter()
        torch.testing.assert_close(wrapped(x), before, rtol=1e-5, atol=1e-6)


def test_coupled_units_need_no_masked_product_and_tiles_do():
    wrapped = adapted(Model())
    optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], 0.1)
    for kind, expected in (("units", set()), ("rows and columns", set()), ("mixed", {"q_proj", "k_proj", "v_proj"})):
        sparsifier = Sparsifier(PATTERNS[kind], Constant(0.5), Magnitude())
        sparsifier.attach(wrapped, optimizer)
        masked = {name.rpartition(".")[2] for name, m in wrapped.named_modules() if getattr(m, "lora_variant", None)}
        assert masked >= expected
        assert bool(masked) == bool(expected), "a product that factors is masked"
        sparsifier.detach()


def test_the_rows_and_columns_of_adapters_are_pieces_of_the_same_block():
    wrapped = adapted(Model())
    [found] = resolve([Neurons("up", "down")], wrapped)
    [block] = found.scope.blocks()
    sizes = {spec.name: tuple(spec.view.shape) for spec in block.blocks()}
    assert sizes["up.weight (lora_B default)"] == (24, 3)
    assert sizes["down.weight (lora_A default)"] == (24, 3)
    assert {spec.name for spec in block.readers()} == {"down.weight", "down.weight (lora_A default)"}


def test_a_model_is_pruned_in_one_call_with_its_adapters():
    wrapped = adapted(Model())
    x = torch.randn(64, 5, 16)
    masks = prune(wrapped, PATTERNS["mixed"], 0.5, [x], "wanda", Refit(), step=lambda m, b: m(b), progress=False)
    merged = wrapped.merge_and_unload()
    for name, mask in pruned_weights(merged, PATTERNS["mixed"], masks).items():
        assert not merged.get_parameter(name)[mask].any()


def test_what_cannot_be_kept_sparse_is_refused():
    x = torch.randn(2, 5, 16)
    with pytest.raises(PatternError, match=r"up\.weight has the DoRA adapter 'default', which divides"):
        resolve([Neurons("up", "down")], adapted(Model(), use_dora=True))
    wrapped = adapted(Model())
    sparsifier = Sparsifier([Neurons("up", "down")], Constant(0.5), Magnitude(), update_every=1)
    train(wrapped, sparsifier, 1)
    wrapped.add_adapter("late", LoraConfig(r=2, target_modules=["up"]))
    with pytest.raises(PatternError, match=r"the adapter 'late' was added to up\.weight after a Sparsifier"):
        sparsifier.update_now()
    other = adapted(Model())
    other.merge_adapter()
    with pytest.raises(PatternError, match="is merged: unmerge it"):
        resolve([Neurons("up", "down")], other)
    assert torch.isfinite(other(x)).all()


class HandMade(nn.Module):
    """An adapter that is not PEFT's."""

    def __init__(self, layer, rank=2):
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, layer.out_features, bias=True)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def test_adapters_of_others_are_factored_and_their_tiles_refused():
    model = nn.ModuleDict({"up": HandMade(nn.Linear(8, 12)), "down": HandMade(nn.Linear(12, 8))})
    [found] = resolve([Neurons("up", "down")], model)
    names = [spec.name for spec in found.scope.blocks()[0].blocks()]
    assert {"up.weight (lora_B default)", "up.weight (lora_B default bias)", "down.weight (lora_A default)"} <= set(
        names
    )
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    with pytest.raises(PatternError, match=r"adapters of up\.weight cannot be masked: HandMade has no lora_variant"):
        Sparsifier([Blocks("up.weight", (4, 4))], Constant(0.5), Magnitude()).attach(model, optimizer)


class Perceptron(nn.Module):
    """Three layers: the weight in the middle belongs to units of both sides."""

    def __init__(self):
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(16, 24), nn.Linear(24, 20), nn.Linear(20, 16)

    def forward(self, x):
        return self.down(torch.relu(self.middle(torch.relu(self.up(x)))))


def llama():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TRACED = {
    "perceptron": (Perceptron, ["up", "middle", "down"], (torch.randn(2, 16),)),
    "llama": (llama, LLAMA, {"input_ids": torch.arange(10).reshape(2, 5)}),
}


def base_slices(found):
    """The units of each family, with its slices of weights that are not those of adapters."""
    return {each.name: (each.units, [s for s in map(str, each.slices) if "lora_" not in s]) for each in found}


@pytest.mark.parametrize("kind", TRACED)
def test_the_families_of_a_model_with_adapters_are_those_of_the_plain_one(kind):
    make, targets, inputs = TRACED[kind]
    plain = couplings(make(), inputs)
    found = couplings(adapted(make(), target_modules=targets), inputs)
    assert base_slices(found) == base_slices(plain)
    assert all("lora_" in str(each.slices) for each in found), "adapters belong to the units of their layers"
    assert "base_" not in str(found)
    assert "adapter in" in str(found)
    assert "its rank is not a unit of the model" in str(found)
    found.verify()


def test_coupled_units_have_the_elements_of_the_hand_written_patterns_with_adapters():
    wrapped = adapted(llama(), target_modules=LLAMA)
    written = [Heads("*.self_attn"), Neurons("*.up_proj", "*.down_proj", gate="*.gate_proj")]
    assert elements(wrapped, [Coupled(inputs=TRACED["llama"][2])]) == elements(wrapped, written)


def elements(model, patterns):
    """The elements of each unit, as names of parameters with offsets."""
    names = {id(param): name for name, param in model.named_parameters()}
    units = []
    for found in resolve(patterns, model):
        [block] = found.scope.blocks()
        parts = [(names[id(s.param)], s.view.layout.on(torch.arange(s.param.numel()))) for s in block.blocks()]
        for unit in range(found.scope.numblk_per_scope()):
            units.append(frozenset((name, int(i)) for name, offsets in parts for i in offsets[unit].flatten()))
    return set(units)


def steps(model, sparsifier, inputs, count):
    """Train the adapters for some steps."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5)
    sparsifier.attach(model, optimizer, 6)
    for _ in range(count):
        step(model, sparsifier, inputs, optimizer)
    return optimizer


def step(model, sparsifier, inputs, optimizer):
    logits(model, inputs).square().mean().backward()
    sparsifier.before_step()
    optimizer.step()
    optimizer.zero_grad()


def logits(model, inputs):
    made = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    return getattr(made, "logits", made)


@pytest.mark.parametrize("kind", ["perceptron", pytest.param("llama", marks=pytest.mark.exhaustive)])
def test_coupled_units_of_a_merged_model_are_zero_and_compact_removes_them_also_after_a_resume(kind):
    make, targets, inputs = TRACED[kind]
    patterns = [Coupled(inputs=inputs)]
    whole, resumed = (Sparsifier(patterns, Cubic(0.5, begin=0, end=4), Magnitude(), update_every=2) for _ in range(2))
    wrapped = adapted(make(), target_modules=targets)
    again = copy.deepcopy(wrapped)
    optimizer = steps(wrapped, whole, inputs, 3)
    again.load_state_dict(wrapped.state_dict())
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    for _ in range(3):
        step(wrapped, whole, inputs, optimizer)
    steps(again, resumed, inputs, 3)
    for name, value in wrapped.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), f"{name} differs after a resume"

    pruned = pruned_weights(wrapped, patterns, whole.masks)
    whole.detach()
    trained = logits(wrapped.eval(), inputs).detach()
    for name, mask in pruned.items():
        assert mask.any()
        assert not wrapped.get_parameter(name)[mask].any(), f"{name} is not zero where it is pruned"
    merged = wrapped.merge_and_unload()
    base = {plain_name(name): mask for name, mask in pruned.items() if "lora_" not in name}
    assert {name.split(".")[-2] for name in base} == set(targets)
    for name, mask in base.items():
        assert not merged.get_parameter(name)[mask].any(), f"{name} of the merged model is not zero where it is pruned"
    small = compact(merged, inputs)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in merged.parameters())
    with torch.no_grad():
        torch.testing.assert_close(logits(merged, inputs), trained, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(logits(small, inputs), trained, rtol=1e-5, atol=1e-6)


def test_masks_of_coupled_units_from_before_the_adapters_fit():
    patterns = [Coupled("up *", inputs=TRACED["perceptron"][2])]
    model = Perceptron()
    masks = prune(model, patterns, 0.5, [], "magnitude", progress=False)
    wrapped = adapted(model, target_modules=["up", "middle"])
    sparsifier = Sparsifier(patterns, Constant(0.5), Magnitude(), masks=masks)
    steps(wrapped, sparsifier, TRACED["perceptron"][2], 2)
    sparsifier.detach()
    mask = next(iter(masks.values())).flatten()
    merged = wrapped.merge_and_unload()
    assert not merged.up.weight[mask].any()
    assert not merged.middle.weight[:, mask].any()


def test_coupled_units_have_the_slices_of_adapters_that_are_not_active():
    wrapped = adapted(Perceptron(), target_modules=["up"])
    wrapped.add_adapter("other", LoraConfig(r=2, target_modules=["up", "middle"]))
    found = resolve([Coupled(inputs=TRACED["perceptron"][2])], wrapped)
    names = [{spec.name for spec in each.scope.blocks()[0].blocks() if "lora_" in spec.name} for each in found]
    units = {"up.weight (lora_B default)", "up.weight (lora_B other)", "middle.weight (lora_A other)"}
    assert names == [units, {"middle.weight (lora_B other)"}]


class Embedded(nn.Module):
    """Units that an embedding computes."""

    def __init__(self):
        super().__init__()
        self.embed, self.down = nn.Embedding(9, 12), nn.Linear(12, 4)

    def forward(self, ids):
        return self.down(torch.relu(self.embed(ids)))


def test_adapters_of_an_embedding_are_pruned_with_its_units():
    wrapped = get_peft_model(Embedded(), LoraConfig(r=2, target_modules=["embed", "down"]))
    nn.init.normal_(wrapped.base_model.model.embed.lora_embedding_A["default"])
    ids = (torch.arange(8).reshape(2, 4),)
    patterns = [Coupled(inputs=ids)]
    assert [found.name for found in resolve(patterns, wrapped)] == [
        found.name for found in resolve(patterns, Embedded())
    ]
    sparsifier = Sparsifier(patterns, Constant(0.5), Magnitude(), update_every=1)
    steps(wrapped, sparsifier, ids, 3)
    mask = next(iter(sparsifier.masks.values())).flatten()
    sparsifier.detach()
    merged = wrapped.merge_and_unload()
    assert int(mask.sum()) == 6
    assert not merged.embed.weight[:, mask].any()
    assert not merged.down.weight[:, mask].any()
