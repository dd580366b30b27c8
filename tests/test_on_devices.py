"""Every part on each device: flows, kernels, hold, a Trainer with AMP and clipping, CUDA graphs.

Each law is stated for the CPU too, so that the tests themselves are tested where there is no GPU. Triton's kernels and
several processes have tests of their own: see `test_triton_kernels` and `test_distributed`.
"""

from __future__ import annotations

import copy
import math

import lightning as L
import pytest
import torch
from devices import CUDA, accelerator, each_device
from flow_cases import DTYPES, SHIPPED, awkward, check_agreement, in_turn, matrices
from small_nets import LAYERS, OPTIMIZERS, Net, Spy, batches, broken_blocks
from torch import nn
from triton_harness import needs_triton

from sparse_lightning import (
    EMA,
    NM,
    SET,
    AdamFisher,
    Blocks,
    Constant,
    ElementwiseTaylor,
    Fisher,
    Global,
    Gradual,
    Linear,
    Magnitude,
    Movement,
    Neurons,
    Proximal,
    Random,
    RigL,
    Sensitivity,
    Soft,
    Sparsifier,
    SparsityCallback,
    Taylor,
    Wanda,
)
from sparse_lightning.kernels.block_score import compiled
from sparse_lightning.kernels.nm_select import nm_select

needs_compiler = pytest.mark.skipif(not compiled.has_compiler(), reason="there is no C++ compiler")
LOWERINGS = [
    pytest.param("cpu", "compiled", marks=[needs_compiler, pytest.mark.exhaustive]),
    *(pytest.param("cuda", lowering, marks=CUDA.marks) for lowering in ("reference", "compiled")),
    pytest.param("cuda", "triton", marks=[*CUDA.marks, needs_triton]),
    pytest.param("cuda", None, marks=CUDA.marks),
]


@pytest.mark.parametrize(("device", "lowering"), LOWERINGS)
def test_flows_have_the_scores_of_the_reference_on_a_cpu(device, lowering, monkeypatch):
    """All criteria on all layouts, in dtypes that take turns; compiling takes long on a CPU: two criteria there."""
    monkeypatch.setattr(compiled, "WORTH", 20000)
    names = list(SHIPPED) if device == "cuda" else ["taylor", "movement"]
    for first, name in enumerate(names):
        made = [in_turn(first, device=d) if device == "cuda" else matrices(device=d) for d in (device, "cpu")]
        check_agreement(lowering, SHIPPED[name], *made)


def bits(tensor):
    """A tensor as integers on the CPU: NaN equals NaN, and −0.0 is not 0.0."""
    return tensor.detach().cpu().contiguous().view(torch.uint8)


@each_device
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_blocks_are_filled_scaled_and_reduced_as_plain_torch_does(device, dtype):
    for name, scope in awkward(dtype, device).items():
        for block in scope.blocks():
            mask = torch.rand(block.grid_shape) < 0.5
            scale = torch.rand(block.grid_shape).where(mask, 1.0).to(device)
            for spec, inside in block.get_masks(mask.to(device)).items():
                plain = spec.view.read().detach().clone()
                spread = torch.zeros(plain.shape, dtype=torch.bool, device=device)
                spread[inside] = True
                grid = block.grid_of(spec, mask.to(device))
                spec.apply_mask(grid)
                wanted = plain.masked_fill(spread, 0)
                assert torch.equal(bits(spec.view.read()), bits(wanted)), f"{name}: filled"
                factors = block.grid_of(spec, scale)
                before = spec.norms()
                spec.apply_multiplier(factors)
                torch.testing.assert_close(spec.norms(), before * factors, rtol=2e-2, atol=1e-3)


@each_device
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize(("shape", "n", "m"), [((63, 32), 2, 4), ((5, 7, 60), 3, 12), ((3, 1024), 100, 512)], ids=str)
def test_nm_selection_is_that_of_a_stable_sort(device, dtype, shape, n, m):
    weight = torch.randn(*shape, 2).mul(2).round().to(dtype)[..., 0]
    weight[..., ::7] = math.nan
    order = weight.float().abs().neg().unflatten(-1, (-1, m)).sort(dim=-1, stable=True).indices
    wanted = torch.ones(order.shape, dtype=torch.bool).scatter_(-1, order[..., :n], False).flatten(-2)
    ours = weight.to(device)
    mask = nm_select(ours, n, m)
    assert torch.equal(mask.cpu(), wanted)
    assert torch.equal(bits(ours), bits(weight.masked_fill(wanted, 0)))


def loss_of(net, device, step=0):
    x, y = list(batches(4))[step % 4]
    return nn.functional.mse_loss(net(x.to(device)), y.to(device))


def check_hold(sparsifier, label):
    broken = broken_blocks(sparsifier.scopes, sparsifier.masks)
    assert not broken, f"{label}: {broken} are not zero where they are pruned"


@each_device
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_hold_in_a_plain_loop(device, optimizer):
    net = Net().to(device)
    made = OPTIMIZERS[optimizer](net.parameters())
    sparsifier = Sparsifier([Blocks(LAYERS, (4, 4))], Linear(0.75, end=4), update_every=2)
    sparsifier.attach(net, made)
    for step in range(8):
        made.zero_grad()
        loss_of(net, device, step).backward()
        sparsifier.before_step()
        made.step()
        check_hold(sparsifier, f"step {step}")
    assert sparsifier.sparsity() == 0.75


@each_device
def test_hold_with_a_grad_scaler_that_skips_steps(device):
    net = Net().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
    sparsifier = Sparsifier([Blocks(LAYERS, (4, 4))], Constant(0.5, end=100), Magnitude(), update_every=1)
    sparsifier.attach(net, optimizer)
    for step in range(6):
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16 if device == "cpu" else torch.float16):
            loss = loss_of(net, device, step)
        scaler.scale(loss).backward()
        if step == 3:
            net.up.weight.grad.fill_(torch.inf)
        scaler.unscale_(optimizer)
        sparsifier.before_step()
        scaler.step(optimizer)
        scaler.update()
        check_hold(sparsifier, f"step {step}")
    assert sparsifier.step == 5, "a skipped step is not counted"


PARTS = {
    "magnitude, gradual, global": (Magnitude(), Gradual(), Global()),
    "taylor, RigL": (Taylor(), RigL(0.5), None),
    "movement, soft": (Movement(), Soft(updates=2), None),
    "Wanda, SET": (Wanda(), SET(0.5), None),
    "Adam's Fisher, proximal": (AdamFisher(), Proximal(), None),
    "Fisher, gradual": (Fisher(), Gradual(), None),
    "sensitivity, gradual": (Sensitivity(), Gradual(), None),
    "EMA, gradual": (EMA(ElementwiseTaylor()), Gradual(), None),
    "random, gradual": (Random(), Gradual(), None),
}
PATTERNS = {
    "blocks": lambda: [Blocks(LAYERS, (4, 4))],
    "N:M": lambda: [NM(LAYERS, 2, 4)],
    "neurons": lambda: [Neurons("up", "down")],
}


@each_device
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("parts", PARTS)
def test_every_criterion_and_method_trains_and_resumes(device, parts, pattern):
    def attached(net):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        sparsifier = Sparsifier(PATTERNS[pattern](), Linear(0.5, begin=1, end=4), *PARTS[parts], update_every=1)
        sparsifier.attach(net, optimizer)
        return sparsifier, optimizer

    def train(net, sparsifier, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            loss_of(net, device, step).backward()
            sparsifier.before_step()
            optimizer.step()
            check_hold(sparsifier, f"{parts}, {pattern}, step {step}")

    first = Net().to(device)
    sparsifier, optimizer = attached(first)
    train(first, sparsifier, optimizer, range(3))
    second = Net().to(device)
    second.load_state_dict(first.state_dict())
    resumed, other = attached(second)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed.load_state_dict(copy.deepcopy(sparsifier.state_dict()))
    train(first, sparsifier, optimizer, range(3, 6))
    train(second, resumed, other, range(3, 6))
    for name, mask in sparsifier.masks.items():
        assert mask.device.type == device
        assert torch.equal(mask, resumed.masks[name]), f"{name} has another mask after a resume"
    assert any(mask.any() for mask in sparsifier.masks.values())


@each_device
@pytest.mark.parametrize("clip", [None, 0.05], ids=["", "clipped"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
def test_the_callback_in_a_trainer_with_amp_and_clipping(device, precision, clip, tmp_path):
    if device == "cpu" and precision == "16-mixed":
        pytest.skip("Lightning has no 16-mixed on a CPU: test_hold_with_a_grad_scaler_that_skips_steps runs there")
    callback = SparsityCallback([Blocks(LAYERS, (4, 4))], Linear(0.75, end=0.9), update_every=2)
    spy = Spy(callback.sparsifier)
    off = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    where = {"accelerator": accelerator(device), "devices": 1, **dict.fromkeys(off, False)}
    options = {"precision": precision, "gradient_clip_val": clip, **where}
    trainer = L.Trainer(max_epochs=3, callbacks=[callback, spy], **options)
    trainer.fit(Net())
    trainer.save_checkpoint(tmp_path / "saved")
    assert {"forward", "batch end", "validation"} <= set(spy.readings)
    assert float(trainer.callback_metrics["sparsity/actual"]) == pytest.approx(0.75)
    again = SparsityCallback([Blocks(LAYERS, (4, 4))], Linear(0.75, end=0.9), update_every=2)
    trainer = L.Trainer(max_epochs=4, callbacks=[again, Spy(again.sparsifier)], **options)
    trainer.fit(Net(), ckpt_path=tmp_path / "saved")
    assert float(trainer.callback_metrics["sparsity/actual"]) == pytest.approx(0.75)


def graphed(step, device):
    """Return a step as a CUDA graph that was captured once; on a CPU the step itself."""
    if device == "cpu":
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class Loop:
    """A step on data that lies still, as a graph needs it."""

    def __init__(self, device, lr=0.01, final=0.5, end=0):
        self.net, self.device = Net().to(device), device
        self.x, self.y = (part.to(device) for part in next(iter(batches(1))))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=lr, capturable=device == "cuda")
        schedule = Linear(final, end=end) if end else Constant(final, end=0)
        self.sparsifier = Sparsifier([Blocks(LAYERS, (4, 4))], schedule, update_every=1)
        self.sparsifier.attach(self.net, self.optimizer)

    def backward(self):
        """Gradients stay where they are, for a graph."""
        self.optimizer.zero_grad(set_to_none=False)
        nn.functional.mse_loss(self.net(self.x), self.y).backward()

    def step(self):
        """The whole step; the hold is a hook of the optimizer."""
        self.backward()
        self.optimizer.step()


@each_device
def test_a_cuda_graph_around_the_passes_follows_the_masks(device):
    """Forward and backward pass are captured; the optimizer's step, and with it updates and the hold, is not."""
    loop = Loop(device, final=0.75, end=6)
    passes = graphed(loop.backward, device)
    for step in range(9):
        passes()
        loop.sparsifier.before_step()
        loop.optimizer.step()
        check_hold(loop.sparsifier, f"step {step}")
    assert loop.sparsifier.sparsity() == 0.75


@each_device
@pytest.mark.parametrize("rate", [float, torch.tensor], ids=["", "learning rate in a tensor"])
def test_a_cuda_graph_around_a_step_holds_masks_that_stay(device, rate):
    """Captured after the last update: a replay trains the kept weights, and leaves pruned blocks at zero."""
    loop = Loop(device, rate(0.01) if rate is float else rate(0.01, device=device))
    for _ in range(2):
        loop.step()
    step = graphed(loop.step, device)
    for i in range(4):
        before = loop.net.up.weight.detach().clone()
        step()
        check_hold(loop.sparsifier, f"replay {i}")
        assert not torch.equal(loop.net.up.weight, before), "a replay changed nothing"
    assert loop.sparsifier.sparsity() == 0.5
