"""A small vision transformer, its weights pruned in seven patterns: a table, counts of zeros, and pictures."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread, imsave
from numpy.typing import NDArray
from torch import Tensor, nn

from sparse_lightning.blocks.builder import SparsityBuilder
from sparse_lightning.blocks.scope import SparseScope
from sparse_lightning.blocks.sparse_block import SparseBlock
from sparse_lightning.blocks.table import table
from sparse_lightning.blocks.view import View
from sparse_lightning.drawing import draw

SPARSITY = {
    "filters": 0.5,
    "heads": 0.5,
    "neurons": 0.75,
    "tiles": 0.75,
    "two-of-four": 0.5,
    "eight-apart": 0.5,
    "shared-budget": 0.6,
}
"""The name of each scope, and its sparsity level."""

OVERVIEW = (("two-of-four", "eight-apart"), ("tiles", "heads"))
"""The rows of the picture that shows several patterns."""


class TinyViT(nn.Module):
    """Patches by a convolution in channels_last, two transformer layers with a fused QKV, a classifier."""

    def __init__(self, width: int = 16, heads: int = 4, classes: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, kernel_size=3, stride=3)
        self.stem.weight = nn.Parameter(self.stem.weight.detach().to(memory_format=torch.channels_last))
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, heads, dim_feedforward=2 * width, batch_first=True) for _ in range(2))
        )
        self.classifier = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images `(batch, 3, height, width)` → logits `(batch, classes)`."""
        patches = self.stem(images).flatten(2).transpose(1, 2)
        return cast(Tensor, self.classifier(self.layers(patches).mean(1)))


def patterns_of(model: TinyViT) -> SparsityBuilder:
    """Return a builder with seven patterns, each on its own parameters of the model."""
    first, second = (cast(nn.TransformerEncoderLayer, layer) for layer in model.layers)
    builder = SparsityBuilder(model).add_block("stem", "stem.weight", (1, -1, -1, -1)).add_scope("filters", "stem")
    add_heads(builder, first.self_attn)
    add_neurons(builder, first.linear1.weight, first.linear2.weight)
    builder.add_block("qkv", second.self_attn.in_proj_weight, (4, 4)).add_scope("tiles", "qkv", (1, -1))
    builder.add_block("linear1", second.linear1.weight, (1, 1)).add_scope("two-of-four", "linear1", (1, 4))
    add_eight_apart(builder, second.linear2.weight)
    builder.add_block("out", second.self_attn.out_proj.weight, (4, 4)).add_scope("out", "out")
    builder.add_block("classifier", "classifier.weight", (4, 4)).add_scope("classifier", "classifier")
    return builder.couple_scopes("shared-budget", ["out", "classifier"])


def add_heads(builder: SparsityBuilder, attention: nn.MultiheadAttention) -> None:
    """Add heads: rows of the query, key and value parts of a fused QKV, with the columns that read their output."""
    width, rows = attention.embed_dim, attention.head_dim
    for i, name in enumerate(("query", "key", "value")):
        part = View(attention.in_proj_weight, (width, width), (width, 1), offset=i * width * width)
        builder.add_block(name, part, (rows, -1))
    builder.add_block("output", attention.out_proj.weight, (-1, rows))
    builder.couple_blocks("heads", ["query", "key", "value", "output"], orders=[None, None, None, (1, 0)])
    builder.add_scope("heads", "heads")


def add_neurons(builder: SparsityBuilder, up: Tensor, down: Tensor) -> None:
    """Add neurons: a row of the first matrix with the column of the second that reads it."""
    builder.add_block("up", up, (1, -1)).add_block("down", down, (-1, 1))
    builder.couple_blocks("neurons", ["up", "down"], orders=[None, (1, 0)]).add_scope("neurons", "neurons")


def add_eight_apart(builder: SparsityBuilder, weight: Tensor) -> None:
    """Add pairs of weights that are eight columns apart; two of four adjacent pairs are kept."""
    rows, k = weight.shape
    pairs = View(weight, (rows, k // 16, 8, 2), (k, 16, 1, 8))
    builder.add_block("linear2", pairs, (1, 1, 1, 2)).add_scope("eight-apart", "linear2", (1, 1, 4, 1))


def prune(scope: SparseScope, sparsity: float) -> dict[SparseBlock, Tensor]:
    """Prune the blocks with the smallest norms in each scope to a sparsity level; return the mask of each block."""
    scores = {block: block.norms() for block in scope.blocks()}
    masks = cast(dict[SparseBlock, Tensor], scope.select(scores, scope.sparsity_to_nnz(sparsity)))
    for block, mask in masks.items():
        block.apply_mask(mask)
    return masks


def count_zeros(scope: SparseScope) -> int:
    """Return how many weights of a scope are zero, counted from the weights."""
    return sum(int((spec.data == 0).sum()) for block in scope.blocks() for spec in block.blocks())


def picture(scope: SparseScope, masks: dict[SparseBlock, Tensor]) -> Figure:
    """Draw the scope; or its blocks, if there is a single scope, so that colours distinguish them."""
    (block, mask), *others = masks.items()
    return draw(block, mask) if scope.numscp() == 1 and not others else draw(scope, masks)


def montage(rows: Sequence[Sequence[Figure]]) -> NDArray[Any]:
    """Return figures side by side in rows, as one image `(height, width, 3)`."""
    images = [[_pixels(figure) for figure in row] for row in rows]
    bands = [np.concatenate([_pad(image, max(map(len, row)), image.shape[1]) for image in row], 1) for row in images]
    return np.concatenate([_pad(band, len(band), max(band.shape[1] for band in bands)) for band in bands])


def _pixels(figure: Figure) -> NDArray[Any]:
    file = BytesIO()
    figure.savefig(file, dpi=110)
    file.seek(0)
    return imread(file)[..., :3]


def _pad(image: NDArray[Any], height: int, width: int) -> NDArray[Any]:
    return np.pad(image, ((0, height - len(image)), (0, width - image.shape[1]), (0, 0)), constant_values=1.0)


def run(out: Path) -> list[Path]:
    """Build, prune, print and draw; return the files that were written."""
    torch.manual_seed(0)
    model = TinyViT()
    scopes = patterns_of(model).get_all_scopes()
    print(table(scopes) + "\n")
    out.mkdir(parents=True, exist_ok=True)
    figures = {}
    for scope in scopes:
        name = str(scope.name)
        before, masks, total = count_zeros(scope), prune(scope, SPARSITY[name]), scope.numel()
        print(f"{name:13}  {before:4} → {count_zeros(scope):4} of {total:4} weights are zero")
        figures[name] = picture(scope, masks)
    print(f"\nThe pruned model still runs: logits of shape {tuple(model(torch.randn(2, 3, 24, 24)).shape)}.\n")
    return _save(figures, out)


def _save(figures: dict[str, Figure], out: Path) -> list[Path]:
    files = {out / f"{name}.png": figure for name, figure in figures.items()}
    for file, figure in files.items():
        figure.savefig(file)
    overview = out / "patterns.png"
    imsave(overview, montage([[figures[name] for name in row] for row in OVERVIEW]))
    return [*files, overview]


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, run, and list the files."""
    parser = argparse.ArgumentParser(prog="python -m sparse_lightning.demo", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/demo"), help="folder of the pictures (default: %(default)s)"
    )
    for file in run(parser.parse_args(arguments).out):
        print(file)


if __name__ == "__main__":
    main()
