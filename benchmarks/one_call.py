"""What a pretrained encoder loses when half of its heads and neurons are pruned in one call, and how fast it recovers.

    python benchmarks/one_call.py --encoder FOLDER --texts FILE

FOLDER holds a BERT-like encoder with its tokenizer, as Hugging Face saves them, such as all-MiniLM-L6-v2. FILE has a
label, a tab and a text in each line. A classifier is fine-tuned dense; then it is pruned with and without `Refit`, and
fine-tuned with the masks held, at a rate that is usual for a trained model. Rates rise for a tenth of the steps, then
decay to zero. Pruned units are checked to be zero before anything is reported.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import sparse_lightning as sl
from sparse_lightning.data import LabelledText
from sparse_lightning.models import TextClassifier

LABELS, EACH, TEST, TOKENS, BATCH = 10, 300, 100, 24, 16
DENSE_STEPS, SPARSE_STEPS, EVERY, SEEN = 120, 40, 10, 16
DENSE_RATES, SPARSE_RATES = (5e-5, 5e-3), (2e-5, 2e-5)
"""Learning rates of the encoder and of the head, whose weights are random at first."""

LAYER, ONE = "encoder.encoder.layer.*", r"encoder\.encoder\.layer\.(\d+)"
PATTERNS = [
    sl.Heads(
        f"{LAYER}.attention.self.query",
        f"{LAYER}.attention.self.key",
        f"{LAYER}.attention.self.value",
        f"{LAYER}.attention.output.dense",
    ),
    sl.Neurons(rf"re:{ONE}\.intermediate\.dense", rf"re:{ONE}\.output\.dense"),
]


@dataclass(frozen=True)
class Texts:
    """Token ids with masks, and labels: to train on, and to test on."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @classmethod
    def read(cls, file: Path, encoder: Path) -> Texts:
        """Return as many texts of each of the most frequent labels."""
        each = {"labels": LABELS, "train_texts": EACH, "val_texts": TEST, "tokens": TOKENS}
        return cls(*(part.tensors for part in LabelledText(str(file), str(encoder), **each).sets()))


Masks = dict[str, Tensor]


@torch.no_grad()
def evaluate(model: nn.Module, texts: Texts) -> tuple[float, float]:
    """Return the accuracy in percent and the loss on the test texts."""
    model.eval()
    (ids, labels), logits = texts.test, []
    for batch in ids.split(100):
        logits.append(model(batch))
    found = torch.cat(logits)
    return 100 * float((found.argmax(1) == labels).double().mean()), float(cross_entropy(found, labels))


def train(
    model: TextClassifier, texts: Texts, steps: int, seed: int, rates: tuple[float, float], masks: Masks | None = None
) -> list[float]:
    """Fine-tune a model; with masks, hold them and return the test loss before training and every few steps."""
    draw, (ids, labels) = torch.Generator().manual_seed(seed), texts.train
    parts = zip((model.encoder, model.head), rates, strict=True)
    optimizer = torch.optim.AdamW([{"params": part.parameters(), "lr": lr} for part, lr in parts], weight_decay=0.01)
    warm = steps // 10
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min((i + 1) / warm, (steps - i) / (steps - warm)))
    sparsifier = None if masks is None else sl.Sparsifier(PATTERNS, sl.Constant(0.5), sl.Magnitude(), masks=masks)
    if sparsifier is not None:
        sparsifier.attach(model, optimizer)
    losses = []
    for step in range(steps):
        if masks is not None and step % EVERY == 0:
            losses.append(evaluate(model, texts)[1])
        model.train()
        batch = torch.randint(len(ids), (BATCH,), generator=draw)
        optimizer.zero_grad()
        cross_entropy(model(ids[batch]), labels[batch]).backward()
        optimizer.step()
        decay.step()
    if sparsifier is not None:
        assert abs(sparsifier.sparsity() - 0.5) < 1e-9, "pruned units are not zero"
        sparsifier.detach()
        losses.append(evaluate(model, texts)[1])
    return losses


def study(texts: Texts, encoder: Path, seed: int) -> dict[str, object]:
    """Return accuracies and losses of one seed."""
    torch.manual_seed(seed)
    dense = TextClassifier(path=str(encoder), classes=LABELS)
    train(dense, texts, DENSE_STEPS, seed, DENSE_RATES)
    found: dict[str, object] = {"dense": evaluate(dense, texts)}
    order = torch.randperm(len(texts.train[0]), generator=torch.Generator().manual_seed(seed))
    seen = [texts.train[0][part] for part in order[: SEEN * BATCH].split(BATCH)]
    for name, compensation in (("pruned", None), ("Refit", sl.Refit())):
        model = copy.deepcopy(dense)
        options = {"step": nn.Module.__call__, "progress": False}
        masks = sl.prune(model, PATTERNS, 0.5, seen, sl.Wanda(), compensation, **options)
        found[name] = evaluate(model, texts)
        losses = train(model, texts, SPARSE_STEPS, seed + 100, SPARSE_RATES, masks)
        found[f"{name}, tuned"], found[f"{name}, losses"] = evaluate(model, texts), losses
    return found


def main() -> None:
    """Print one row for each seed, and the steps that Refit saves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--encoder", type=Path, help="a folder of Hugging Face's")
    parser.add_argument("--texts", type=Path, help="a label, a tab and a text in each line")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    if given.encoder is None or given.texts is None:
        print("not measured: pass --encoder and --texts")
        return
    texts = Texts.read(given.texts, given.encoder)
    for seed in range(given.seeds):
        found = study(texts, given.encoder, seed)
        rows = [name for name in found if not name.endswith("losses")]
        print(f"seed {seed}: " + "; ".join(f"{n} {found[n][0]:.1f} % ({found[n][1]:.3f})" for n in rows))
        goal = found["pruned, losses"][-1]
        reached = next((i for i, loss in enumerate(found["Refit, losses"]) if loss <= goal), None)
        steps = "never" if reached is None else f"after {reached * EVERY}"
        print(f"  without Refit, a loss of {goal:.3f} after {SPARSE_STEPS} steps; with it {steps}", flush=True)


if __name__ == "__main__":
    main()
