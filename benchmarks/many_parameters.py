"""The cost of many parameters: the hold at every step, and an update, from 10 to 1,000 tensors.

Each case is checked first: exactly the pruned blocks are zero after a step. Then steps with and without the hook of the
engine are interleaved in one run, with a hand-written loop over masks and `torch._foreach_mul_` beside them. Last, the
time of the hold is fitted to the number of tensors and to their bytes.

Run with `bars`, `growth`, `host` or `others` for a part.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from engine import EngineHook
from interleaved import interleaved, ratios
from torch import nn

from sparse_lightning import NM, Blocks, Constant, Magnitude, Neurons, Sparsifier
from sparse_lightning.kernels.availability import has_triton
from sparse_lightning.kernels.block_fill import native
from sparse_lightning.patterns import Pattern

SPARSITY, BATCH = 0.75, 8


class Stack:
    """Square linear layers one after the other, in pairs, trained with AdamW."""

    def __init__(self, layers: int, size: int, pattern: Pattern, sparsity: float = SPARSITY) -> None:
        torch.manual_seed(0)
        pairs = [(nn.Linear(size, size), nn.Linear(size, size)) for _ in range(layers // 2)]
        self.model = nn.Sequential(*(nn.Sequential(*pair) for pair in pairs))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.x, self.layers = torch.randn(BATCH, size), layers
        self.sparsifier = Sparsifier([pattern], Constant(sparsity, end=0), Magnitude(), update_every=1)
        self.hook = EngineHook(self.sparsifier, self.model, self.optimizer)
        self.step()

    def step(self) -> None:
        """Make a step with the hook of the engine."""
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()

    def dense_step(self) -> None:
        """Make a step without it."""
        with self.hook.replaced():
            self.step()

    def masks(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the pruned weights, and 0 or 1 for each of their elements."""
        scopes = self.sparsifier.attachments
        specs = {spec: (block, name, s) for s in scopes for name, block in s.blocks.items() for spec in block.blocks()}
        kept: dict[int, torch.Tensor] = {}
        for spec, (block, name, scope) in specs.items():
            mask = spec.broadcast_block_to_element(block.grid_of(spec, scope.masks[name]))
            kept.setdefault(id(spec.param), torch.ones_like(spec.param)).masked_fill_(mask.view_as(spec.param), 0)
        weights = [p.detach() for p in self.model.parameters() if id(p) in kept]
        return weights, [kept[id(p)] for p in self.model.parameters() if id(p) in kept]

    def check(self) -> None:
        """Check that exactly the pruned elements are zero after a step."""
        self.step()
        for weight, keep in zip(*self.masks(), strict=True):
            assert torch.equal(weight != 0, keep != 0), "the weights that are zero are not those that are pruned"

    def parameters(self) -> int:
        """Return how many parameters are pruned."""
        return len(self.masks()[0])


def loop(weights: list[torch.Tensor], masks: list[torch.Tensor]) -> None:
    """Hold masks as one would write it by hand."""
    for weight, mask in zip(weights, masks, strict=True):
        weight.mul_(mask)


def measure(stack: Stack, rounds: int = 40) -> dict[str, float]:
    """Return ratios to the dense step, and times in microseconds."""
    stack.check()
    weights, masks = stack.masks()
    actions: dict[str, Callable[[], object]] = {"dense": stack.dense_step, "sparse": stack.step}
    step = ratios(actions, base="dense", rounds=rounds)["sparse"]
    alone = {
        "hold": stack.sparsifier.hold,
        "loop": lambda: loop(weights, masks),
        "foreach": lambda: torch._foreach_mul_(weights, masks),
        "update": stack.sparsifier.update_now,
        "dense": stack.dense_step,
    }
    times = interleaved(alone, rounds=rounds // 2)
    return {"step": step, **{name: 1e6 * taken for name, taken in times.items()}}


BARS = {
    "200 × 64×64, 8×8": (Stack, (200, 64, Blocks("*.weight", (8, 8))), 1.05, 60),
    "400 × 32×32, 4×4": (Stack, (400, 32, Blocks("*.weight", (4, 4))), 1.07, 60),
    "100 × 256×256, 32×32": (Stack, (100, 256, Blocks("*.weight", (32, 32))), 1.03, 100),
}

OTHERS = {
    "10 × 4096×4096, 32×32": (10, 4096, Blocks("*.weight", (32, 32))),
    "10 × 16×16, 4×4": (10, 16, Blocks("*.weight", (4, 4))),
    "1000 × 16×16, 4×4": (1000, 16, Blocks("*.weight", (4, 4))),
    "1000 × 64×64, 8×8": (1000, 64, Blocks("*.weight", (8, 8))),
    "1000 × 64×64, 1×1": (1000, 64, Blocks("*.weight", (1, 1))),
    "200 × 64×64, 2:4": (200, 64, NM("*.weight", 2, 4)),
    "100 × 256×256, neurons": (100, 256, Neurons("*.0", "*.1")),
}


def row(name: str, found: dict[str, float], tensors: int, bars: str = "") -> None:
    """Print one case."""
    beside = f"{found['hold'] / found['loop']:5.2f} × loop {found['hold'] / found['foreach']:5.2f} × foreach"
    update = f"update {found['update'] / tensors:7.1f} µs per parameter, {found['update'] / found['dense']:.3f} steps"
    held = f"step {found['step']:6.3f} × dense, hold {found['hold']:8.0f} µs ({beside})"
    print(f"{name:24s} {held}, {update}{bars}", flush=True)


def fitted(points: list[tuple[float, float]]) -> float:
    """Return the exponent of a power law through points, by least squares of logarithms."""
    xs, ys = ([math.log(p[i]) for p in points] for i in (0, 1))
    x, y = statistics.fmean(xs), statistics.fmean(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def hold_time(tensors: int, size: int) -> float:
    """Return the median time of the hold alone, in microseconds."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(tensors))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sparsifier = Sparsifier([Blocks("*.weight", (16, 16))], Constant(SPARSITY, end=0), Magnitude(), update_every=1)
    sparsifier.attach(model, optimizer)
    sparsifier.update_now()
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        sparsifier.hold()
        times.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(times[5:])


def host_time(tensors: int = 500) -> float | None:
    """Return the time of a hold on a GPU without its launch, in microseconds: what the host does for many parameters.

    The tables are those of the Triton kernel, on the CPU, and the launch does nothing; None without Triton.
    """
    if not has_triton():
        return None
    from sparse_lightning.kernels.block_fill import triton

    class Nothing:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *tables, **options: None

    on_cpu = partial(triton.TritonFill, device=torch.device("cpu"))
    with mock.patch.multiple(triton, _fill=Nothing(), _mark=Nothing()), mock.patch.object(native, "NativeFill", on_cpu):
        return hold_time(tensors, 64)


def growth() -> None:
    """Print how the time of the hold grows: with the number of tensors at constant bytes, and with bytes."""
    counts = [10, 40, 160, 640]
    same_bytes = [(n, hold_time(n, int(math.sqrt((1 << 23) / n)) // 16 * 16)) for n in counts]
    same_count = [(16.0 * size * size * 4, hold_time(16, size)) for size in (64, 256, 1024, 2048)]
    times = ", ".join(f"{n}: {t:.0f} µs" for n, t in same_bytes)
    print(f"growth with tensors at 33 MB: exponent {fitted(same_bytes):.2f} ({times})")
    times = ", ".join(f"{b / 1e6:.1f} MB: {t:.0f} µs" for b, t in same_count)
    print(f"growth with bytes at 16 tensors: exponent {fitted(same_count):.2f} ({times})")


def print_bars() -> None:
    """Print the cases with limits."""
    for name, (make, arguments, step, update) in BARS.items():
        stack = make(*arguments)
        row(name, measure(stack, 100), stack.parameters(), f"  (at most {step}, {update} µs)")


def print_others() -> None:
    """Print cases from few small tensors to large ones, of all kinds of blocks."""
    for name, (layers, size, pattern) in OTHERS.items():
        sparsity = 0.5 if isinstance(pattern, NM | Neurons) else SPARSITY
        stack = Stack(layers, size, pattern, sparsity)
        row(name, measure(stack, 6 if size == 4096 else 20), stack.parameters())


def print_host() -> None:
    """Print the time of the host in a hold on a GPU."""
    host = host_time()
    print(f"host time of a hold of 500 parameters on a GPU, without the launch: {host or math.nan:.0f} µs (limit 100)")


PARTS = {"bars": print_bars, "growth": growth, "host": print_host, "others": print_others}


def main() -> None:
    """Check, measure, print: all parts, or those that are named."""
    print(f"{torch.get_num_threads()} threads, batch of {BATCH}, {SPARSITY:.0%} sparsity", flush=True)
    for name in sys.argv[1:] or PARTS:
        PARTS[name]()


if __name__ == "__main__":
    main()
