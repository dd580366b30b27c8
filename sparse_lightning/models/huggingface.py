"""HuggingFace: a causal language model of the transformers package, from a local folder."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import AdamW

from sparse_lightning.data.missing import existing, optional
from sparse_lightning.models.classifier import OptimizerFactory
from sparse_lightning.models.language_model import LanguageModel


class HuggingFace(LanguageModel):
    """Fine-tunes a causal language model, such as a Llama, Mistral, Qwen or GPT-2.

    Needs the extra `hf`. Nothing is downloaded, no code in the folder is run, and weights are read from safetensors
    only.

    Args:
        optimizer: makes the optimizer of the parameters.
        path: the folder that `save_pretrained` has written; None makes a small Llama on bytes with random weights,
            to see how a run goes.

    Example:
        >>> import torch
        >>> HuggingFace()(torch.zeros(2, 7, dtype=torch.long)).shape
        torch.Size([2, 7, 256])
    """

    def __init__(self, optimizer: OptimizerFactory = AdamW, path: str | None = None) -> None:
        super().__init__(optimizer)
        transformers = optional("transformers", "sparse-lightning[hf]")
        self.model = _small_llama(transformers) if path is None else _pretrained(transformers, path)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token numbers `(batch, tokens)` → scores of the next ones `(batch, tokens, vocabulary)`."""
        scores: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return scores


def _pretrained(transformers: Any, path: str) -> nn.Module:
    folder = existing(path, "model.path", "the folder of a Hugging Face model")
    model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, use_safetensors=True
    )
    return model.float().train()


def _small_llama(transformers: Any) -> nn.Module:
    rank_zero_info("model.path is not given: a small Llama with random weights is trained, on bytes")
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model.train()
