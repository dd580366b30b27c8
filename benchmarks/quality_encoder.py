"""The accuracy that criteria keep in a pretrained encoder: 32×32 blocks at 75 %, and 2:4, after a short fine-tuning.

    python benchmarks/quality_encoder.py --encoder FOLDER --texts FILE

FOLDER holds a BERT-like encoder with its tokenizer, as Hugging Face saves them, such as all-MiniLM-L6-v2. FILE has a
label, a tab and a text in each line. Every run is checked before it is reported: its sparsity is exact, and its pruned
blocks are zero. What a row does not name has the default of the library. The spread is the highest minus the lowest.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import sparse_lightning as sl
from sparse_lightning.data import LabelledText
from sparse_lightning.models import TextClassifier

STEPS, BATCH, TOKENS, LABELS, EACH, TEST = 100, 16, 24, 10, 300, 1000
WEIGHTS = r"re:.*\.layer\.\d+\..*(query|key|value|dense)\.weight"


@dataclass(frozen=True)
class Texts:
    """Token ids and masks, `(texts, 2, tokens)`, with labels: to train on, and to test on."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def read(file: Path, encoder: Path) -> Texts:
    """Return as many texts of each of the most frequent labels."""
    each = {"labels": LABELS, "train_texts": EACH, "val_texts": TEST // LABELS, "tokens": TOKENS}
    return Texts(*(part.tensors for part in LabelledText(str(file), str(encoder), **each).sets()))


def accuracy(texts: Texts, folder: Path, seed: int, sparsifier: sl.Sparsifier | None, steps: int) -> float:
    """Fine-tune one model; return the percentage of test texts that it classifies correctly."""
    torch.manual_seed(seed)
    model, (ids, labels) = TextClassifier(path=str(folder), classes=LABELS), texts.train
    model.train()
    groups = [{"params": model.encoder.parameters(), "lr": 1e-4}, {"params": model.head.parameters(), "lr": 1e-2}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    if sparsifier is not None:
        sparsifier.attach(model, optimizer, total_steps=steps)
    for _ in range(steps):
        batch = torch.randint(len(ids), (BATCH,))
        optimizer.zero_grad()
        cross_entropy(model(ids[batch]), labels[batch]).backward()
        if sparsifier is not None:
            sparsifier.before_step()
        optimizer.step()
    if sparsifier is not None:
        check(sparsifier)
        sparsifier.detach()
    model.eval()
    with torch.no_grad():
        found = torch.cat([model(part).argmax(-1) for part in texts.test[0].split(100)])
    return 100 * (found == texts.test[1]).float().mean().item()


def check(sparsifier: sl.Sparsifier) -> None:
    """Raise unless the sparsity counted from the weights is the target, up to a block of each matrix."""
    largest = max(1 / mask.numel() for mask in sparsifier.masks.values())
    if not sparsifier.target <= sparsifier.sparsity() + largest:
        raise AssertionError(f"the sparsity is {sparsifier.sparsity():.3f} instead of {sparsifier.target:.3f}")
    for scope in sparsifier.attachments:
        for name, block in scope.blocks.items():
            if block.norms()[scope.masks[name]].any():
                raise AssertionError(f"{name} has pruned blocks that are not zero")


def builds(seed: int) -> dict[str, sl.Sparsifier | None]:
    """Return what each row attaches."""

    def tiles(criterion: sl.Criterion | None = None) -> sl.Sparsifier:
        return sl.Sparsifier([sl.Blocks(WEIGHTS, (32, 32))], sl.Cubic(0.75), criterion, seed=seed)

    def two_of_four(criterion: sl.Criterion | None = None) -> sl.Sparsifier:
        return sl.Sparsifier([sl.NM(WEIGHTS, 2, 4)], sl.Linear(0.5), criterion, seed=seed)

    criteria = [sl.Random(), sl.Magnitude(), sl.ElementwiseTaylor()]
    return {
        "dense": None,
        "32×32, 75 %: all defaults": tiles(),
        **{f"32×32, 75 %: {type(criterion).__name__}": tiles(criterion) for criterion in criteria},
        "2:4: all defaults": two_of_four(),
        "2:4: Magnitude": two_of_four(sl.Magnitude()),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", type=Path, help="a folder of Hugging Face's")
    parser.add_argument("--texts", type=Path, help="a label, a tab and a text in each line")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    chosen = parser.parse_args()
    if chosen.encoder is None or chosen.texts is None:
        print("not measured: pass --encoder and --texts")
        return
    texts = read(chosen.texts, chosen.encoder)
    print(f"{len(texts.train[1])} texts of {LABELS} labels, {chosen.steps} steps, {chosen.seeds} seeds: accuracy in %")
    print(f"{'run':<34}  {'mean':>5}  {'spread':>6}")
    for name in builds(0):
        found = [
            accuracy(texts, chosen.encoder, seed, builds(seed)[name], chosen.steps) for seed in range(chosen.seeds)
        ]
        print(f"{name:<34}  {statistics.mean(found):5.1f}  {max(found) - min(found):6.1f}", flush=True)


if __name__ == "__main__":
    main()
