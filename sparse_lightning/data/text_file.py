"""TextFile: a local text file as tokens."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from sparse_lightning.data.loaders import TwoSets
from sparse_lightning.data.missing import MissingError, existing, optional
from sparse_lightning.data.windows import Windows, from_bytes, split


class TextFile(TwoSets):
    """The text of a file, as the tokens of a Hugging Face tokenizer, or byte by byte.

    Batches are token ids of shape `(batch_size, context + 1)`. The last tenth is for validation.

    Args:
        path: the file; None uses the help texts of Python, which are English prose.
        tokenizer: the local folder of a Hugging Face model or tokenizer; None makes each byte a token.
        batch_size: sequences in a batch.
        context: the length of a sequence, in tokens.
        num_workers: processes that load data.

    Example:
        >>> next(iter(TextFile(batch_size=4, context=32).train_dataloader())).shape
        torch.Size([4, 33])
    """

    def __init__(
        self,
        path: str | None = None,
        tokenizer: str | None = None,
        batch_size: int = 8,
        context: int = 128,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, num_workers)
        self.path = _help_texts() if path is None else existing(path, "data.path", "a text file")
        self.tokenizer = tokenizer and existing(tokenizer, "data.tokenizer", "the folder of a Hugging Face tokenizer")
        self.context = context

    def sets(self) -> tuple[Windows, Windows]:
        """Return the training set and the validation set."""
        text = self.path.read_bytes()
        tokens = from_bytes(text) if self.tokenizer is None else _tokens(text.decode(), Path(self.tokenizer))
        return split(tokens, self.context, self.batch_size)


def _tokens(text: str, folder: Path) -> Tensor:
    transformers = optional("transformers", "sparse-lightning[hf]")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _help_texts() -> Path:
    path = Path(sysconfig.get_path("stdlib"), "pydoc_data", "topics.py")
    if not path.is_file():
        raise MissingError("this Python has no help texts to train on: set data.path to a text file")
    rank_zero_info(f"data.path is not set: training on {path}")
    return path
