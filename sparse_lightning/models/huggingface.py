"""HuggingFace: a causal language model of the transformers package, from a local folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.optim import AdamW

from sparse_lightning.blocks.shards import local_part
from sparse_lightning.data.missing import existing, optional
from sparse_lightning.models.classifier import OptimizerFactory
from sparse_lightning.models.language_model import LanguageModel
from sparse_lightning.models.safetensors_folder import SafetensorsFolder
from sparse_lightning.models.sharding import ShardingError, TensorPlan, materialize, parameters_on_meta


class HuggingFace(LanguageModel):
    """Fine-tunes a causal language model, such as a Llama, Mistral, Qwen or GPT-2.

    Needs the extra `hf`. Nothing is downloaded, no code in the folder is run, and weights are read from safetensors
    only.

    A model from a folder is built on the meta device. Its weights are read by `configure_model`, which a Trainer calls,
    or by the first forward pass: each process reads the slices of its shards, one parameter at a time, so that it never
    holds more than its shards and one slice. Parameters stay the same objects.

    Args:
        optimizer: builds the optimizer from the parameters.
        path: the folder that `save_pretrained` has written; None builds a small Llama on bytes with random weights.

    Example:
        >>> import torch
        >>> HuggingFace()(torch.zeros(2, 7, dtype=torch.long)).shape
        torch.Size([2, 7, 256])
    """

    def __init__(self, optimizer: OptimizerFactory = AdamW, path: str | None = None) -> None:
        super().__init__(optimizer)
        transformers = optional("transformers", "sparse-lightning[hf]")
        self._unread: PretrainedWeights | None = None
        self.example_input_array = torch.zeros(1, 16, dtype=torch.int64, device="cpu")
        if path is None:
            self.model = _small_llama(transformers)
        else:
            folder = existing(path, "model.path", "the folder of a Hugging Face model")
            self.model = _without_weights(transformers, folder)
            self._unread = PretrainedWeights(folder, self.model)

    def configure_model(self) -> None:
        """Shard the model where there is a mesh, and read its weights; the first call only."""
        super().configure_model()
        if self._unread is not None:
            mesh = self.device_mesh
            materialize(self, torch.device("cpu" if mesh is None else mesh.device_type))
            self._unread.read_into(self.model)
            self._unread = None

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids `(batch, tokens)` → logits of the next ones `(batch, tokens, vocabulary)`."""
        if self._unread is not None and not torch.compiler.is_compiling():
            self.configure_model()
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits

    def shards(self) -> Iterable[nn.Module]:
        """Return the layers of the transformer: its first list of modules."""
        return next((m for m in self.model.modules() if isinstance(m, nn.ModuleList)), ())

    def tensor_plan(self, size: int) -> TensorPlan:
        """Return the plan of the model's configuration; embeddings and head are replicated."""
        config: Any = self.model.config
        given = getattr(config, "base_model_tp_plan", None)
        if not given:
            return super().tensor_plan(size)
        for name in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(config, name, None) or size
            if heads % size:
                raise ShardingError(
                    f"{name}={heads} cannot be split over {size} devices: choose a tensor_parallel_size that divides it"
                )
        return {f"model.{_prefix(self.model)}{name}": _style(name, style) for name, style in given.items()}


def _prefix(model: Any) -> str:
    """Return the prefix of the transformer's names inside the model with a head."""
    return "" if model.base_model is model else f"{model.base_model_prefix}."


def _style(name: str, style: str) -> ParallelStyle:
    known: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    if style not in known:
        raise ShardingError(
            f"{name}: the style {style!r} of this model's tensor-parallel plan is not supported: choose trainer=fsdp2, "
            "or tensor_parallel_size=1"
        )
    return known[style]()


LOCAL = {"local_files_only": True, "trust_remote_code": False}


def _without_weights(transformers: Any, folder: Path) -> nn.Module:
    config = transformers.AutoConfig.from_pretrained(folder, **LOCAL)
    with parameters_on_meta():
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return model.float().train()


class PretrainedWeights:
    """The weights of a model in a folder, which are not read yet.

    Where the names or shapes in the folder are not those of the model, transformers may know how to convert them: it
    reads the whole model then, in each process, with a warning.

    Args:
        folder: of the model.
        model: built from its configuration; a parameter with several names may be stored under any of them.
    """

    def __init__(self, folder: Path, model: nn.Module) -> None:
        self._path, self._stored = folder, SafetensorsFolder(folder)
        tensors = model.state_dict(keep_vars=True)
        names: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            names.setdefault(id(tensor), []).append(name)
        prefix = _prefix(model)
        found = {same[0]: self._find(same, tensors[same[0]], prefix) for same in names.values()}
        self._names = {name: stored for name, stored in found.items() if stored is not None}
        # A buffer that is not stored keeps the value that it was built with.
        self._missing = [n for n in found if n not in self._names and isinstance(tensors[n], nn.Parameter)]

    def _find(self, names: list[str], tensor: Tensor, prefix: str) -> str | None:
        """Return the stored name of a tensor, with or without the prefix of the transformer; None if there is none."""
        spelt = [text for name in names for text in (name, name.removeprefix(prefix), prefix + name)]
        return next((name for name in spelt if name in self._stored.files and self._fits(name, tensor)), None)

    def _fits(self, name: str, tensor: Tensor) -> bool:
        is_float = tensor.is_floating_point()
        return self._stored.shape(name) == tuple(tensor.shape) and self._stored.is_float(name) == is_float

    def read_into(self, model: nn.Module) -> None:
        """Read what this process holds of each parameter and buffer."""
        whole = self._read_whole(model) if self._missing else {}
        tensors = model.state_dict(keep_vars=True)
        for name in whole or self._names:
            local, box = local_part(tensors[name])
            if local.numel():
                slices = tuple(slice(lo, hi) for lo, hi in box)
                local.copy_(whole[name][slices] if whole else self._stored.read(self._names[name], box))
        self._stored.close()

    def _read_whole(self, model: nn.Module) -> dict[str, Tensor]:
        import transformers

        rank_zero_warn(
            f"{self._missing[0]} of {type(model).__name__} is not stored under that name and shape in {self._path}: "
            "transformers converts the model, and each process reads it whole. To read shards only, load it with "
            "transformers and save it again with save_pretrained"
        )
        with torch.device("cpu"):
            whole = transformers.AutoModelForCausalLM.from_pretrained(self._path, use_safetensors=True, **LOCAL)
        return dict(whole.state_dict())


def _small_llama(transformers: Any) -> nn.Module:
    rank_zero_info("model.path is not set: training a small Llama with random weights, on bytes")
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
