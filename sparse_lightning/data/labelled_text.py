"""LabelledText: short texts with labels, from a local file."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from sparse_lightning.data.loaders import TwoSets
from sparse_lightning.data.missing import MissingError, existing, optional

DEBIAN_PACKAGES = (
    "apt-cache dumpavail | awk -F': ' '/^Package: /{p=$2} /^Section: /{s=$2} /^Description(-en)?: /{d=$2} "
    '/^$/{print s "\\t" p ": " d}\' > packages.tsv'
)
"""A command that makes such a file: the sections, names and descriptions of all packages of Debian or Ubuntu."""

SHUFFLE_SEED = 0
"""Seed of the shuffle before the split: all runs validate on the same texts."""

Pairs = list[tuple[str, int]]


class LabelledText(TwoSets):
    r"""The texts of the most frequent labels of a file, as token ids with their masks.

    Each line of the file is a label, a tab and a text. Every label has the same number of texts. Batches are
    `(texts, labels)`; texts have shape `(batch, 2, tokens)`: token ids, and 1 where there is a token and 0 where there
    is padding.

    Args:
        path: the file.
        tokenizer: the local folder of a Hugging Face model or tokenizer; None makes each byte a token.
        batch_size: texts in a batch.
        labels: the number of labels, the most frequent ones.
        train_texts: the number of training texts of each label, at most.
        val_texts: the number of validation texts of each label.
        tokens: the length to which texts are cut or padded.
        num_workers: processes that load data.

    Raises:
        MissingError: where there is no file, or it has too few labels or texts.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".tsv") as file:
        ...     lines = [f"{label}\t{label} number {i}" for label in ("cat", "dog") for i in range(30)]
        ...     print("\n".join(lines), file=file, flush=True)
        ...     data = LabelledText(file.name, batch_size=8, labels=2, val_texts=10, tokens=16)
        ...     texts, labels = next(iter(data.train_dataloader()))
        >>> texts.shape, labels.shape
        (torch.Size([8, 2, 16]), torch.Size([8]))
    """

    def __init__(
        self,
        path: str | None = None,
        tokenizer: str | None = None,
        batch_size: int = 16,
        labels: int = 10,
        train_texts: int = 300,
        val_texts: int = 100,
        tokens: int = 24,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, num_workers)
        what = f"a file with a label, a tab and a text in each line. For one of Debian's packages: {DEBIAN_PACKAGES}"
        if path is None:
            raise MissingError(f"data.path is not set: set it to {what}")
        self.path = existing(path, "data.path", what)
        self.tokenizer = tokenizer and existing(tokenizer, "data.tokenizer", "the folder of a Hugging Face tokenizer")
        self.labels, self.train_texts, self.val_texts, self.tokens = labels, train_texts, val_texts, tokens

    def sets(self) -> tuple[TensorDataset, TensorDataset]:
        """Return the training set and the validation set."""
        by_label = frequent_texts(self.path, self.labels)
        for label, texts in by_label.items():
            if len(texts) <= self.val_texts:
                raise MissingError(
                    f"the label {label!r} of {self.path} has {len(texts)} texts, too few for data.val_texts="
                    f"{self.val_texts}: use fewer labels, fewer texts for validation, or a larger file"
                )
        end = self.val_texts + self.train_texts
        train = [(text, i) for i, texts in enumerate(by_label.values()) for text in texts[self.val_texts : end]]
        val = [(text, i) for i, texts in enumerate(by_label.values()) for text in texts[: self.val_texts]]
        return self._encoded(train), self._encoded(val)

    def _encoded(self, pairs: Pairs) -> TensorDataset:
        texts = [text for text, _ in pairs]
        folder = self.tokenizer
        ids = byte_ids(texts, self.tokens) if folder is None else _token_ids(texts, self.tokens, Path(folder))
        return TensorDataset(ids, torch.tensor([label for _, label in pairs]))


def frequent_texts(path: Path, labels: int) -> dict[str, list[str]]:
    """Return the texts of the most frequent labels, those of each label in an order that is always the same."""
    lines = path.read_text("utf-8", errors="replace").splitlines()
    pairs = [(label, text) for label, tab, text in (line.partition("\t") for line in lines) if tab and label]
    kept = [label for label, _ in Counter(label for label, _ in pairs).most_common(labels)]
    if len(kept) < labels:
        raise MissingError(
            f"{path} has {len(kept)} labels, fewer than data.labels={labels}: each line must be a label, a tab and a "
            "text"
        )
    random.Random(SHUFFLE_SEED).shuffle(pairs)
    return {wanted: [text for label, text in pairs if label == wanted] for wanted in kept}


def byte_ids(texts: list[str], tokens: int) -> Tensor:
    """Return the bytes of each text and their mask, `(texts, 2, tokens)`.

    Example:
        >>> byte_ids(["ab"], 3).tolist()
        [[[97, 98, 0], [1, 1, 0]]]
    """
    found = torch.zeros(len(texts), 2, tokens, dtype=torch.long)
    for row, text in zip(found, texts, strict=True):
        cut = torch.tensor(list(text.encode()[:tokens]), dtype=torch.long)
        row[0, : len(cut)], row[1, : len(cut)] = cut, 1
    return found


def _token_ids(texts: list[str], tokens: int, folder: Path) -> Tensor:
    transformers = optional("transformers", "sparse-lightning[hf]")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    options = {"padding": "max_length", "truncation": True, "max_length": tokens, "return_tensors": "pt"}
    found = tokenizer(texts, **options)
    return torch.stack([found["input_ids"], found["attention_mask"]], 1)
