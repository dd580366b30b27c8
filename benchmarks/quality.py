"""The accuracy that each criterion and method keeps: an MLP at 95 % sparsity in 4×4 blocks, three seeds.

    python benchmarks/quality.py --folder FOLDER    Fashion-MNIST, from its four idx files, plain or gzip
    python benchmarks/quality.py                    the digits of scikit-learn

Every run is checked before it is reported: its sparsity is exact, and its pruned blocks are zero. What a row
does not name has the default of the library: `Cubic`, `Gradual`, `AverageTaylor` and their rhythm. RigL and SET run at
constant sparsity, from a random mask. `--only NAME …` selects rows. The spread is the highest minus the lowest value.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import sparse_lightning as sl
from sparse_lightning.data import Digits, FashionMnist
from sparse_lightning.schedules import Schedule

SPARSITY, STEPS, BATCH, IMAGES, WIDTH = 0.95, 300, 128, 12_800, 512
LAYERS = ["0.weight", "2.weight"]


@dataclass(frozen=True)
class Task:
    """Images as rows, and labels: to train on, and to test on."""

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def fashion_mnist(folder: Path) -> Task:
    """Return the first training images, and all test images, with mean 0 and variance 1."""
    return rows_of("Fashion-MNIST", *FashionMnist(str(folder), images=IMAGES).sets())


def digits() -> Task:
    """Return scikit-learn's digits."""
    return rows_of("digits", *Digits().sets())


def rows_of(name: str, *sets: TensorDataset) -> Task:
    """Return a task of two sets of images, each as a row of pixels."""
    return Task(name, *((images.flatten(1), labels) for images, labels in (part.tensors for part in sets)))


def accuracy(task: Task, seed: int, sparsifier: sl.Sparsifier | None) -> float:
    """Train one model; return the percentage of test images that it classifies correctly."""
    torch.manual_seed(seed)
    (images, labels), (test, test_labels) = task.train, task.test
    width = images.shape[1]
    sizes = [nn.Linear(width, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)]
    model = nn.Sequential(*sizes)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=STEPS)
    if sparsifier is not None:
        sparsifier.attach(model, optimizer, total_steps=STEPS)
    for batch in batches(len(images)):
        optimizer.zero_grad()
        cross_entropy(model(images[batch]), labels[batch]).backward()
        if sparsifier is not None:
            sparsifier.before_step()
        optimizer.step()
        decay.step()
    if sparsifier is not None:
        check(sparsifier)
        sparsifier.detach()
    with torch.no_grad():
        return 100 * (model(test).argmax(-1) == test_labels).float().mean().item()


def batches(images: int) -> Iterable[Tensor]:
    """Yield the indices of each batch: all images in random order, again and again."""
    order = torch.empty(0, dtype=torch.long)
    for _ in range(STEPS):
        if len(order) < BATCH:
            order = torch.randperm(images)
        yield order[:BATCH]
        order = order[BATCH:]


def check(sparsifier: sl.Sparsifier) -> None:
    """Raise unless as many blocks are pruned as the target says, and all of their weights are zero."""
    blocks = {name: block for scope in sparsifier.attachments for name, block in scope.blocks.items()}
    masks = sparsifier.masks
    total, pruned = sum(mask.numel() for mask in masks.values()), sum(int(mask.sum()) for mask in masks.values())
    if abs(pruned - SPARSITY * total) > len(masks):  # each layer keeps a whole number of blocks
        raise AssertionError(f"{pruned} of {total} blocks are pruned, which is not {SPARSITY:.0%}")
    for name, block in blocks.items():
        if block.norms()[masks[name]].any():
            raise AssertionError(f"{name} has pruned blocks that are not zero")


Build = Callable[[int], sl.Sparsifier | None]


def run(schedule: Schedule, criterion: sl.Criterion | None = None, **others: Any) -> Build:
    """Return what builds a Sparsifier for a seed; what is not passed has its default."""
    return lambda seed: sl.Sparsifier([sl.Blocks(LAYERS, (4, 4))], schedule, criterion, seed=seed, **others)


def rows() -> dict[str, Build]:
    """Return the runs of the table, by name."""
    ramp, constant, late = sl.Cubic(SPARSITY), sl.Constant(SPARSITY), sl.Cubic(SPARSITY, begin=0, end=1.0)
    criteria = [sl.Random(), sl.Gradient(), sl.Movement(), sl.Magnitude(), sl.Wanda(), sl.Taylor()]
    criteria += [sl.EMA(sl.Taylor()), sl.ElementwiseTaylor(), sl.AdamFisher(), sl.Fisher(), sl.Sensitivity()]
    return {
        "dense": lambda seed: None,
        "all defaults: AverageTaylor": run(ramp),
        **{type(criterion).__name__: run(ramp, criterion) for criterion in criteria},
        "Soft": run(ramp, method=sl.Soft()),
        "Proximal": run(ramp, method=sl.Proximal()),
        "Proximal, Magnitude": run(ramp, sl.Magnitude(), method=sl.Proximal()),
        "an update at each step": run(ramp, update_every=1),
        "to the last step, every 100": run(late, update_every=100),
        "static random": run(constant, sl.Random(), method=sl.PruneOnce()),
        "SET": run(constant, method=sl.SET()),
        "RigL": run(constant, method=sl.RigL()),
        "RigL, ERK": run(constant, method=sl.RigL(), budget=sl.ERK()),
        "RigL, first mask by Magnitude": run(constant, method=sl.RigL(first=sl.Magnitude())),
    }


def main() -> None:
    """Print the table."""
    known = rows()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="with the idx files of Fashion-MNIST; without it: the digits")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(known), default=list(known), metavar="NAME")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".* not trained after it|.* prunes much at each")
    task = digits() if chosen.folder is None else fashion_mnist(chosen.folder)
    print(
        f"{task.name}, MLP, {SPARSITY:.0%} sparsity in 4×4 blocks, {STEPS} steps, {chosen.seeds} seeds: accuracy in %"
    )
    print(f"{'run':<30}  {'mean':>5}  {'spread':>6}")
    for name in chosen.only:
        found = [accuracy(task, seed, known[name](seed)) for seed in range(chosen.seeds)]
        print(f"{name:<30}  {statistics.mean(found):5.1f}  {max(found) - min(found):6.1f}", flush=True)


if __name__ == "__main__":
    main()
