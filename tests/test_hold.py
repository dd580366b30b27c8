"""Hold: all pruned blocks are zero after every optimizer step, before anything can read the weights."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from small_nets import BATCHES, LAYERS, OPTIMIZERS, Net, Spy, Twist, batches, broken_blocks
from torch import nn

from sparse_lightning import (
    Blocks,
    BlockSpec,
    Constant,
    Cubic,
    Linear,
    Magnitude,
    RigL,
    Sparsifier,
    SparsityCallback,
    View,
)
from sparse_lightning.kernels.block_fill import BlockFill, native


def fit(net, *others, first=True, epochs=3, schedule=None, method=None, patterns=None, **options):
    """Train with the callback before or after the others, and a spy at both ends; return the callback and a spy."""
    callback = SparsityCallback(
        patterns or [Blocks(LAYERS, (4, 4))], schedule or Cubic(final=0.75, end=0.9), method=method, update_every=2
    )
    spies = [Spy(callback.sparsifier), Spy(callback.sparsifier)]
    middle = [callback, *others] if first else [*others, callback]
    trainer = L.Trainer(
        max_epochs=epochs,
        callbacks=[spies[0], *middle, spies[1]],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, **options},
    )
    trainer.fit(net)
    for spy in spies:
        assert spy.pruned, "nothing was pruned: the spies had nothing to find"
        assert {"forward", "batch end", "validation"} <= set(spy.readings)
    return callback, spies[0]


def zero_blocks(weight: torch.Tensor) -> int:
    """How many 4×4 blocks of a weight are zero, counted without the package."""
    blocks = weight.detach().unfold(0, 4, 4).unfold(1, 4, 4)
    return int((blocks == 0).all(-1).all(-1).sum())


def is_three_quarters(net) -> bool:
    """Whether both layers of `Net` lost 75 % of their blocks."""
    return zero_blocks(net.up.weight) == 24 and zero_blocks(net.down.weight) == 12


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer(optimizer):
    net = Net(optimizer)
    fit(net)
    assert is_three_quarters(net)


@pytest.mark.parametrize("optimizer", ["adamw", "twist"])
def test_zeros_that_are_streamed_as_into_large_weights(optimizer, monkeypatch):
    monkeypatch.setattr(native, "LARGE", 0)
    fit(net := Net(optimizer), patterns=[Blocks(LAYERS, (4, 16))])
    zeros = [int((w == 0).sum()) for w in (net.up.weight, net.down.weight)]
    assert zeros == [6 * 64, 3 * 64]


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr(native, "is_available", lambda: False)
    fit(net := Net())
    assert is_three_quarters(net)


def deep(layers=50):
    """Many parameters of several shapes and dtypes, in blocks of several shapes, with their patterns."""
    torch.manual_seed(0)
    net = nn.ModuleList([nn.Linear(8 * (i % 3 + 1), 16) for i in range(layers)])
    net[0].weight = nn.Parameter(net[0].weight.detach().t().contiguous().t())
    net[3].to(torch.bfloat16)
    patterns = [
        Blocks("re:[1-9]*[05].weight", (4, 4)),
        Blocks("re:[1-9]*[1-4].weight", (1, 1)),
        Blocks("*.weight", (2, 8)),
    ]
    return net, patterns


@pytest.mark.parametrize("method", [None, RigL()])
def test_a_step_is_one_call_for_all_parameters(method, monkeypatch):
    calls = []
    for name in ("fill_watched", "fill_some"):
        plain = getattr(BlockFill, name)
        monkeypatch.setattr(BlockFill, name, lambda *a, f=plain, n=name: (calls.append(n), f(*a)))
    net, patterns = deep()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    sparsifier = Sparsifier(patterns, Constant(0.5, end=0), method=method, update_every=1)
    sparsifier.attach(net, optimizer)
    for step in range(4):
        for param in net.parameters():
            param.grad = torch.randn_like(param)
        calls.clear()
        sparsifier.before_step()
        optimizer.step()
        if step:
            assert calls == ["fill_some", "fill_watched"], "gradients are masked by one call, and weights by one"
        for name, mask in sparsifier.masks.items():
            [(block, grid)] = [(b, mask) for s in sparsifier.attachments for n, b in s.blocks.items() if n == name]
            assert not block.norms()[grid].any()
    assert len(sparsifier.masks) == 50


def test_a_parameter_that_moves_is_followed():
    net, patterns = deep(12)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sparsifier = Sparsifier(patterns, Constant(0.5, end=0), update_every=1)
    sparsifier.attach(net, optimizer)
    for param in net.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    zeros = [param == 0 for param in net.parameters()]
    moves = [lambda w: w.clone(), lambda w: w.t().contiguous().t(), lambda w: torch.stack([w, w], -1)[..., 1]]
    for move in moves:
        for param in net.parameters():
            param.data = move(param.data) if param.ndim == 2 else param.data.clone()
            param.grad = torch.randn_like(param)
        optimizer.step()
        assert all(torch.equal(param == 0, zero) for param, zero in zip(net.parameters(), zeros, strict=True))


@pytest.mark.parametrize("compiler", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_that_changes_its_dtype_is_followed(dtype, compiler, monkeypatch):
    if not compiler:
        monkeypatch.setattr(native, "is_available", lambda: False)
    net, patterns = deep(12)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sparsifier = Sparsifier(patterns, Constant(0.5, end=0), update_every=1)
    sparsifier.attach(net, optimizer)
    for _ in range(2):
        for param in net.parameters():
            param.grad = torch.randn_like(param)
        sparsifier.mask_gradients()
        optimizer.step()
        zeros = [param == 0 for param in net.parameters()]
    net.to(dtype)
    for param in net.parameters():
        param.grad = torch.rand_like(param) + 1
    sparsifier.mask_gradients()
    for param, zero in zip(net.parameters(), zeros, strict=True):
        assert torch.equal(param.grad == 0, zero)
        param.grad = torch.rand_like(param) + 1
    optimizer.step()
    assert all(torch.equal(param == 0, zero) for param, zero in zip(net.parameters(), zeros, strict=True))


def test_a_parameter_of_two_modules_and_of_two_patterns_is_held():
    net = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "c": nn.Linear(8, 16)})
    net["b"].weight = net["a"].weight
    upper, lower = (View(net["c"].weight, (8, 8), (8, 1), start) for start in (0, 64))
    halves = [BlockSpec(upper, (2, 2), name="upper"), BlockSpec(lower, (2, 2), name="lower")]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sparsifier = Sparsifier([Blocks("a.weight", (4, 4)), *halves], Constant(0.5, end=0), update_every=1)
    sparsifier.attach(net, optimizer)
    for _ in range(3):
        for param in net.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
        assert [int((net[name].weight == 0).sum()) for name in "abc"] == [32, 32, 64]
        assert [int((part == 0).sum()) for part in net["c"].weight.split(8)] == [32, 32]


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 4, "epochs": 6},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"max_steps": 17, "epochs": -1},
    ],
    ids=str,
)
def test_trainer_options(options):
    net = Net()
    fit(net, **options)
    assert is_three_quarters(net)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd momentum", "twist"])
def test_blocks_that_grow_and_shrink(optimizer):
    net = Net(optimizer)
    _, spy = fit(net, schedule=Constant(0.75), method=RigL(drop_fraction=0.5))
    assert spy.grown, "no block grew"
    assert zero_blocks(net.up.weight) + zero_blocks(net.down.weight) >= 36


@pytest.mark.parametrize("first", [True, False], ids=["before the average", "after the average"])
@pytest.mark.parametrize("changing", [Cubic(final=0.75), Constant(0.75)], ids=["cubic", "rigl"])
def test_ema(first, changing, tmp_path):
    net = Net()
    method = RigL(drop_fraction=0.5) if isinstance(changing, Constant) else None
    average = EMAWeightAveraging(decay=0.7)
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1)
    callback, _ = fit(
        net, average, saving, first=first, schedule=changing, method=method, enable_checkpointing=True, epochs=2
    )
    assert not is_dense(net)
    paths = sorted(tmp_path.glob("*.ckpt"))
    assert len(paths) == 2 * BATCHES // 5
    for path in paths:
        saved = torch.load(path, weights_only=True)
        masks = saved["callbacks"][callback.state_key]["masks"]
        zeros = [zero_blocks(saved["state_dict"][name]) for name in LAYERS]
        pruned = [int(unpacked(masks[name]).sum()) for name in LAYERS]
        assert all(z >= p for z, p in zip(zeros, pruned, strict=True)), f"{path.name}: an average was saved unmasked"
        assert sum(pruned)


def unpacked(entry) -> torch.Tensor:
    """The bits of a saved mask, counted without the package."""
    return torch.tensor([int(byte) >> i & 1 for byte in entry["bits"] for i in range(8)])


def is_dense(net) -> bool:
    """Whether no block is zero."""
    return zero_blocks(net.up.weight) + zero_blocks(net.down.weight) == 0


@pytest.mark.parametrize("first", [True, False], ids=["before the average", "after the average"])
def test_swa(first):
    net = Net("sgd momentum")
    fit(net, StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1), first=first, epochs=5, schedule=Linear(0.75))
    assert is_three_quarters(net)


class Compiled(Net):
    """A model whose layers are compiled."""

    def __init__(self):
        super().__init__()
        self.up.compile(backend="aot_eager")
        self.down = torch.compile(self.down, backend="aot_eager")


# Dynamo looks at the gradients of all its inputs, and torch warns of that.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_modules_under_their_plain_names():
    net = Compiled()
    fit(net)
    assert zero_blocks(net.down._orig_mod.weight) == 12
    assert zero_blocks(net.up.weight) == 24


class TwoOptimizers(Net):
    """Manual optimization: each layer has its own optimizer, and one of them steps every second batch."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        """Both steps."""
        x, y = batch
        one, two = self.optimizers()
        self.manual_backward(nn.functional.mse_loss(self(x), y))
        one.step()
        if batch_idx % 2:
            two.step()
        for optimizer in (one, two):
            optimizer.zero_grad()

    def configure_optimizers(self):
        """A known one and an unknown one."""
        return torch.optim.SGD(self.up.parameters(), lr=0.1, momentum=0.9), Twist(self.down.parameters())


def test_two_optimizers_in_manual_optimization():
    net = TwoOptimizers()
    fit(net, epochs=6, schedule=Cubic(final=0.75, end=16))
    assert is_three_quarters(net)


class Tied(Net):
    """The second layer is the first, transposed by a view: one parameter under two names."""

    def __init__(self):
        super().__init__()
        self.again = nn.Linear(16, 32, bias=False)
        self.again.weight = self.up.weight

    def forward(self, x):
        """Uses the tied weight twice."""
        return self.down(torch.relu(self.norm(self.up(x) + self.again(x))))


def test_tied_weights():
    net = Tied()
    fit(net, patterns=[Blocks(["up.weight", "again.weight"], (4, 4))])
    assert zero_blocks(net.up.weight) == 24
    assert net.again.weight is net.up.weight


class Frozen(Net):
    """One layer is not trained."""

    def __init__(self):
        super().__init__()
        self.up.requires_grad_(False)

    def configure_optimizers(self):
        """Only what is trained."""
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def test_frozen_parameters_are_pruned_too():
    net = Frozen()
    dense = net.up.weight.clone()
    fit(net)
    assert is_three_quarters(net)
    kept = net.up.weight != 0
    assert torch.equal(net.up.weight[kept], dense[kept])


class AddsLater(Net):
    """A layer joins the optimizer in the second epoch."""

    def configure_optimizers(self):
        """Without the last layer."""
        return torch.optim.AdamW([*self.up.parameters(), *self.norm.parameters()], lr=0.01)

    def on_train_epoch_start(self):
        """Now with it."""
        if self.current_epoch == 1:
            self.optimizers().optimizer.add_param_group({"params": list(self.down.parameters())})


def test_a_parameter_that_joins_the_optimizer_later():
    net = AddsLater()
    before = net.down.weight.clone()
    fit(net)
    assert is_three_quarters(net)
    assert not torch.equal(net.down.weight[net.down.weight != 0], before[net.down.weight != 0]), "it was trained"


class Overflowing:
    """A loss that overflows in fp16 every third time."""

    def __init__(self, model):
        self.model, self.count = model, 0

    def __call__(self, x, y):
        """The loss, times infinity now and then."""
        self.count += 1
        loss = nn.functional.mse_loss(self.model(x), y)
        return loss * float("inf") if self.count % 3 == 0 else loss


@pytest.mark.parametrize("call_before_step", [True, False])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw fused", "twist"])
def test_a_grad_scaler_that_skips_steps(optimizer, call_before_step):
    model = Net()
    steps = OPTIMIZERS[optimizer](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    sparsifier = Sparsifier([Blocks(LAYERS, (4, 4))], Cubic(final=0.75, end=8), Magnitude(), update_every=2)
    sparsifier.attach(model, steps)
    loss = Overflowing(model)
    for epoch in range(3):
        for x, y in batches():
            assert not broken_blocks(sparsifier.scopes, sparsifier.masks)
            steps.zero_grad()
            scaler.scale(loss(x, y)).backward()
            if call_before_step:
                scaler.unscale_(steps)
                sparsifier.before_step()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(steps)
            scaler.update()
            assert not broken_blocks(sparsifier.scopes, sparsifier.masks), epoch
    assert scaler.get_scale() < 2.0, "no step was skipped"
    assert is_three_quarters(model)


def test_clipping_does_not_count_pruned_blocks():
    """The norm that clipping sees is the norm of kept blocks alone."""
    model = Net("sgd momentum")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = Sparsifier([Blocks(LAYERS, (4, 4))], Constant(0.75, end=0), update_every=1)
    sparsifier.attach(model, optimizer)
    x, y = next(iter(batches()))
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        dense = {name: p.grad.clone() for name, p in model.named_parameters()}
        sparsifier.before_step()
        seen = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        optimizer.step()
        masks = sparsifier.masks
        assert all(mask.sum() == mask.numel() * 3 // 4 for mask in masks.values())
        assert list(masks) == LAYERS
        for name, mask in masks.items():
            dense[name][mask.repeat_interleave(4, 0).repeat_interleave(4, 1)] = 0
        assert torch.allclose(seen, nn.utils.get_total_norm(list(dense.values())))
