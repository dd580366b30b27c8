"""Speed of pruned models: what is exported against the dense model on the same masks.

Results are checked first. Each part prints speedups, medians over interleaved rounds in this one run: larger is faster.
Tiles: one linear layer, as `tiled` converts it, and as torch's own block-sparse matrix (BSR).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import product

import torch
import torch.nn.functional as F
from interleaved import DEVICE, machine, ratios
from torch import nn

from sparse_lightning import TileLinear, tiled

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


def main() -> None:
    """Check, measure, print: one function for each part."""
    torch.manual_seed(0)
    with torch.no_grad():
        measure_tiles()


if __name__ == "__main__":
    main()
