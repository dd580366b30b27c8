"""Speed of pruned models: what is exported against the dense model on the same masks.

    PYTHONPATH=. python benchmarks/speed.py            # both parts
    PYTHONPATH=. python benchmarks/speed.py compact    # or one: compact, tiles

Results are checked first. Each part prints speedups, medians over interleaved rounds in this one run: larger is faster.
Compact: a transformer block and a convolutional network without their zero units, one call of each model in each round.
For one token a round is 32 calls of one model, then 32 of the next, the first call included: decoding calls one model
token after token. A second line has the same model called in turn with the dense one, call by call, so that each
call finds the weights evicted from the cache by those of the other model. Beside them a model that was built by hand
with these sizes, which no removal of units can beat, and Torch-Pruning on the same zeros, where it is installed.
Tiles: one linear layer, as `tiled` converts it, and as torch's own block-sparse matrix (BSR); one row is called as one
token is.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
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


def report(line: str, speedup: float, limit: float) -> bool:
    """Print a line with its limit; return whether the limit is met."""
    print(f"{line}  (at least {limit:g}){'  BELOW' if speedup < limit else ''}", flush=True)
    return speedup >= limit


def tile_lines() -> Iterator[tuple[str, float, float]]:
    """Measure each case: yield its line, the speedup and the limit."""
    for (out, width), tile, sparsity, rows in product(SHAPES, TILES, SPARSITIES, ROWS):
        linear, inputs = pruned_linear(out, width, tile, sparsity), torch.randn(rows, width, device=DEVICE)
        small = tiled(linear, (inputs,))
        assert torch.allclose(small(inputs), linear(inputs), atol=1e-4), "tiles give other outputs"
        calls = DECODED if rows == 1 else 1
        speedup = _speedup(linear, lambda: small(inputs), inputs, 101 if rows == 1 else 21, calls)  # noqa: B023
        other = _speedup(linear, bsr(linear, tile, inputs), inputs, 5, calls)
        kept = TileLinear.of(linear, (tile, tile))
        memory = sum(buffer.nbytes for buffer in kept.buffers()) / sum(p.nbytes for p in linear.parameters())
        assert memory <= 1 - sparsity + 0.02, "tiles take more memory than what is kept, and 2 %"
        name = f"{out}×{width}, {tile}×{tile}, {sparsity:.0%}, rows {rows}"
        kind = "tiles" if isinstance(small, TileLinear) else "dense"
        line = f"{name:36} {kind} {speedup:6.2f} ×  BSR {other:5.2f} ×  memory {memory:.3f}"
        yield line, speedup, LIMITS.get((rows, sparsity), 0.95)


def _speedup(linear: nn.Linear, action: Callable[[], object], inputs: torch.Tensor, rounds: int, calls: int) -> float:
    actions = {"dense": repeated(lambda: linear(inputs), calls), "other": repeated(action, calls)}
    return 1 / ratios(actions, "dense", rounds)["other"]


def repeated(action: Callable[[], object], calls: int) -> Callable[[], None]:
    """Return so many calls of an action, one after the other."""

    def run() -> None:
        for _ in range(calls):
            action()

    return run


def measure_tiles() -> None:
    """Print the part of the tiles."""
    print(f"linear layers in fp32, {machine()}; speedup over dense, and memory relative to dense")
    lines = [report(line, speedup, limit) for line, speedup, limit in tile_lines()]
    print(f"{lines.count(False)} of {len(lines)} cases below their limit")


ROUNDS = 41

DECODED = 32
"""Tokens that one model decodes in a round, one call for each, before the next model does."""


@dataclass(frozen=True)
class CompactCase:
    """A model to prune.

    Args:
        name: for the table.
        model: dense.
        inputs: that it is timed on.
        example: that it is traced with: two tokens or more leave their number open.
        by_hand: builds a model with the sizes that remain.
        sparsity: the fraction of the units of each family that is pruned.
        limit: the least speedup.
        calls: of a model in a round.
        multiple_of: the number of units that remain is a multiple of it.
    """

    name: str
    model: nn.Module
    inputs: torch.Tensor
    example: torch.Tensor
    by_hand: nn.Module
    sparsity: float
    limit: float
    calls: int = 1
    multiple_of: int = 1


def convolutional(divisor: int = 1) -> nn.Sequential:
    """Return six convolutions with batch norms; the channels of all but the last can be removed."""
    widths = [3, *(width // divisor for width in (64, 128, 128, 256, 256)), 64]
    layers: list[nn.Module] = []
    for i, (read, made) in enumerate(pairwise(widths)):
        layers += [nn.Conv2d(read, made, 3, stride=1 + i % 2, padding=1), nn.BatchNorm2d(made), nn.ReLU()]
    return nn.Sequential(*layers).eval().to(DEVICE)


def block(heads: int = 12, hidden: int = 3072) -> Block:
    """Return a transformer block, 768 wide, with heads of 64 dimensions."""
    made = Block(768, 12, causal=True)
    made.attn.num_heads, made.attn.qkv, made.attn.out = heads, nn.Linear(768, 192 * heads), nn.Linear(64 * heads, 768)
    made.mlp.up, made.mlp.down = nn.Linear(768, hidden), nn.Linear(hidden, 768)
    return made.eval().to(DEVICE)


def prune_units(model: nn.Module, inputs: torch.Tensor, sparsity: float, multiple_of: int) -> None:
    """Zero a fraction of the units of each family."""
    budget = Uniform(multiple_of=multiple_of)
    pruning = Sparsifier([Coupled(inputs=(inputs,))], Constant(sparsity), Magnitude(), budget=budget)
    pruning.attach(model, [])
    pruning.update_now()
    pruning.detach()


def peer_pruned(case: CompactCase) -> nn.Module | str:
    """Return the pruned model as Torch-Pruning leaves it, which removes what is zero; a reason if there is none."""
    if find_spec("torch_pruning") is None:
        return "is not installed"
    import torch_pruning

    copied = copy.deepcopy(case.model)
    last = [module for module in copied.modules() if isinstance(module, nn.Conv2d)][-1:]
    heads = {copied.attn.qkv: copied.attn.num_heads} if isinstance(copied, Block) else {}
    try:
        with torch.enable_grad():
            torch_pruning.pruner.BasePruner(
                copied,
                case.example,
                importance=torch_pruning.importance.GroupMagnitudeImportance(p=2),
                pruning_ratio=case.sparsity,
                round_to=case.multiple_of if case.multiple_of > 1 else None,
                ignored_layers=[*last, *([copied.mlp.down] if isinstance(copied, Block) else [])],
                num_heads=heads,
                prune_num_heads=bool(heads),
                head_pruning_ratio=case.sparsity,
            ).step()
        same = torch.allclose(copied.eval()(case.inputs), case.model(case.inputs), atol=1e-4)
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        return f"fails ({type(error).__name__})"
    return copied if same else "gives other outputs"


def compact_cases() -> Iterator[CompactCase]:
    """Yield the models of the benchmark."""
    for (sparsity, heads, limit), tokens in product(((0.5, 6, 1.7), (0.75, 3, 3.2)), (128, 1)):
        inputs = torch.randn(1, tokens, 768, device=DEVICE)
        example = inputs if tokens > 1 else torch.randn(1, 2, 768, device=DEVICE)
        name, calls = ("block, 1 token", DECODED) if tokens == 1 else (f"block, {tokens} tokens", 1)
        yield CompactCase(name, block(), inputs, example, block(heads, 256 * heads), sparsity, limit, calls)
    images = torch.randn(1, 3, 64, 64, device=DEVICE)
    yield CompactCase("conv net, 64×64", convolutional(), images, images, convolutional(2), 0.5, 2.5, multiple_of=8)


def measure_compact() -> None:
    """Print the part of compacted models."""
    print(f"compacted models in fp32, {machine()}; speedup over dense")
    for case in compact_cases():
        prune_units(case.model, case.example, case.sparsity, case.multiple_of)
        small = compact(case.model, (case.example,))
        assert torch.allclose(small(case.inputs), case.model(case.inputs), atol=1e-4), "compact gives other outputs"
        models = {"dense": case.model, "compact": small, "by hand": case.by_hand}
        peer = peer_pruned(case)
        if isinstance(peer, nn.Module):
            models["Torch-Pruning"] = peer
        reason = peer if isinstance(peer, str) else ""
        found = speedups(models, case.inputs, case.calls)
        report(compact_line(case.name, case.sparsity, found, reason), found["compact"], case.limit)
        if case.calls > 1:
            in_turn = speedups(models, case.inputs, 1)
            print(compact_line("  call by call", case.sparsity, in_turn, reason), flush=True)


def compact_line(name: str, sparsity: float, found: dict[str, float], reason: str) -> str:
    """Return the speedups of the models as a line; a reason stands in the place of a peer that has none."""
    peer = reason or f"{found['Torch-Pruning']:5.2f} ×"
    line = f"{name:18} {sparsity:.0%} {found['compact']:6.2f} ×  by hand {found['by hand']:5.2f} ×"
    return f"{line}  Torch-Pruning {peer}"


def speedups(models: dict[str, nn.Module], inputs: torch.Tensor, calls: int) -> dict[str, float]:
    """Return the speedup of each model over the dense one; it is called so many times in each round."""
    actions = {name: repeated(partial(model, inputs), calls) for name, model in models.items()}
    return {name: 1 / ratio for name, ratio in ratios(actions, "dense", ROUNDS).items()}


PARTS = {"compact": measure_compact, "tiles": measure_tiles}


def main() -> None:
    """Check, measure, print: one function for each part."""
    parser = argparse.ArgumentParser(description="Measure the speed of pruned models.")
    parser.add_argument("parts", nargs="*", metavar="part", help="compact, tiles; none for both")
    torch.manual_seed(0)
    with torch.no_grad():
        for part in parser.parse_args().parts or PARTS:
            PARTS[part]()


if __name__ == "__main__":
    main()
