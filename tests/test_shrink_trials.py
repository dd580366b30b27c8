"""What is tried before a model gets smaller: code and optimizers that would train otherwise are refused."""

from __future__ import annotations

import copy

import pytest
import torch
from test_shrink import MLP, STEPS, Run, check_near
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attend

import sparse_lightning as sl
from sparse_lightning import Neurons, Shrink, Sparsifier
from sparse_lightning.compaction.trial import subsets, trial_copy
from sparse_lightning.errors import PatternError, SparseLightningError
from sparse_lightning.graph.inputs import ExampleInputs

ZEROS = (torch.zeros(4, 8),)


class Between(nn.Module):
    """Two layers, and code between them."""

    def __init__(self, code, bias=True, gain=None, width=16):
        super().__init__()
        self.a, self.b = nn.Linear(8, width, bias), nn.Linear(width, 8, bias)
        self.gain = nn.Parameter(torch.full((8,), 1.0 if gain is None else gain))
        self.code = code

    def forward(self, x):
        return x + self.gain * self.b(self.code(torch.relu(self.a(x))))


def two_activations(h):
    return torch.cat([torch.tanh(h[..., :4]), h[..., 4:]], -1)


def shifted(h):
    """A fraction of the channels from the next row."""
    few = h.shape[-1] // 8
    next_rows = torch.cat([h[1:, :few], torch.zeros_like(h[:1, :few])], 0)
    return torch.cat([next_rows, h[..., few:]], -1)


def scaled(h):
    return h * h.shape[-1] ** -0.5


def gated(h):
    return h * torch.sigmoid(h[..., 3:4])


class Attention(nn.Module):
    """Two attentions that read one number of heads, or the first half of the heads of one is causal."""

    def __init__(self, is_shared):
        super().__init__()
        self.num_heads, self.is_shared = 8, is_shared
        self.q, self.k, self.v, self.o, self.cq, self.ck, self.cv, self.co = [nn.Linear(32, 32) for _ in range(8)]

    def heads(self, x, *layers):
        heads, width = (self.num_heads, -1) if self.is_shared else (-1, 4)
        return [layer(x).view(*x.shape[:2], heads, width).transpose(1, 2) for layer in layers]

    def forward(self, x):
        q, k, v = self.heads(x, self.q, self.k, self.v)
        half = 0 if self.is_shared else q.shape[1] // 2
        first = attend(q[:, :half], k[:, :half], v[:, :half], is_causal=True, scale=0.5)
        made = torch.cat([first, attend(q[:, half:], k[:, half:], v[:, half:], scale=0.5)], 1)
        x = x + self.o(made.transpose(1, 2).flatten(2))
        made = attend(*self.heads(x, self.cq, self.ck, self.cv), scale=0.5)
        return x + self.co(made.transpose(1, 2).flatten(2))


CODES = {
    "two activations": lambda: Between(two_activations),
    "shifted": lambda: Between(shifted, width=20),
    "gated": lambda: Between(gated),
    "scaled": lambda: Between(scaled),
    "scaled, no bias": lambda: Between(scaled, bias=False),
    "scaled, no gain": lambda: Between(scaled, gain=0.0),
    "scaled, little gain": lambda: Between(scaled, gain=1e-6),
    "scaled, many": lambda: Between(scaled, width=256),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CODES)
def test_code_that_tells_units_apart_is_refused_whatever_inputs_and_weights_hide_it(name, dtype):
    torch.manual_seed(0)
    model = CODES[name]().to(dtype)
    before = copy.deepcopy(model.state_dict())
    sparsifier = Sparsifier([Neurons("a", "b")], 0.5, shrink=Shrink(ZEROS))
    with pytest.raises(SparseLightningError, match="Between cannot get smaller while it trains: "):
        sparsifier.attach(model, torch.optim.SGD(model.parameters(), 0.1))
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), f"the trial has changed {key}"


@pytest.mark.parametrize("is_shared", [True, False])
def test_attention_whose_heads_are_not_alike_is_refused(is_shared):
    """Two families that read one attribute have it wrong as soon as their numbers of heads differ."""
    model = Attention(is_shared)
    sparsifier = Sparsifier([sl.Coupled("*q*", inputs=(torch.randn(2, 5, 32),))], 0.5, shrink=Shrink())
    if is_shared:
        with pytest.raises(SparseLightningError, match="Attention cannot get smaller while it trains"):
            sparsifier.attach(model, torch.optim.SGD(model.parameters(), 0.1))
    else:
        with pytest.warns(UserWarning, match=r"pruned units of q \(heads\) stay in the model .* those of others"):
            sparsifier.attach(model, torch.optim.SGD(model.parameters(), 0.1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_deep_models_of_any_dtype_are_not_refused(dtype):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(8), Between(torch.relu, gain=1e-6)) for _ in range(12)]
    model = nn.Sequential(*layers).to(dtype)
    inputs = (torch.zeros(4, 8, dtype=dtype),)
    sparsifier = Sparsifier([sl.Coupled(inputs=inputs)], 0.5, shrink=Shrink())
    sparsifier.attach(model, torch.optim.SGD(model.parameters(), 0.1))
    sparsifier.detach()


class Picky(nn.Module):
    """Runs with its own weights only."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.ones(2, 2))

    def forward(self, x):
        if bool((self.scale != 1).any()):
            raise ValueError("the scale is fixed")
        return self.b(torch.relu(self.a(x)))


def test_a_model_that_needs_its_own_weights_is_tried_with_them():
    model, inputs = Picky(), ExampleInputs(ZEROS, {})
    copied, given = trial_copy(model, inputs)
    assert torch.equal(given.args[0], ZEROS[0])
    for own, other in zip(model.parameters(), copied.parameters(), strict=True):
        assert torch.equal(own, other)
        assert own.data_ptr() != other.data_ptr()
    _, varied = trial_copy(Between(torch.relu), inputs)
    assert bool((varied.args[0] != 0).any()), "zeros hide what is computed with them"


def test_trials_remove_other_numbers_of_units_of_families_that_are_alike():
    trials = subsets({"a": 8, "b": 8, "c": 2})
    assert [list(trial) for trial in trials] == [["a", "b", "c"], ["a", "c"], ["b"], ["a", "b", "c"]]
    assert {len(left.kept) for left in trials[-1].values()} == {1}
    for trial in trials:
        assert all(0 < len(left.kept) < left.total for left in trial.values())


class Twins(nn.Module):
    """The difference of two branches that are alike."""

    def __init__(self, factor):
        super().__init__()
        self.e, self.a, self.b, self.o = nn.Linear(8, 16), nn.Linear(16, 12), nn.Linear(16, 12), nn.Linear(12, 8)
        self.factor = factor

    def forward(self, x):
        h = torch.relu(self.e(x))
        return self.o(torch.relu((self.a(h) - self.b(h)) * self.factor(h)))


def test_branches_that_are_alike_have_other_weights_in_the_trial():
    sparsifier = Sparsifier([sl.Coupled("e*", inputs=ZEROS)], 0.5, shrink=Shrink())
    model = Twins(lambda h: 16 / h.shape[-1])
    with pytest.raises(SparseLightningError, match="Twins cannot get smaller"):
        sparsifier.attach(model, torch.optim.SGD(model.parameters(), 0.1))
    model = Twins(lambda h: 1.0)
    sparsifier.attach(model, torch.optim.SGD(model.parameters(), 0.1))
    sparsifier.detach()


class Adapts(nn.Module):
    """Projects its input where sizes differ, which they may cease to do."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.proj = nn.Linear(8, 12), nn.Linear(12, 16), nn.Linear(16, 4), nn.Linear(12, 16)

    def forward(self, x):
        h = torch.relu(self.a(x))
        made = torch.relu(self.b(h))
        return self.c(made + (self.proj(h) if h.shape[-1] != made.shape[-1] else h))


def test_code_that_compares_sizes_is_refused():
    model = Adapts()
    sparsifier = Sparsifier([sl.Coupled(inputs=ZEROS)], 0.5, shrink=Shrink())
    with pytest.raises(SparseLightningError, match="Adapts cannot get smaller"):
        sparsifier.attach(model, torch.optim.SGD(model.parameters(), 0.1))


class ByRule(torch.optim.Optimizer):
    """Gradient descent with one change to the gradient."""

    def __init__(self, params, rule):
        super().__init__(params, {"rule": rule})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(group["rule"](p, p.grad), alpha=-0.05)


RULES = {
    "centralized gradients": lambda p, g: g - g.mean(tuple(range(1, g.ndim)), True) if g.ndim > 1 else g,
    "over fan in": lambda p, g: g / p.shape[1] if p.ndim > 1 else g,
    "normed vectors": lambda p, g: g / g.square().mean().sqrt() if p.ndim == 1 else g,
    "normed filters": lambda p, g: g / g.square().mean((1, 2, 3), True).sqrt() if p.ndim == 4 else g,
}


@pytest.mark.parametrize("name", RULES)
def test_an_optimizer_that_reads_columns_or_vectors_as_a_whole_is_refused(name):
    with pytest.raises(SparseLightningError, match=r"shrink cannot be used with ByRule, which makes other steps"):
        Run(*MLP, Shrink(), optimizer=lambda p: ByRule(p, RULES[name]))


class Counting(torch.optim.Optimizer):
    """Counts the steps of each parameter in a tensor of one element."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            own = self.state[p]
            own["step"] = own.get("step", torch.zeros(1)) + 1
            own["mean"] = own.get("mean", torch.zeros_like(p)) * 0.9 + p.grad
            p.add_(own["mean"], alpha=-0.01 / float(own["step"]))


def test_a_number_for_a_parameter_of_one_weight_is_one_for_the_whole_parameter():
    """With all units but one removed, a count of steps has the shape of a bias."""
    plain, small = (
        Run(*MLP, shrink, optimizer=Counting, schedule=sl.Cubic(1.0, begin=1, end=8))
        for shrink in (None, Shrink(at_least=0.0))
    )
    for _ in range(STEPS):
        plain.step()
        small.step()
        check_near(small.state()["optimizer"], plain.state()["optimizer"])
    assert min(p.numel() for p in small.model.parameters()) == 1
    small.sparsifier.detach()
    check_near(small.state()["optimizer"], plain.state()["optimizer"])


class Scales(nn.Module):
    """Assigns a buffer anew in each step, instead of writing into it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x):
        h = torch.relu(self.a(x)) / self.scale
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * h.detach().abs().amax(0).clamp(min=0.1)
        return self.b(h)


def test_a_buffer_that_is_assigned_anew_is_whole_in_checkpoints():
    case = Scales, (torch.randn(4, 8),)
    plain, small = (Run(*case, shrink) for shrink in (None, Shrink(at_least=0.0)))
    for _ in range(STEPS):
        plain.step()
        small.step()
        assert small.state()["model"]["scale"].shape == (16,)
    assert small.model.scale.numel() < 16
    kept = plain.model.a.weight.any(1)
    assert torch.allclose(small.state()["model"]["scale"][kept], plain.model.scale[kept])
    Scales().double().load_state_dict(small.state()["model"])
    small.model.half()
    assert small.model.state_dict()["scale"].dtype == torch.float16, "the model has got another dtype"


class Renamed(nn.Linear):
    """Saves its weight as another format has it."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "kernel"] = (self.weight if keep_vars else self.weight.detach()).T


def test_a_model_that_saves_its_parameters_in_another_form_is_refused():
    model = nn.Sequential(Renamed(8, 16), nn.ReLU(), nn.Linear(16, 4))
    sparsifier = Sparsifier([Neurons("0", "2")], 0.5, shrink=Shrink((torch.randn(2, 8),)))
    with pytest.raises(PatternError, match=r"the state dict of Sequential has '0\.kernel'"):
        sparsifier.attach(model, torch.optim.SGD(model.parameters(), 0.1))


def test_the_sparsity_of_each_of_two_patterns_that_cross_is_that_of_a_run_without_shrink():
    build, inputs = MLP
    patterns = [Neurons("0", "2"), Neurons("2", "4")]
    plain, small = (Run(build, inputs, shrink, patterns=patterns) for shrink in (None, Shrink(inputs, at_least=0.0)))
    for _ in range(STEPS):
        plain.step()
        small.step()
        assert small.sparsifier.sparsities() == plain.sparsifier.sparsities()
        assert small.sparsifier.sparsity() == plain.sparsifier.sparsity()
    assert small.sizes() < plain.sizes()


def test_units_that_the_model_pins_are_refused_with_the_reason():
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    sparsifier = Sparsifier([Neurons("0", "2")], 0.5, shrink=Shrink((torch.randn(2, 8),)))
    with pytest.raises(PatternError, match=r"it normalises over them; .* Use Coupled, Neurons"):
        sparsifier.attach(model, torch.optim.SGD(model.parameters(), 0.1))


def test_two_steps_in_one_region_of_autocast():
    """Autocast keeps narrow copies of weights, which have the old shapes."""
    torch.manual_seed(0)
    model = Between(torch.relu)
    sparsifier = Sparsifier([Neurons("a", "b")], 0.5, update_every=1, shrink=Shrink(ZEROS))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier.attach(model, optimizer)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            model(torch.randn(4, 8)).square().mean().backward()
            sparsifier.before_step()
            optimizer.step()
            optimizer.zero_grad()
    assert model.a.out_features == 8
