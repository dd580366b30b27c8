"""HuggingFace: a causal language model of the transformers package, from a local folder."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.optim import AdamW

from sparse_lightning.data.missing import existing, optional
from sparse_lightning.models.classifier import OptimizerFactory
from sparse_lightning.models.language_model import LanguageModel
from sparse_lightning.models.sharding import Plan, ShardingError


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

    def shards(self) -> Iterable[nn.Module]:
        """The layers of the transformer: the first list of modules in it."""
        return next((m for m in self.model.modules() if isinstance(m, nn.ModuleList)), ())

    def tensor_plan(self, size: int) -> Plan:
        """The one that comes with the model's configuration; embeddings and head stay whole."""
        config: Any = self.model.config
        given = getattr(config, "base_model_tp_plan", None)
        if not given:
            return super().tensor_plan(size)
        for name in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(config, name, None) or size
            if heads % size:
                raise ShardingError(f"{name}={heads} cannot be split over {size} devices: {size} does not divide it")
        return {f"model.{_prefix(self.model)}{name}": _style(name, style) for name, style in given.items()}


def _prefix(model: Any) -> str:
    """What stands before the names of the transformer, where a head is around it."""
    return "" if model.base_model is model else f"{model.base_model_prefix}."


def _style(name: str, style: str) -> ParallelStyle:
    known: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    if style not in known:
        raise ShardingError(
            f"{name} of this model is {style!r} in its plan for tensor parallelism, which is not known here: choose "
            "trainer=fsdp2, or tensor_parallel_size=1"
        )
    return known[style]()


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
