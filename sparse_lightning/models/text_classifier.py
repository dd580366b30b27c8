"""TextClassifier: a sentence encoder of the transformers package, from a local folder, with a classifier."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import AdamW

from sparse_lightning.data.missing import existing, optional
from sparse_lightning.models.classifier import Classifier, OptimizerFactory


class TextClassifier(Classifier):
    """Fine-tunes an encoder, such as a BERT or MiniLM, to classify texts: the mean of its last states, and a head.

    Needs the extra `hf`. Nothing is downloaded, no code in the folder is run, and weights are read from safetensors
    only.

    Args:
        optimizer: builds the optimizer from the parameters.
        path: the folder that `save_pretrained` has written; None builds a small BERT on bytes with random weights.
        classes: the number of classes.
        head_lr: the learning rate of the head, whose weights are random; the encoder has that of the optimizer.

    Example:
        >>> import torch
        >>> texts = torch.ones(3, 2, 8, dtype=torch.long)  # token ids, and a mask of ones
        >>> TextClassifier(classes=4)(texts).shape
        torch.Size([3, 4])
    """

    def __init__(
        self,
        optimizer: OptimizerFactory = AdamW,
        path: str | None = None,
        classes: int = 10,
        head_lr: float = 0.01,
    ) -> None:
        super().__init__(optimizer, classes)
        transformers = optional("transformers", "sparse-lightning[hf]")
        self.encoder: Any = _small_bert(transformers) if path is None else _pretrained(transformers, path)
        self.head = nn.Linear(self.encoder.config.hidden_size, classes)
        self.head_lr = head_lr
        self.example_input_array = torch.ones(1, 2, 16, dtype=torch.int64, device="cpu")

    def forward(self, texts: Tensor) -> Tensor:
        """Token ids and masks `(batch, 2, tokens)` → logits `(batch, classes)`."""
        ids, mask = texts.unbind(1)
        states = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(states.dtype)
        logits: Tensor = self.head((states * weights).sum(1) / weights.sum(1).clamp(min=1))
        return logits

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer, with a learning rate for the head."""
        head: Any = {"params": self.head.parameters(), "lr": self.head_lr}
        encoder: Any = {"params": self.encoder.parameters()}
        return self.optimizer_factory([encoder, head])

    def shards(self) -> Iterable[nn.Module]:
        """Return the layers of the encoder: its first list of modules."""
        return next((m for m in self.encoder.modules() if isinstance(m, nn.ModuleList)), ())


def _pretrained(transformers: Any, path: str) -> Any:
    folder = existing(path, "model.path", "the folder of a Hugging Face encoder")
    local = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    return _without_pooler(transformers.AutoModel.from_pretrained(folder, **local).float())


def _small_bert(transformers: Any) -> Any:
    rank_zero_info("model.path is not set: training a small BERT with random weights, on bytes")
    config = transformers.BertConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    return _without_pooler(transformers.BertModel(config))


def _without_pooler(encoder: Any) -> Any:
    """Remove the layer that some encoders apply to their first state: the mean of all states does not use it."""
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None
    return encoder.train()
