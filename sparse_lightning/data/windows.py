"""Windows: a long text as a data set of sequences of equal length."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from sparse_lightning.data.missing import MissingError


class Windows(Dataset[Tensor]):
    """Sequences of `context + 1` tokens: inputs are all but the last, and targets all but the first.

    Consecutive sequences share one token, so each token is a target once.

    Args:
        tokens: all tokens, one-dimensional.
        context: the number of inputs in a sequence.

    Example:
        >>> windows = Windows(torch.arange(8), context=3)
        >>> len(windows), windows[1].tolist()
        (2, [3, 4, 5, 6])
    """

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens = tokens
        self.context = context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, i: int) -> Tensor:
        if not 0 <= i < len(self):
            raise IndexError(i)
        return self.tokens[i * self.context : (i + 1) * self.context + 1].long()


def from_bytes(text: bytes) -> Tensor:
    """Return each byte as a token: a vocabulary of 256.

    Example:
        >>> from_bytes(b"abc").tolist()
        [97, 98, 99]
    """
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def split(tokens: Tensor, context: int, batch_size: int, val_fraction: float = 0.1) -> tuple[Windows, Windows]:
    """Split a text into its beginning for training, and its end for validation."""
    cut = int(len(tokens) * (1 - val_fraction))
    train, val = Windows(tokens[:cut], context), Windows(tokens[cut:], context)
    if len(train) < batch_size or not len(val):
        raise MissingError(
            f"a text of {len(tokens)} tokens has {len(train)} sequences of {context} for training and {len(val)} for "
            f"validation, too few for batches of {batch_size}: use more text, a smaller context or smaller batches"
        )
    return train, val
