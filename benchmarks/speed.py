"""Speed of pruned models: what is exported against the dense model on the same masks.

Results are checked first. Each part prints speedups, medians over interleaved rounds in this one run: larger is faster.
Tiles: one linear layer, as `tiled` converts it, and as torch's own block-sparse matrix (BSR).
Compact: a transformer block and a convolutional network without their zero units; the latter also as Torch-Pruning
leaves it, where that is installed.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import pairwise, product

import torch
import torch.nn.functional as F
from interleaved import DEVICE, machine, ratios
from torch import nn

from sparse_lightning import Constant, Coupled, Magnitude, Sparsifier, TileLinear, Uniform, compact, tiled
from sparse_lightning.models.transformer import Block

SHAPES = [(1024, 1024), (3072, 768)]
TILES, SPARSITIES, ROWS = [32, 64], [0.25, 0.5, 0.75, 0.9], [1, 16, 128]

LIMITS = {(1, 0.75): 3.0, (1, 0.9): 7.0, (128, 0.75): 1.8, (128, 0.9): 4.0}
"""The least speedup for rows and sparsity; 0.95 elsewhere, where a layer may stay dense."""


def pruned_linear(out: int, width: int, tile: int, sparsity: float) -> nn.Linear:
    """Return a layer with this fraction of its tiles zero, chosen at random: rows of tiles are not balanced."""
    linear = nn.Linear(width, out, device=DEVICE)
    grid = out // tile, width // tile
    order = torch.rand(grid[0] * grid[1]).argsort().argsort().view(grid).to(DEVICE)
    kept = order >= round(sparsity * order.numel())
    with torch.no_grad():
        linear.weight *= kept.repeat_interleave(tile, 0).repeat_interleave(tile, 1)
    return linear


def bsr(linear: nn.Linear, tile: int, inputs: torch.Tensor) -> Callable[[], object]:
    """Return the layer by torch's block-sparse matrix."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that BSR is in beta
        weight = linear.weight.detach().to_sparse_bsr((tile, tile))
    assert torch.allclose(F.linear(inputs, weight, linear.bias), linear(inputs), atol=1e-3), "BSR gives other outputs"
    return lambda: F.linear(inputs, weight, linear.bias)


def tile_lines() -> Iterator[tuple[str, float, float]]:
    """Measure each case: yield its line, the speedup and the limit."""
    for (out, width), tile, sparsity, rows in product(SHAPES, TILES, SPARSITIES, ROWS):
        linear, inputs = pruned_linear(out, width, tile, sparsity), torch.randn(rows, width, device=DEVICE)
        small = tiled(linear, (inputs,))
        assert torch.allclose(small(inputs), linear(inputs), atol=1e-4), "tiles give other outputs"
        speedup = _speedup(linear, lambda: small(inputs), inputs)  # noqa: B023
        other = _speedup(linear, bsr(linear, tile, inputs), inputs)
        kept = TileLinear.of(linear, (tile, tile))
        memory = sum(buffer.nbytes for buffer in kept.buffers()) / sum(p.nbytes for p in linear.parameters())
        name = f"{out}×{width}, {tile}×{tile}, {sparsity:.0%}, rows {rows}"
        kind = "tiles" if isinstance(small, TileLinear) else "dense"
        line = f"{name:36} {kind} {speedup:6.2f} ×  BSR {other:5.2f} ×  memory {memory:.3f}"
        yield line, speedup, LIMITS.get((rows, sparsity), 0.95)


def _speedup(linear: nn.Linear, action: Callable[[], object], inputs: torch.Tensor) -> float:
    return 1 / ratios({"dense": lambda: linear(inputs), "other": action}, "dense")["other"]


def measure_tiles() -> None:
    """Print the part of the tiles."""
    print(f"linear layers in fp32, {machine()}; speedup over dense, and memory relative to dense")
    below = 0
    for line, speedup, limit in tile_lines():
        below += speedup < limit
        print(f"{line}  (at least {limit:g}){'  BELOW' if speedup < limit else ''}", flush=True)
    print(f"{below} cases below their limit")


COMPACT_LIMITS = {("block", 0.5): 1.7, ("block", 0.75): 3.2, ("convolutions", 0.5): 2.5}
"""The least speedup of a compacted model at a sparsity."""


def convolutional() -> nn.Sequential:
    """Return six convolutions with batch norms; the channels of all but the last can be removed."""
    widths = [3, 64, 128, 128, 256, 256, 64]
    layers: list[nn.Module] = []
    for i, (read, made) in enumerate(pairwise(widths)):
        layers += [nn.Conv2d(read, made, 3, stride=1 + i % 2, padding=1), nn.BatchNorm2d(made), nn.ReLU()]
    return nn.Sequential(*layers).eval()


def prune_units(model: nn.Module, inputs: torch.Tensor, sparsity: float, multiple_of: int) -> None:
    """Zero a fraction of the units of each family."""
    budget = Uniform(multiple_of=multiple_of)
    pruning = Sparsifier([Coupled(inputs=(inputs,))], Constant(sparsity), Magnitude(), budget=budget)
    pruning.attach(model, [])
    pruning.update_now()
    pruning.detach()


def peer_pruned(model: nn.Module, inputs: torch.Tensor, sparsity: float) -> nn.Module | None:
    """Return a pruned model as Torch-Pruning leaves it, which removes what is zero; None if it is not installed."""
    if find_spec("torch_pruning") is None:
        return None
    import torch_pruning

    copied = copy.deepcopy(model)
    last = [module for module in copied.modules() if isinstance(module, nn.Conv2d)][-1]
    with torch.enable_grad():
        torch_pruning.pruner.BasePruner(
            copied,
            inputs,
            importance=torch_pruning.importance.GroupMagnitudeImportance(p=2),
            pruning_ratio=sparsity,
            round_to=8,
            ignored_layers=[last],
        ).step()
    return copied.eval()


def compact_cases() -> Iterator[tuple[str, str, float, nn.Module, torch.Tensor]]:
    """Yield name, kind, sparsity, model and inputs."""
    for sparsity, tokens in product((0.5, 0.75), (128, 1)):
        block = Block(768, 12, causal=True).eval().to(DEVICE)
        yield f"block, {tokens} tokens", "block", sparsity, block, torch.randn(1, tokens, 768, device=DEVICE)
    yield "conv net, 64×64", "convolutions", 0.5, convolutional().to(DEVICE), torch.randn(1, 3, 64, 64, device=DEVICE)


def measure_compact() -> None:
    """Print the part of compacted models."""
    print(f"\ncompacted models in fp32, {machine()}; speedup over dense")
    for name, kind, sparsity, model, inputs in compact_cases():
        # A trace needs two tokens to leave their number open.
        example = inputs if kind != "block" or inputs.shape[1] > 1 else torch.randn(1, 2, 768, device=DEVICE)
        prune_units(model, example, sparsity, 8 if kind == "convolutions" else 1)
        peer = peer_pruned(model, example, sparsity) if kind == "convolutions" else None
        small = compact(model, (example,))
        assert torch.allclose(small(inputs), model(inputs), atol=1e-4), "the compacted model gives other outputs"
        actions = {"dense": lambda: model(inputs), "compact": lambda: small(inputs)}  # noqa: B023
        if peer is not None:
            assert torch.allclose(peer(inputs), model(inputs), atol=1e-4), "Torch-Pruning gives other outputs"
            actions["Torch-Pruning"] = lambda: peer(inputs)  # noqa: B023
        found = ratios(actions, "dense")
        limit = COMPACT_LIMITS[kind, sparsity]
        others = f"  Torch-Pruning {1 / found['Torch-Pruning']:5.2f} ×" if peer is not None else ""
        speedup = 1 / found["compact"]
        below = "  BELOW" if speedup < limit else ""
        print(f"{name:24} {sparsity:.0%} {speedup:6.2f} ×{others}  (at least {limit:g}){below}", flush=True)


def main() -> None:
    """Check, measure, print: one function for each part."""
    torch.manual_seed(0)
    with torch.no_grad():
        measure_compact()
        measure_tiles()


if __name__ == "__main__":
    main()
