"""Small files of the formats that data modules read, and a tiny encoder as Hugging Face saves it."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

LABELS = ("games", "libs", "net")


def idx_bytes(array: np.ndarray) -> bytes:
    """An array of bytes as an idx file."""
    sizes = b"".join(n.to_bytes(4, "big") for n in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


def write_fashion(folder: Path, train: int = 300, val: int = 40, packed: bool = False) -> Path:
    """Images whose brightest row is their class, in the four files of Fashion-MNIST."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for kind, n in (("train", train), ("t10k", val)):
        labels = np.arange(n) % 10
        images = rng.integers(0, 60, (n, 28, 28))
        images[np.arange(n), 2 * labels] = 255
        for name, array in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", labels)):
            data = idx_bytes(array)
            file = folder / (f"{kind}-{name}.gz" if packed else f"{kind}-{name}")
            file.write_bytes(gzip.compress(data, 1) if packed else data)
    return folder


def write_labelled(file: Path, texts: int = 30, labels: tuple[str, ...] = LABELS) -> Path:
    """Texts that hold the name of their label."""
    words, draw = ["a", "package", "for", "fast", "tools"], random.Random(0)
    lines = [f"{label}\t{draw.choice(words)} {label} {draw.choice(words)}" for label in labels for _ in range(texts)]
    draw.shuffle(lines)
    file.write_text("\n".join(lines) + "\n", "utf-8")
    return file


def save_bert(folder: Path, **changes: object) -> Path:
    """A tiny BERT with random weights and a tokenizer of whole words, as `save_pretrained` writes them."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = transformers.BertConfig(**sizes, vocab_size=64, max_position_embeddings=32, **changes)
    transformers.BertModel(config).save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LABELS, "a", "package", "for", "fast", "tools"]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", "utf-8")
    vocabulary = {word: i for i, word in enumerate(words)}
    transformers.BertTokenizer(vocab=vocabulary).save_pretrained(folder)
    assert json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    return folder
