"""The cost of training with the callback: a stack of four transformer MLPs, AdamW, 32×32 blocks, 75 % sparsity.

An optimizer step with all that `SparsityCallback` does is compared to the dense step of the same model. Results are
checked first. Ratios are medians over interleaved rounds of one run. Memory is the median peak of separate processes,
beyond the peak of dense steps. Run with `hold`, `update`, `observe` or `memory` for a part.
"""

from __future__ import annotations

import io
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from interleaved import DEVICE, finish, machine, peak_on_gpu, ratios
from torch import nn

from sparse_lightning import EMA, Blocks, Constant, Criterion, ElementwiseTaylor, Magnitude, Movement, Sparsifier

LONG = 10**9
"""Steps beyond the end of every run."""

WIDTH, LAYERS, TOKENS, BLOCK, SPARSITY = 768, 4, 128, 32, 0.75


class EngineHook:
    """The hook that `attach` registers on an optimizer, which can be replaced for a while."""

    def __init__(self, sparsifier: Sparsifier, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._register = optimizer.register_step_post_hook
        # Without the hook, the steps of the optimizer are those of one that is not attached.
        warnings.filterwarnings("ignore", message=".*no attached optimizer makes a step")
        with mock.patch.object(optimizer, "register_step_post_hook", self._record):
            sparsifier.attach(model, optimizer)

    def _record(self, hook: Callable[..., None]) -> torch.utils.hooks.RemovableHandle:
        self.hook, self._handle = hook, self._register(hook)
        return self._handle

    @contextmanager
    def replaced(self, *hooks: Callable[..., None]) -> Iterator[None]:
        """Register these hooks instead, or none."""
        self._handle.remove()
        handles = [self._register(hook) for hook in hooks]
        yield
        for handle in handles:
            handle.remove()
        self._handle = self._register(self.hook)


class Run:
    """A model with its optimizer, sparse or dense."""

    device = DEVICE

    def __init__(self, sparse: bool = True, criterion: Criterion | None = None) -> None:
        torch.manual_seed(0)
        parts = [(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS)]
        self.model = nn.Sequential(*(nn.Sequential(*layers) for layers in parts)).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.sparsifier: Sparsifier | None = None
        self.x, self.criterion = torch.randn(TOKENS, WIDTH, device=self.device), criterion or Magnitude()
        if sparse:
            self.attach()

    def attach(self) -> None:
        """Attach a Sparsifier; after step 0, its schedule has no update, so that `update` decides when there is one.

        A criterion with state observes every step.
        """
        is_observing = bool(self.criterion.states)
        schedule, every = (Constant(SPARSITY, end=LONG), LONG) if is_observing else (Constant(SPARSITY, end=0), 1)
        rhythm = {"update_every": every, "observe_every": 1 if is_observing else None}
        self.sparsifier = Sparsifier([Blocks("*.weight", (BLOCK, BLOCK))], schedule, self.criterion, **rhythm)
        self.hook = EngineHook(self.sparsifier, self.model, self.optimizer)

    def backward(self) -> None:
        """Compute the gradients."""
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()

    def dense_step(self) -> None:
        """Make a step without the hook of the engine on the optimizer."""
        with self.hook.replaced():
            self.backward()
            self.optimizer.step()

    def step(self) -> None:
        """Make a step as the callback does if gradients are not clipped."""
        self.backward()
        if self.sparsifier is not None:
            self.sparsifier.update(self.optimizer)
        self.optimizer.step()

    def clipped_step(self) -> None:
        """Make a step as the callback does if gradients are clipped, without the clipping itself."""
        self.backward()
        if self.sparsifier is not None:
            self.sparsifier.before_step(self.optimizer)
        self.optimizer.step()

    def update(self) -> None:
        """Make an update: score, select, apply."""
        assert self.sparsifier is not None
        self.sparsifier.update_now()

    def weights(self) -> int:
        """Return the bytes of the weights."""
        return sum(p.nbytes for p in self.model.parameters())

    def checkpoint(self) -> int:
        """Return the bytes of a checkpoint."""
        buffer = io.BytesIO()
        extra = {} if self.sparsifier is None else self.sparsifier.state_dict()
        torch.save([self.model.state_dict(), self.optimizer.state_dict(), extra], buffer)
        return buffer.tell()


def hook_fraction(run: Run, rounds: int = 60) -> float:
    """Return the time in the hook of the optimizer as a fraction of the rest of the step, both medians.

    It resolves one percent even if whole steps vary by several.
    """
    inside, steps = [], []

    def timed(*arguments: object) -> None:
        finish()
        begin = time.perf_counter()
        run.hook.hook(*arguments)
        finish()
        inside.append(time.perf_counter() - begin)

    with run.hook.replaced(timed):
        for _ in range(rounds):
            finish()
            begin = time.perf_counter()
            run.step()
            finish()
            steps.append(time.perf_counter() - begin)
    held = statistics.median(inside)
    return held / (statistics.median(steps) - held)


def observing(run: Run) -> float:
    """Return the time of a step in which a criterion with state observes the gradients, relative to the dense step."""
    check(run)
    return ratios({"dense": run.dense_step, "observed": run.step}, base="dense", rounds=60, settled=True)["observed"]


def check(run: Run) -> None:
    """Check that the sparsity is exact, and that exactly the pruned blocks are zero after a step."""
    for _ in range(2):
        run.step()
    assert run.sparsifier is not None
    for name, mask in run.sparsifier.masks.items():
        assert int(mask.sum()) == int(SPARSITY * mask.numel()), name
        weight = run.model.get_parameter(name).detach()
        spread = mask.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        assert not weight[spread].any(), f"{name} is not zero where it is pruned"
        assert weight[~spread].all(), f"{name} is zero where it is not pruned"


EXACT = {"MALLOC_MMAP_THRESHOLD_": "4096", "MALLOC_TRIM_THRESHOLD_": "4096", "MALLOC_TOP_PAD_": "0"}
"""Make the C library free memory at once, so that a peak is what is in use, without what malloc retains."""


def peak_fraction(allocation: dict[str, str]) -> float:
    """Return the peak memory of sparse steps with updates beyond that of dense steps, as a fraction of the weights."""
    environment = os.environ | allocation | {"PYTHONPATH": os.pathsep.join(sys.path)}
    program = "import engine; print(engine.measure_peak())"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    return float(ran.stdout)


def measure_peak() -> float:
    """Measure in this process, which must be a new one; what is compiled and loaded on first use is not counted."""
    other = Run(sparse=True)
    other.step()
    other.update()
    del other
    run = Run(sparse=False)
    run.step()

    def dense_steps() -> None:
        for _ in range(6):
            run.step()

    dense = _peak(dense_steps)
    run.attach()

    def steps() -> None:
        run.step()
        run.update()
        run.step()

    return (_peak(steps) - dense) / run.weights()


def _peak(action) -> int:  # type: ignore[no-untyped-def]
    if DEVICE.type == "cuda":
        return peak_on_gpu(action)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak
    action()
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def print_hold(sparse: Run) -> None:
    """Print what the callback costs at every step."""
    # Many rounds of two interleaved actions, to resolve one percent.
    actions = {"dense": sparse.dense_step, "sparse": sparse.step}
    held = ratios(actions, base="dense", rounds=80, settled=True)["sparse"]
    print(f"with the callback   {held:6.3f} × the dense step  (at most 1.01 as the median of five runs)", flush=True)
    print(f"time in its hook    {hook_fraction(sparse):6.2%} of the rest of the step", flush=True)


def print_update(sparse: Run) -> None:
    """Print what an update, and masked gradients, cost."""
    actions = {"dense": sparse.dense_step, "clipped": sparse.clipped_step, "update": sparse.update}
    compared = ratios(actions, base="dense", rounds=30)
    print(f"masked gradients    {compared['clipped']:6.3f} × the dense step", flush=True)
    print(f"an update           {compared['update']:6.3f} of a dense step  (at most 0.05)", flush=True)


def print_observing(sparse: Run) -> None:
    """Print what criteria with state cost that observe every step."""
    for criterion in (Movement(), EMA(ElementwiseTaylor())):
        name, ratio = type(criterion).__name__, observing(Run(criterion=criterion))
        print(f"{name + ' every step':19s} {ratio:6.3f} × the dense step  (at most 1.05)", flush=True)


def print_memory(sparse: Run) -> None:
    """Print the memory of training, and the size of checkpoints."""
    dense = Run(sparse=False)
    dense.step()
    # What malloc retains of the tensors of a dense step varies by whole tensors from process to process.
    peak, in_use = statistics.median(peak_fraction({}) for _ in range(5)), peak_fraction(EXACT)
    print(f"memory              {peak:6.2%} of the weights  (at most 0.5 %)")
    print(f"memory in use       {in_use:6.2%} of the weights, without what malloc retains")
    print(
        f"checkpoint          {sparse.checkpoint() / dense.checkpoint() - 1:6.2%} larger  (at most 0.5 %)", flush=True
    )


PARTS = {"hold": print_hold, "update": print_update, "observe": print_observing, "memory": print_memory}


def main() -> None:
    """Check, measure, print: all parts, or those that are named."""
    sparse = Run()
    check(sparse)
    sparse.update()
    print(f"{sparse.weights() / 1e6:.0f} MB of weights, {TOKENS} tokens, {machine()}", flush=True)
    for name in sys.argv[1:] or PARTS:
        PARTS[name](sparse)


if __name__ == "__main__":
    main()
