"""The accuracy that criteria keep in a pretrained encoder: tiles, heads and neurons, and 2:4, while it is tuned.

    python benchmarks/quality_encoder.py --encoder FOLDER --texts FILE

FOLDER holds a BERT-like encoder with its tokenizer, as Hugging Face saves them, such as all-MiniLM-L6-v2. FILE has a
label, a tab and a text in each line. Every run is checked before it is reported: its sparsity is exact, and its pruned
blocks are zero. What a row does not name has the default of the library. The spread is the highest minus the lowest.
"""

from __future__ import annotations

import argparse
import json
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
LAYER = r"re:encoder\.encoder\.layer\.(\d+)"
ATTENTION = [r"self\.query", r"self\.key", r"self\.value", r"output\.dense"]
UNITS = [
    sl.Heads(*(rf"{LAYER}\.attention\.{name}" for name in ATTENTION)),
    sl.Neurons(rf"{LAYER}\.intermediate\.dense", rf"{LAYER}\.output\.dense"),
]
HEADS = 0.5


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
    """Raise unless each scope has its final sparsity, up to a block, and its pruned blocks are zero."""
    for scope in sparsifier.attachments:
        wanted = HEADS if scope.name.endswith("(heads)") else sparsifier.target
        for name, block in scope.blocks.items():
            mask = scope.masks[name]
            if abs(mask.double().mean().item() - wanted) > 1 / mask.numel():
                raise AssertionError(f"{name} has a sparsity of {mask.double().mean():.3f} instead of {wanted}")
            if block.norms()[mask].any():
                raise AssertionError(f"{name} has pruned blocks that are not zero")


def builds(seed: int) -> dict[str, sl.Sparsifier | None]:
    """Return what each row attaches."""

    def tiles(criterion: sl.Criterion | None = None, **ramp: float) -> sl.Sparsifier:
        return sl.Sparsifier([sl.Blocks(WEIGHTS, (32, 32))], sl.Cubic(0.75, **ramp), criterion, seed=seed)

    def units(criterion: sl.Criterion | None = None) -> sl.Sparsifier:
        budget = sl.Uniform(overrides={"*(heads)": HEADS})
        return sl.Sparsifier(UNITS, sl.Cubic(0.75), criterion, budget=budget, seed=seed)

    def two_of_four(criterion: sl.Criterion | None = None) -> sl.Sparsifier:
        return sl.Sparsifier([sl.NM(WEIGHTS, 2, 4)], sl.Linear(0.5), criterion, seed=seed)

    scored = [sl.Random(), sl.Magnitude(), sl.Taylor(), sl.ElementwiseTaylor(), sl.AdamFisher()]
    return {
        "dense": None,
        "32×32, 75 %: all defaults": tiles(),
        **{f"32×32, 75 %: {type(criterion).__name__}": tiles(criterion) for criterion in [*scored, sl.Movement()]},
        "32×32, 75 %: a ramp to the last step": tiles(sl.ElementwiseTaylor(), begin=0.0, end=1.0),
        "heads 50 %, neurons 75 %: all defaults": units(),
        **{f"heads 50 %, neurons 75 %: {type(criterion).__name__}": units(criterion) for criterion in scored},
        "2:4: all defaults": two_of_four(),
        "2:4: Magnitude": two_of_four(sl.Magnitude()),
    }


def measured(texts: Texts, encoder: Path, seeds: int, steps: int, results: Path | None) -> dict[str, list[float]]:
    """Return the accuracies of each row, seed by seed; runs that a file of results has are not repeated."""
    found: dict[str, list[float]] = {name: [] for name in builds(0)}
    if results is not None and results.exists():
        for line in results.read_text("utf-8").splitlines():
            found[json.loads(line)["run"]].append(json.loads(line)["accuracy"])
    for seed in range(seeds):
        for name in [name for name, kept in found.items() if len(kept) <= seed]:
            found[name].append(accuracy(texts, encoder, seed, builds(seed)[name], steps))
            if results is not None:
                with results.open("a", encoding="utf-8") as file:
                    print(json.dumps({"run": name, "seed": seed, "accuracy": found[name][-1]}), file=file)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", type=Path, help="a folder of Hugging Face's")
    parser.add_argument("--texts", type=Path, help="a label, a tab and a text in each line")
    parser.add_argument("--results", type=Path, help="a file that collects the runs, to continue after an interruption")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    chosen = parser.parse_args()
    if chosen.encoder is None or chosen.texts is None:
        print("not measured: pass --encoder and --texts")
        return
    texts = read(chosen.texts, chosen.encoder)
    print(f"{len(texts.train[1])} texts of {LABELS} labels, {chosen.steps} steps, {chosen.seeds} seeds: accuracy in %")
    print(f"{'run':<42}  {'mean':>5}  {'spread':>6}")
    for name, found in measured(texts, chosen.encoder, chosen.seeds, chosen.steps, chosen.results).items():
        print(f"{name:<42}  {statistics.mean(found):5.1f}  {max(found) - min(found):6.1f}", flush=True)


if __name__ == "__main__":
    main()
