"""Shrink: pruned units are removed while a model trains, and nothing changes but its sizes."""

from __future__ import annotations

import copy
from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest
import torch
from graph_models import PLAIN, SIZES_IN_CODE, hugging_face
from hypothesis import given, settings
from hypothesis import strategies as st
from law_examples import EXAMPLES
from torch import nn

import sparse_lightning as sl
from sparse_lightning import Coupled, Cubic, Heads, Magnitude, Neurons, Shrink, Sparsifier
from sparse_lightning.compaction import kept_indices
from sparse_lightning.compaction.kept_indices import KeptIndices, change
from sparse_lightning.compaction.shrunk_model import ShrunkModel
from sparse_lightning.errors import CheckpointError, InputsWarning, PatternError, SparseLightningError, SparsityError
from sparse_lightning.graph import couplings
from sparse_lightning.layout import Layout
from sparse_lightning.layout.cutting import cut_layout

STEPS, RAMP = 12, {"begin": 1, "end": 8}
MODELS = {name: (case.build, case.inputs) for name, case in PLAIN.items() if case.units and name not in SIZES_IN_CODE}
SIZES = {"vocab_size": 32, "hidden_size": 32, "max_position_embeddings": 32, "intermediate_size": 24}
TOKENS = {"input_ids": torch.arange(14).view(2, 7)}
LLAMA = {**SIZES, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4}
HUGGING_FACE = {
    "llama": (hugging_face("LlamaForCausalLM", **LLAMA), TOKENS),
    "bert": (hugging_face("BertModel", **SIZES, num_hidden_layers=1, num_attention_heads=4), TOKENS),
    "gpt2": (hugging_face("GPT2LMHeadModel", vocab_size=32, n_embd=16, n_layer=1, n_head=4, n_positions=32), TOKENS),
}
EVERY = {**MODELS, **HUGGING_FACE}


OPTIMIZERS = [  # gradients that are zero but for rounding, as of biases before a norm, have no effect
    lambda p: torch.optim.AdamW(p, 0.01, eps=1e-3),
    lambda p: torch.optim.Adam(p, 0.01, eps=1e-3, amsgrad=True, fused=True),
    lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
    lambda p: torch.optim.RMSprop(p, 0.01, eps=1e-3),
]


class Run:
    """A model in double precision, its optimizer and a Sparsifier, in a loop of its own."""

    def __init__(self, build, inputs, shrink=None, optimizer=None, patterns=None, state=None, **parts):
        torch.manual_seed(1)
        self.model = build().double().train()
        for module in self.model.modules():  # a mask of dropout is drawn for another shape
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0
        self.inputs = _doubled(inputs)
        self.optimizer = (optimizer or OPTIMIZERS[0])(self.model.parameters())
        found = patterns or [Coupled(inputs=self.inputs)]
        options = {"schedule": Cubic(0.7, **RAMP), "update_every": 2, **parts}
        self.sparsifier = Sparsifier(found, shrink=shrink, **options)
        if state is not None:
            self.load(state)
        self.sparsifier.attach(self.model, self.optimizer, total_steps=STEPS)

    def load(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.sparsifier.load_state_dict(state["sparsifier"])

    def state(self):
        parts = {"model": self.model, "optimizer": self.optimizer, "sparsifier": self.sparsifier}
        return copy.deepcopy({name: part.state_dict() for name, part in parts.items()})

    def step(self):
        i = self.sparsifier.step
        made = self.model(*self.inputs) if isinstance(self.inputs, tuple) else self.model(**self.inputs)
        loss = sum((leaf * _like(leaf, i)).sum() for leaf in _tensors(made))
        loss.backward()
        self.sparsifier.before_step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def sizes(self):
        return sum(p.numel() for p in self.model.parameters())


def _doubled(inputs):
    if isinstance(inputs, dict):
        return inputs
    return tuple(t.double() if t.is_floating_point() else t for t in inputs)


def _tensors(made):
    leaves = torch.utils._pytree.tree_leaves(made)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _like(leaf, i):
    return torch.randn(leaf.shape, dtype=leaf.dtype, generator=torch.Generator().manual_seed(i))


def tensors_in(state, place=""):
    if isinstance(state, torch.Tensor):
        yield place, state
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from tensors_in(value, f"{place}/{key}")


def check_near(one, other):
    """Both are whole, and equal up to the order of sums; statistics of removed channels are what they were."""
    found, wanted = dict(tensors_in(one)), dict(tensors_in(other))
    assert found.keys() == wanted.keys()
    for place, value in found.items():
        assert value.shape == wanted[place].shape, f"{place} is not whole"
        if "running_" not in place:
            assert torch.allclose(value.double(), wanted[place].double(), rtol=1e-7, atol=1e-9), place


@pytest.mark.parametrize("name", EVERY)
def test_a_run_that_shrinks_is_the_run_that_does_not(name):
    plain, small = (Run(*EVERY[name], shrink) for shrink in (None, Shrink(at_least=0.0)))
    whole, sizes = plain.sizes(), []
    for _ in range(STEPS):
        assert small.step() == pytest.approx(plain.step(), rel=1e-9, abs=1e-9)
        assert all(torch.equal(mask, small.sparsifier.masks[n]) for n, mask in plain.sparsifier.masks.items())
        assert small.sparsifier.sparsity() == plain.sparsifier.sparsity()
        assert small.sparsifier.sparsities() == plain.sparsifier.sparsities()
        check_near(small.state()["model"], plain.state()["model"])
        check_near(small.state()["optimizer"], plain.state()["optimizer"])
        sizes.append(small.sizes())
    assert all(after <= before for before, after in pairwise(sizes))
    assert sizes[-1] < whole, "nothing was removed"
    plain.sparsifier.detach()
    small.sparsifier.detach()
    assert small.sizes() == whole
    assert str(small.model) == str(plain.model), "sizes of modules are those of the whole model again"
    assert vars(small.model).keys() == vars(plain.model).keys()
    check_near(dict(small.model.named_parameters()), dict(plain.model.named_parameters()))


MLP = PLAIN["mlp"].build, PLAIN["mlp"].inputs
CONV = PLAIN["residual"].build, PLAIN["residual"].inputs
CRITERIA = [None, sl.Magnitude(), sl.Taylor(), sl.Movement(), sl.Random(), sl.EMA(sl.Fisher(), 0.8)]


@settings(max_examples=max(5, EXAMPLES // 6))  # each traces two models
@given(
    st.sampled_from([MLP, CONV]),
    st.sampled_from(CRITERIA),
    st.sampled_from([None, sl.Global(), sl.ERK(), sl.LAMP(), sl.Uniform(multiple_of=2)]),
    st.sampled_from(OPTIMIZERS),
    st.sampled_from([0.0, 0.1, 0.3, 0.9]),
    st.sampled_from([0.3, 0.7, 1.0]),
    st.integers(1, 4),
)
def test_whatever_scores_splits_and_trains(case, criterion, budget, optimizer, at_least, final, every):
    """Law: masks are the same, weights equal up to the order of sums, from no pruning to all."""
    parts = {"criterion": criterion, "budget": budget, "optimizer": optimizer, "update_every": every}
    parts["schedule"] = Cubic(final, **RAMP)
    plain, small = (Run(*case, shrink, **parts) for shrink in (None, Shrink(at_least=at_least)))
    for _ in range(STEPS):
        plain.step()
        small.step()
    assert all(torch.equal(mask, small.sparsifier.masks[n]) for n, mask in plain.sparsifier.masks.items())
    check_near(small.state()["model"], plain.state()["model"])
    check_near(small.state()["optimizer"], plain.state()["optimizer"])


@pytest.mark.parametrize("criterion", [sl.Wanda(), sl.OBS(), sl.AdamFisher()], ids=["wanda", "obs", "adam"])
@pytest.mark.parametrize("compensation", [None, sl.Refit(1e-7)], ids=["plain", "refit"])
def test_inputs_of_layers_are_observed_in_the_smaller_model(criterion, compensation):
    parts = {"criterion": criterion, "compensation": compensation, "patterns": [Neurons("0", "2"), Neurons("2", "4")]}
    many = (torch.randn(64, 4),)
    shrink = Shrink(many, at_least=0.0)
    plain, small = (Run(MLP[0], many, shrink if smaller else None, **parts) for smaller in (False, True))
    for _ in range(STEPS):
        plain.step()
        small.step()
        assert all(torch.equal(mask, small.sparsifier.masks[n]) for n, mask in plain.sparsifier.masks.items())
    # Gram matrices are damped by the mean of the inputs that are there, so that refitted weights differ a little.
    near = 1e-9 if compensation is None else 1e-4
    found, wanted = small.state()["model"], plain.state()["model"]
    assert all(float((found[n] - wanted[n]).abs().max()) <= near * float(wanted[n].abs().max()) for n in wanted)
    assert small.sizes() < plain.sizes()


ORDERS = [
    ("model", "optimizer", "sparsifier"),
    ("sparsifier", "optimizer", "model"),
    ("optimizer", "sparsifier", "model"),
]


@pytest.mark.parametrize("criterion", [None, sl.Wanda()], ids=["taylor", "wanda"])
@pytest.mark.parametrize("order", [None, *ORDERS], ids=lambda order: "before" if order is None else "-".join(order))
@pytest.mark.parametrize("stop", [1, 4, 5, 9])
def test_a_run_resumes_bit_for_bit(stop, order, criterion):
    """Law: k steps, a new process and n − k steps are n steps, whatever is loaded first."""
    parts = {"criterion": criterion, "patterns": [Neurons("0", "2"), Neurons("2", "4")]}
    made = [Run(*MLP, Shrink(MLP[1]), **parts) for _ in range(2 if order else 1)]
    for _ in range(stop):
        made[0].step()
    saved = made[0].state()
    if order is None:
        made.append(Run(*MLP, Shrink(MLP[1]), state=saved, **parts))
    for name in order or ():
        part = {"model": made[1].model, "optimizer": made[1].optimizer, "sparsifier": made[1].sparsifier}[name]
        part.load_state_dict(saved[name])
    for _ in range(STEPS - stop):
        made[0].step()
        made[1].step()
    one, other = (dict(tensors_in(run.state())) for run in made)
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[place]) for place, value in one.items())
    assert made[0].sizes() == made[1].sizes()


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
def test_inputs_of_other_sizes_are_not_forgotten_without_a_word(before, after):
    parts = {"criterion": sl.Wanda(), "patterns": [Neurons("0", "2"), Neurons("2", "4")], "update_every": 4}
    run, other, same = (
        Run(*MLP, Shrink(MLP[1], at_least=0.0) if small else None, **parts) for small in (before, after, before)
    )
    while not (run.state()["sparsifier"]["input_norms"] and run.sparsifier.sparsity() > 0.2):
        run.step()
    saved = run.state()["sparsifier"]
    with pytest.warns(InputsWarning, match="is forgotten"):
        other.sparsifier.load_state_dict(saved)
    same.sparsifier.load_state_dict(saved)


def test_an_earlier_state_is_loaded_into_a_model_that_has_got_smaller():
    """What was removed since then is back: weights and optimizer state too, loaded before the masks or after."""
    for order in ORDERS:
        run = Run(*MLP, Shrink(at_least=0.0))
        for _ in range(3):
            run.step()
        saved = run.state()
        wanted = [run.step() for _ in range(4)]
        size = run.sizes()
        for name in order:
            {"model": run.model, "optimizer": run.optimizer, "sparsifier": run.sparsifier}[name].load_state_dict(
                saved[name]
            )
        assert run.sizes() > size
        assert not differences(run.state(), saved), f"{order} is another state than the one that was loaded"
        assert [run.step() for _ in range(4)] == wanted


def differences(one, other):
    found, wanted = dict(tensors_in(one)), dict(tensors_in(other))
    return [place for place in wanted if place not in found or not torch.equal(found[place], wanted[place])]


def test_weights_that_are_loaded_into_removed_units_are_pruned_by_the_next_step():
    run = Run(*MLP, Shrink(at_least=0.0))
    for _ in range(STEPS):
        run.step()
    whole = {name: torch.ones_like(value) for name, value in run.model.state_dict().items()}
    run.model.load_state_dict(whole)
    assert not differences(run.model.state_dict(), whole), "what is loaded is there, as in a model without masks"
    run.step()
    state, masks = run.model.state_dict(), run.sparsifier.masks
    assert not state["0.weight"][masks["0 (units)"].reshape(-1)].any()
    run.sparsifier.detach()
    assert not run.model[0].weight[masks["0 (units)"].reshape(-1)].any()


def test_a_state_dict_loads_into_the_plain_model_and_into_a_run_without_shrink():
    run = Run(*MLP, Shrink(at_least=0.0))
    for _ in range(6):
        run.step()
    saved = run.state()
    plain = MLP[0]().double()
    plain.load_state_dict(saved["model"])
    assert torch.allclose(plain(*run.inputs), run.model(*run.inputs))
    resumed = Run(*MLP, None, state=saved)
    for _ in range(6):
        assert resumed.step() == pytest.approx(run.step(), rel=1e-9)


def test_a_pruned_model_is_small_from_its_second_step_on():
    masks = {"0 (units)": torch.arange(8).view(8, 1) < 4, "2 (units)": torch.arange(6).view(6, 1) > 2}
    run = Run(*MLP, Shrink(), schedule=0.5, masks=masks)
    whole = run.sizes()
    run.step()
    assert run.sizes() < whole


def test_a_second_run_of_one_sparsifier_starts_small_and_leaves_nothing():
    run = Run(*MLP, Shrink(at_least=0.0))
    for _ in range(STEPS):
        run.step()
    whole, small = sum(v.numel() for v in run.model.state_dict().values()), run.sizes()
    run.sparsifier.detach()
    assert run.sizes() == whole
    hooks = [vars(m)[name] for m in run.model.modules() for name in ("_state_dict_hooks", "_load_state_dict_pre_hooks")]
    assert not any(hooks), "hooks are left in the model"
    run.sparsifier.rewind()
    run.sparsifier.attach(run.model, run.optimizer, total_steps=STEPS)
    assert run.sizes() == small
    run.step()
    run.sparsifier.detach()
    assert run.sizes() == whole


def test_a_unit_is_left_where_all_are_pruned():
    run = Run(*MLP, Shrink(at_least=0.0), schedule=Cubic(1.0, **RAMP))
    for _ in range(STEPS):
        run.step()
    assert [tuple(p.shape) for p in run.model.parameters()] == [(1, 4), (1,), (1, 1), (1,), (3, 1), (3,)]
    assert run.sparsifier.sparsity() == 1.0
    run.sparsifier.detach()
    assert not any(run.model[i].weight.any() for i in (0, 2, 4))


def test_channels_last_stays_so():
    def build():
        return PLAIN["residual"].build().to(memory_format=torch.channels_last)

    run = Run(build, CONV[1], Shrink(at_least=0.0))
    strides = {name: p.stride() for name, p in run.model.named_parameters()}
    for _ in range(STEPS):
        run.step()
    weights = [p for p in run.model.parameters() if p.ndim == 4 and min(p.shape) > 1]
    assert weights
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in weights)
    run.sparsifier.detach()
    assert {name: p.stride() for name, p in run.model.named_parameters()} == strides


def test_a_loss_that_is_still_referenced_does_not_keep_old_shapes():
    run = Run(*MLP, Shrink(at_least=0.0))
    kept = []
    for _ in range(STEPS):
        kept.append(run.model(*run.inputs).sum())
        kept[-1].backward()
        run.sparsifier.before_step()
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert run.sizes() < sum(v.numel() for v in run.model.state_dict().values())


def test_tied_parameters_and_gradients_that_are_kept():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.again = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 8)
            self.again.weight = self.up.weight

        def forward(self, x):
            return self.down(torch.relu(self.up(x)) + torch.relu(self.again(x)))

    run = Run(Tied, (torch.randn(2, 4),), Shrink(at_least=0.0))
    for _ in range(STEPS):
        run.model(*run.inputs).square().sum().backward()
        run.sparsifier.before_step()
        run.optimizer.step()
        assert all(p.grad.shape == p.shape for p in run.model.parameters()), "gradients are cut with their parameters"
        run.optimizer.zero_grad()
    assert run.model.again.weight is run.model.up.weight
    state = run.model.state_dict()
    assert state["again.weight"].shape == state["up.weight"].shape == (8, 4)
    assert len(run.model.up.weight) == len(run.model.down.weight.T) == 3


def test_a_copy_of_the_smaller_model_is_a_plain_model():
    run = Run(*MLP, Shrink(at_least=0.0))
    for _ in range(STEPS):
        run.step()
    made = copy.deepcopy(run.model)
    assert {n: p.shape for n, p in made.named_parameters()} == {n: p.shape for n, p in made.state_dict().items()}
    assert torch.equal(made(*run.inputs), run.model(*run.inputs))


def test_other_patterns_stay_where_they_are():
    """Tiles and N:M beside units, on other layers: only units are removed."""
    patterns = [Neurons("0", "2"), sl.Blocks("4.weight", (1, 2))]
    plain, small = (
        Run(*MLP, shrink, patterns=patterns) for shrink in (None, Shrink(MLP[1], at_least=0.0))
    )  # the columns of layer 4 read the units of layer 2, which stay
    for _ in range(STEPS):
        plain.step()
        small.step()
    assert all(torch.equal(mask, small.sparsifier.masks[n]) for n, mask in plain.sparsifier.masks.items())
    check_near(small.state()["model"], plain.state()["model"])
    assert small.model[4].weight.shape == plain.model[4].weight.shape
    assert small.model[0].weight.shape < plain.model[0].weight.shape


def test_units_that_cut_through_tiles_stay():
    """Removing columns of a weight that is divided into tiles would cut through them: nothing can be removed."""
    patterns = [sl.Custom(lambda names: [_rows(names)]), sl.Blocks("2.weight", (2, 2))]
    with pytest.raises(PatternError, match="no pattern has units that can be removed"):
        Run(*MLP, Shrink(MLP[1]), patterns=patterns)


def _rows(model):
    return sl.ScopeSpec(sl.BlockSpec(model[0].weight, (1, -1)))


class Grows(sl.Gradual):
    """Lets a block grow again, and does not say so."""

    def choose(self, context):
        return super().choose(context) if context.target < 0.8 else torch.zeros_like(context.mask)


@pytest.mark.parametrize(
    ("parts", "error", "text"),
    [
        (
            {"method": sl.RigL()},
            SparseLightningError,
            "RigL, which lets pruned blocks grow again: use the method Gradual",
        ),
        ({"method": sl.SET()}, SparseLightningError, "SET, which lets pruned blocks grow again"),
        ({"method": sl.Soft()}, SparseLightningError, "Soft, which changes the weights of blocks"),
        ({"method": sl.Proximal()}, SparseLightningError, "Proximal, which changes the weights of blocks"),
        ({"patterns": [sl.Blocks("*.weight", (1, 1))]}, PatternError, "no pattern has units that can be removed"),
        ({"optimizer": lambda p: torch.optim.Adafactor(p)}, SparseLightningError, "Adafactor, which keeps the state"),
        ({"optimizer": lambda p: torch.optim.LBFGS(p)}, SparseLightningError, "LBFGS, which cannot be tried"),
    ],
    ids=["rigl", "set", "soft", "proximal", "blocks", "adafactor", "lbfgs"],
)
def test_what_cannot_be_right_is_refused_before_training(parts, error, text):
    with pytest.raises(error, match=text):
        Run(*MLP, Shrink(MLP[1]), **parts)


@pytest.mark.parametrize("at_least", [-0.1, 1.0, 2.0])
def test_at_least_is_a_fraction(at_least):
    with pytest.raises(SparsityError, match="at_least="):
        Shrink(at_least=at_least)


@pytest.mark.parametrize("multiple_of", [0, -8, 2.0, True])
def test_multiple_of_is_a_number_of_rows(multiple_of):
    with pytest.raises(SparsityError, match="multiple_of="):
        Shrink(multiple_of=multiple_of)


@given(st.integers(1, 5000), st.integers(1, 130), st.integers(1, 64))
def test_the_rows_that_are_left_are_a_multiple_where_few_units_make_them_one(kept, width, multiple_of):
    spare = Shrink(multiple_of=multiple_of).spare(kept, width)
    fitting = next(n for n in range(multiple_of) if (kept + n) * width % multiple_of == 0)
    assert spare == (fitting if fitting <= kept / 20 else 0)


def _wide():
    return nn.Sequential(nn.Linear(4, 90), nn.GELU(), nn.Linear(90, 61), nn.Sigmoid(), nn.Linear(61, 3))


WIDE = _wide, (torch.randn(3, 4),)


@pytest.mark.parametrize("final", [0.4, 0.9])
def test_a_few_pruned_units_stay_for_sizes_that_are_fast(final):
    """Masks and weights are those of a run without; where a unit in twenty is not enough, all pruned units go."""
    parts = {"patterns": [Neurons("0", "2"), Neurons("2", "4")], "schedule": Cubic(final, **RAMP)}
    shrinks = {"plain": None, "rounded": Shrink(WIDE[1], at_least=0.0), "exact": Shrink(WIDE[1], 0.0, multiple_of=1)}
    runs = {name: Run(*WIDE, shrink, **parts) for name, shrink in shrinks.items()}
    sizes, seen = {0: 90, 2: 61}, set()
    for _ in range(STEPS):
        for run in runs.values():
            run.step()
        kept = [int((~mask).sum()) for mask in runs["plain"].sparsifier.masks.values()]
        for name, run in runs.items():
            check_near(run.state()["model"], runs["plain"].state()["model"])
            check_near(run.state()["optimizer"], runs["plain"].state()["optimizer"])
            assert run.sparsifier.sparsity() == runs["plain"].sparsifier.sparsity(), name
        for layer, n in zip(sizes, kept, strict=True):
            assert len(runs["exact"].model[layer].weight) == n
            up = -(-n // 8) * 8
            sizes[layer] = up if up - n <= n / 20 and up <= sizes[layer] else n
            assert len(runs["rounded"].model[layer].weight) == sizes[layer]
            seen.add(sizes[layer] - n)
    assert seen != {0}, "no size was rounded"
    resumed = Run(*WIDE, shrinks["rounded"], state=runs["rounded"].state(), **parts)
    assert str(resumed.model) == str(runs["rounded"].model)


def test_a_shrink_is_an_object():
    with pytest.raises(SparsityError, match=r"shrink=True is not a Shrink: pass Shrink\(\)"):
        Sparsifier([Neurons("0", "2")], 0.5, shrink=True)


def test_a_method_that_lets_removed_units_grow_is_stopped():
    run = Run(*MLP, Shrink(at_least=0.0), method=Grows(), schedule=Cubic(0.9, **RAMP))
    with pytest.raises(SparsityError, match=r"keeps units of .* that it had pruned, and that are removed"):
        all(run.step() for _ in range(STEPS))


@pytest.mark.parametrize("name", ["fused", "interleaved"])
def test_sizes_that_are_written_into_the_code_of_a_model_are_refused_before_training(name):
    case = PLAIN[name]
    torch.manual_seed(1)
    model = case.build()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    pointers = [p.data_ptr() for p in model.parameters()]
    sparsifier = Sparsifier([Coupled(inputs=case.inputs)], 0.5, shrink=Shrink())
    with pytest.raises(SparseLightningError, match="cannot get smaller while it trains"):
        sparsifier.attach(model, torch.optim.AdamW(model.parameters()))
    assert not differences(model.state_dict(), before), "the attempt has changed the model"
    assert [p.data_ptr() for p in model.parameters()] == pointers
    case.build().load_state_dict(model.state_dict())


def test_units_that_fail_alone_stay_in_the_model():
    """The heads of nn.MultiheadAttention, whose code has their size; the neurons beside them are removed."""
    case = PLAIN["multihead attention"]
    plain = Run(case.build, case.inputs)
    with pytest.warns(UserWarning, match=r"pruned units of self_attn \(heads\) stay in the model while it trains"):
        small = Run(case.build, case.inputs, Shrink(at_least=0.0))
    for _ in range(STEPS):
        plain.step()
        small.step()
    check_near(small.state()["model"], plain.state()["model"])
    assert small.model.linear1.out_features < plain.model.linear1.out_features
    assert small.model.self_attn.in_proj_weight.shape == plain.model.self_attn.in_proj_weight.shape


def test_compiled_models_are_refused():
    model = MLP[0]()
    model[1].compile(backend="eager")
    with pytest.raises(SparseLightningError, match=r"1 is compiled by torch\.compile"):
        Sparsifier([Neurons("0", "2")], 0.5, shrink=Shrink(MLP[1])).attach(model, torch.optim.AdamW(model.parameters()))


def test_parameters_that_share_memory_are_refused():
    model = MLP[0]()
    buffer = torch.randn(64)
    for layer, shape in ((model[0], (8, 4)), (model[2], (6, 8))):
        layer.weight.data = buffer[: shape[0] * shape[1]].view(shape)
    with pytest.raises(PatternError, match=r"0\.weight and 2\.weight share memory"):
        Sparsifier([Neurons("0", "2")], 0.5, shrink=Shrink(MLP[1])).attach(model, torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("first", [True, False])
def test_two_sparsifiers_on_a_parameter_that_gets_smaller_are_refused(first):
    model = MLP[0]()
    optimizer = torch.optim.AdamW(model.parameters())
    small = Sparsifier([Neurons("0", "2")], 0.5, shrink=Shrink(MLP[1]))
    other = Sparsifier([Neurons("2", "4")], 0.5)
    pair = [small, other] if first else [other, small]
    pair[0].attach(model, optimizer)
    with pytest.raises(PatternError, match="another Sparsifier is attached to"):
        pair[1].attach(model, optimizer)


def test_prune_and_averages_need_the_whole_model():
    run = Run(*MLP, Shrink(at_least=0.0))
    average = torch.optim.swa_utils.AveragedModel(run.model)
    for _ in range(STEPS):
        run.step()
    with pytest.raises(PatternError, match=r"units of .* are removed"):
        sl.prune(run.model, [Neurons("0", "2")], 0.9, [run.inputs], Magnitude(), progress=False)
    with pytest.raises(PatternError, match="AveragedModel is a copy of the whole model"):
        run.sparsifier.mask_copy(average)


def test_a_checkpoint_of_other_units_is_refused():
    run = Run(*MLP, Shrink(at_least=0.0))
    for _ in range(STEPS):
        run.step()
    state = run.sparsifier.state_dict()
    bits = state["masks"]["0 (units)"]["bits"]
    state["masks"]["0 (units)"]["bits"] = torch.zeros_like(bits)
    other = Run(*MLP, Shrink(at_least=0.0))
    with pytest.raises(
        CheckpointError, match=r"has removed units of 0 \(units\), which cannot be removed here or are not"
    ):
        other.sparsifier.load_state_dict(state)


def test_hand_written_patterns_get_smaller_as_coupled_does():
    build, inputs = HUGGING_FACE["bert"]
    named = [
        Heads(
            q="*.attention.self.query",
            k="*.attention.self.key",
            v="*.attention.self.value",
            out="*.attention.output.dense",
            head_dim=8,
        ),
        Neurons("encoder.layer.0.intermediate.dense", "encoder.layer.0.output.dense"),
    ]
    one = Run(build, inputs, Shrink(inputs, at_least=0.0), patterns=named)
    other = Run(build, inputs, Shrink(at_least=0.0), patterns=[Coupled(["*heads*", "*units*"], inputs=inputs)])
    for _ in range(STEPS):
        one.step()
        other.step()
    shapes = [{name: tuple(p.shape) for name, p in run.model.named_parameters()} for run in (one, other)]
    assert shapes[0] == shapes[1]
    assert one.sizes() < sum(v.numel() for v in dict(tensors_in(one.model.state_dict())).values())


def test_the_summary_counts_all_units():
    run = Run(*MLP, Shrink(at_least=0.0))
    before = run.sparsifier.summary()
    for _ in range(STEPS):
        run.step()
    assert run.sparsifier.summary() == before


@st.composite
def bases(draw):
    """A base in any order of memory, what is left of it, and a layout of products of ranges on it."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    order = draw(st.permutations(range(len(shape))))
    tensor = torch.arange(int(np.prod(shape))).view([shape[d] for d in order])
    tensor = tensor.permute([order.index(d) for d in range(len(shape))])
    kept = [np.array(sorted(draw(st.sets(st.integers(0, n - 1), min_size=1)))) for n in shape]
    return tensor, kept


@given(bases(), st.data())
def test_a_layout_on_what_is_left_reaches_the_elements_that_are_left(case, data):
    """Law: index arithmetic on the whole base, then on the smaller one, gives the same elements."""
    tensor, kept = case
    layout = Layout.of(tensor)
    for d in range(tensor.ndim):
        n = layout.shape[d]
        start = data.draw(st.integers(0, n - 1))
        layout = layout.slice(d, start, None, data.draw(st.integers(1, n)))
    layout = layout.permute(data.draw(st.permutations(range(tensor.ndim))))
    if data.draw(st.booleans()):
        layout = layout.flip([data.draw(st.integers(0, tensor.ndim - 1))])
    left = KeptIndices.of(tensor.shape, kept, KeptIndices.whole(tensor).order)
    small = left.cut(tensor)
    assert Layout.of(small) == left.layout
    found = cut_layout(layout, Layout.of(tensor), kept, left.layout)
    elements = layout.on(tensor)
    present = np.isin(elements.numpy(), small.numpy())
    if found is None:
        return
    wanted = elements[np.ix_(*found.kept)] if elements.ndim else elements
    assert torch.equal(found.layout.on(small), wanted)
    assert present.sum() == wanted.numel(), "an element that is left is missing"


@given(bases())
def test_units_that_are_whole_rows_can_always_be_cut(case):
    """Law: where a layout is the base itself, what is left always has strides."""
    tensor, kept = case
    left = KeptIndices.of(tensor.shape, kept, KeptIndices.whole(tensor).order)
    found = cut_layout(Layout.of(tensor), Layout.of(tensor), kept, left.layout)
    assert found is not None
    assert torch.equal(found.layout.on(left.cut(tensor)), tensor[np.ix_(*kept)])


@given(bases())
def test_columns_of_a_large_matrix_are_cut_as_those_of_a_small_one(case):
    tensor, kept = case
    left = KeptIndices.of(tensor.shape, kept, KeptIndices.whole(tensor).order)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_indices, "LARGE", 0)
        found = left.cut(tensor)
    assert torch.equal(found, tensor[np.ix_(*kept)])
    assert found.stride() == left.cut(tensor).stride()


@given(bases(), st.data())
def test_cut_and_widened_tensors(case, data):
    """Law: cutting keeps elements, widening puts them back; from one way of cutting to another by the shortest way."""
    tensor, kept = case
    left = KeptIndices.of(tensor.shape, kept, KeptIndices.whole(tensor).order)
    whole, rest = left.widened(left.cut(tensor)), torch.full_like(tensor, -1)
    assert whole.stride() == tensor.stride() or 1 in tensor.shape
    index = np.ix_(*kept)
    assert torch.equal(whole[index], tensor[index])
    assert int((whole != 0).sum()) == int((tensor[index] != 0).sum())
    assert torch.equal(left.widened(left.cut(tensor), rest)[index], tensor[index])
    other = [np.array(sorted(data.draw(st.sets(st.sampled_from(list(range(n))), min_size=1)))) for n in tensor.shape]
    after = KeptIndices.of(tensor.shape, other, left.order)
    assert torch.equal(change(left, after)(left.cut(tensor), tensor), after.cut(tensor))


def test_a_shrunk_model_is_what_it_was_when_all_units_are_back():
    """Buffers keep their values too: running statistics of channels that were removed."""
    torch.manual_seed(1)
    model = PLAIN["residual"].build()
    found = couplings(model, PLAIN["residual"].inputs)
    name = next(iter(found)).name
    before = {key: value.clone() for key, value in model.state_dict().items()}
    shrunk = ShrunkModel(model, found, [name], [])
    kept = list(range(1, found[name].units))
    with suppress(KeyError):
        from sparse_lightning.compaction.zero_units import KeptUnits

        shrunk.keep({name: KeptUnits(found[name].units, kept)})
    assert all(value.shape == before[key].shape for key, value in model.state_dict().items())
    shrunk.keep({})
    after = model.state_dict()
    buffers = dict(model.named_buffers())
    assert not differences({k: after[k] for k in buffers}, {k: before[k] for k in buffers})
