"""Scoring flows at 4096×4096 fp32, 32×32 blocks, compared to reading their inputs once.

Results are checked first. Memory is the peak beyond what was in use before, measured in a separate process.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from interleaved import DEVICE, interleaved, machine, peak_on_gpu

from sparse_lightning import BlockSpec, ScopeSpec
from sparse_lightning.criteria import EMA, Fisher, Taylor
from sparse_lightning.flow import Criterion, Inputs, Scorer, Square, Sum, Value

SIZE, BLOCK = 4096, 32

LOWERINGS = ("reference", "compiled", "triton") if DEVICE.type == "cuda" else ("reference", "compiled")
FASTEST = LOWERINGS[-1]


class SquaredTaylor(Criterion):
    """`(Σ w·g)²`: the scores that Fisher averages, without state."""

    def flow(self, x: Inputs) -> Value:
        """One pass over weights and gradients."""
        return Square()(Sum()(x.weight * x.grad))


def scorer(criterion: Criterion, scope: ScopeSpec, lowering: str) -> Scorer:
    """Return a scorer with one scope attached."""
    made = Scorer(criterion, DEVICE, lowering=lowering)
    made.attach("w", scope)
    return made


def peak_fraction(lowering: str) -> float:
    """Return the peak memory of one Taylor run beyond what was in use, as a fraction of the weights."""
    program = f"import flows; print(flows.measure_peak({lowering!r}))"
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    return float(ran.stdout)


def measure_peak(lowering: str) -> float:
    """Measure in this process, which must be a new one; a first run on the same shapes compiles and loads code."""
    weight = torch.nn.Parameter(torch.ones(SIZE, SIZE, device=DEVICE))
    weight.grad = torch.ones_like(weight)
    run = scorer(Taylor(), ScopeSpec(BlockSpec(weight, (BLOCK, BLOCK))), lowering)
    run.score()
    if DEVICE.type == "cuda":
        return (peak_on_gpu(run.score) - torch.cuda.memory_allocated()) / weight.nbytes
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak
    before = _status("VmRSS")
    run.score()
    return (_status("VmHWM") - before) / weight.nbytes


def _status(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def main() -> None:
    """Check, measure, print."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(SIZE, SIZE, device=DEVICE))
    weight.grad = torch.randn(SIZE, SIZE, device=DEVICE)
    scope = ScopeSpec(BlockSpec(weight, (BLOCK, BLOCK)))
    grid = (SIZE // BLOCK, BLOCK, SIZE // BLOCK, BLOCK)
    wanted = (weight.detach() * weight.grad).view(grid).double().sum((1, 3)).abs()
    runs = {way: scorer(Taylor(), scope, way) for way in LOWERINGS}
    for way, run in runs.items():
        got = run.score()[scope.block].double()
        assert torch.allclose(got, wanted, rtol=1e-3, atol=1e-2), f"Taylor, {way}: wrong scores"
    w, g = weight.detach(), weight.grad
    times = interleaved(
        {"read": lambda: (w.sum(), g.sum()), **{way: run.score for way, run in runs.items()}}
        | {"plain": scorer(SquaredTaylor(), scope, FASTEST).score}
        | {"state": scorer(Fisher(), scope, FASTEST).score}
        | {"EMA": scorer(EMA(SquaredTaylor()), scope, FASTEST).score}
    )
    print(f"{SIZE}×{SIZE} fp32, {BLOCK}×{BLOCK} blocks, {machine()}")
    print(f"reading weights and gradients once {times['read'] * 1e3:.2f} ms")
    limits = {"reference": 4, "compiled": 1.5, "triton": 1.5}
    for way in reversed(LOWERINGS):
        print(f"Taylor {way:9}  {times[way] / times['read']:5.2f} × reading  (at most {limits[way]})")
    print(f"Fisher with state {times['state'] / times['plain']:5.2f} × without    (at most 1.2)")
    print(f"EMA of the same   {times['EMA'] / times['plain']:5.2f} × without    (at most 1.2)")
    for way in runs:
        print(f"memory, {way:9} {peak_fraction(way):6.1%} of the weights (at most 5 %)")


if __name__ == "__main__":
    main()
