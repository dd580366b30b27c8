"""What training with the callback costs: a stack of four transformer MLPs, AdamW, 32×32 blocks, 75 % pruned.

A step is one of the optimizer, with what `SparsityCallback` does around it, beside the step of the same model without.
Results are checked first. Ratios are medians of interleaved rounds in this one run; memory is the peak of a process
of its own, beyond that of dense steps.
"""

from __future__ import annotations

import io
import os
import statistics
import subprocess
import sys
import time

import torch
from interleaved import ratios
from torch import nn

from sparse_lightning import Blocks, Constant, Sparsifier

WIDTH, LAYERS, TOKENS, BLOCK, SPARSITY = 768, 4, 128, 32, 0.75


class Run:
    """A model with its optimizer, sparse or dense."""

    def __init__(self, sparse: bool = True) -> None:
        torch.manual_seed(0)
        parts = [(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS)]
        self.model = nn.Sequential(*(nn.Sequential(*layers) for layers in parts))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.sparsifier: Sparsifier | None = None
        self.x = torch.randn(TOKENS, WIDTH)
        if sparse:
            # The updates are called for below, not made by the schedule.
            schedule = Constant(SPARSITY, end=0)
            self.sparsifier = Sparsifier([Blocks("*.weight", (BLOCK, BLOCK))], schedule, update_every=1)
            self.sparsifier.attach(self.model, self.optimizer)

    def backward(self) -> None:
        """Gradients."""
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()

    def dense_step(self) -> None:
        """A step without the engine: its hook on the optimizer is put aside."""
        hooks = self.optimizer._optimizer_step_post_hooks
        self.optimizer._optimizer_step_post_hooks = type(hooks)()
        self.backward()
        self.optimizer.step()
        self.optimizer._optimizer_step_post_hooks = hooks

    def step(self) -> None:
        """What the callback does where gradients are not clipped."""
        self.backward()
        if self.sparsifier is not None:
            self.sparsifier.update(self.optimizer)
        self.optimizer.step()

    def clipped_step(self) -> None:
        """What it does where they are; the clipping itself is left out."""
        self.backward()
        if self.sparsifier is not None:
            self.sparsifier.before_step(self.optimizer)
        self.optimizer.step()

    def update(self) -> None:
        """Score, select, apply, whatever the schedule says."""
        assert self.sparsifier is not None
        assert self.sparsifier._work is not None
        self.sparsifier._work._update()

    def weights(self) -> int:
        """Bytes of the weights."""
        return sum(p.nbytes for p in self.model.parameters())

    def checkpoint(self) -> int:
        """Bytes of all that is saved."""
        buffer = io.BytesIO()
        extra = {} if self.sparsifier is None else self.sparsifier.state_dict()
        torch.save([self.model.state_dict(), self.optimizer.state_dict(), extra], buffer)
        return buffer.tell()


def hook_share(run: Run, rounds: int = 60) -> float:
    """The time in the hook of the optimizer over that of the rest of the step, each a median.

    It shows a percent where whole steps differ by several from one to the next.
    """
    hooks = run.optimizer._optimizer_step_post_hooks
    [(key, hook)] = hooks.items()
    inside, steps = [], []

    def timed(*arguments: object) -> None:
        begin = time.perf_counter()
        hook(*arguments)
        inside.append(time.perf_counter() - begin)

    hooks[key] = timed
    for _ in range(rounds):
        begin = time.perf_counter()
        run.step()
        steps.append(time.perf_counter() - begin)
    hooks[key] = hook
    held = statistics.median(inside)
    return held / (statistics.median(steps) - held)


def check(run: Run) -> None:
    """The blocks asked for are pruned, and stay zero after a step."""
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
"""Lets the C library give memory back at once, so that a peak is what is in use, and not what it keeps for later."""


def peak_share(allocation: dict[str, str]) -> float:
    """The peak of memory of sparse steps with updates beyond that of dense steps, as a share of the weights."""
    environment = os.environ | allocation | {"PYTHONPATH": os.pathsep.join(sys.path)}
    program = "import engine; print(engine.measure_peak())"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    return float(ran.stdout)


def measure_peak() -> float:
    """Run in a process of its own; what is compiled and loaded on first use is not counted."""
    other = Run(sparse=True)
    other.step()
    other.update()
    del other
    run = Run(sparse=False)
    run.step()

    def dense_steps() -> None:
        run.step()
        run.step()

    dense = _peak(dense_steps)
    run.sparsifier = Sparsifier([Blocks("*.weight", (BLOCK, BLOCK))], Constant(SPARSITY, end=0), update_every=1)
    run.sparsifier.attach(run.model, run.optimizer)

    def steps() -> None:
        run.step()
        run.update()
        run.step()

    return (_peak(steps) - dense) / run.weights()


def _peak(action) -> int:  # type: ignore[no-untyped-def]
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    action()
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def main() -> None:
    """Check, measure, print."""
    sparse = Run()
    check(sparse)
    sparse.update()
    # Two actions that take turns, and many rounds: a percent is to be told from the noise.
    held = ratios({"dense": sparse.dense_step, "sparse": sparse.step}, base="dense", rounds=200)["sparse"]
    actions = {"dense": sparse.dense_step, "clipped": sparse.clipped_step, "update": sparse.update}
    shares = ratios(actions, base="dense", rounds=40)
    dense = Run(sparse=False)
    dense.step()
    print(f"{sparse.weights() / 1e6:.0f} MB of weights, {TOKENS} tokens, {torch.get_num_threads()} threads")
    print(f"with the callback   {held:6.3f} × the dense step  (at most 1.02)")
    print(f"of it in its hook   {hook_share(sparse):6.2%}")
    print(f"gradients masked    {shares['clipped']:6.3f} × the dense step")
    print(f"an update           {shares['update']:6.3f} of a dense step  (at most 0.08)")
    print(f"memory              {peak_share({'MALLOC_MMAP_THRESHOLD_': '65536'}):6.2%} of the weights  (at most 0.5 %)")
    print(f"of it in use        {peak_share(EXACT):6.2%}, without what the C library keeps for later")
    print(f"checkpoint          {sparse.checkpoint() / dense.checkpoint() - 1:6.2%} larger  (at most 0.5 %)")


if __name__ == "__main__":
    main()
