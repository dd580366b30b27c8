"""The cost of a LoRA step on a pruned model: coupled units against a plain LoRA step, and tiles beside it.

The zeros of a merged copy are checked first. Then steps of a Llama with adapters on all its linear layers are
interleaved in one run: without a Sparsifier, with coupled units that are held at zero, and with tiles, whose product is
masked in every forward pass.
"""

from __future__ import annotations

import copy

import torch
from interleaved import DEVICE, machine, ratios
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from sparse_lightning import Blocks, Constant, Heads, Magnitude, Neurons, Sparsifier

SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 512}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
TOKENS = (4, 128)
LIMIT = 1.02

NEURONS = Neurons("*.mlp.up_proj", "*.mlp.down_proj", gate="*.mlp.gate_proj")
PATTERNS = {
    "plain LoRA": [],
    "coupled units": [NEURONS, Heads("*.self_attn")],
    "32×32 tiles": [Blocks(["*.mlp.*.weight", "*.self_attn.*.weight"], (32, 32))],
}


class Tuning:
    """A model with adapters in training."""

    def __init__(self, patterns: list[object]) -> None:
        torch.manual_seed(0)
        base = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))
        self.model: nn.Module = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear")).to(DEVICE)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], 1e-3)
        self.tokens = torch.randint(512, TOKENS, device=DEVICE)
        self.sparsifier = Sparsifier(patterns, Constant(0.5, end=0), Magnitude(), update_every=1) if patterns else None
        if self.sparsifier is not None:
            self.sparsifier.attach(self.model, self.optimizer)
        self.step()

    def step(self) -> None:
        """Make a step."""
        self.optimizer.zero_grad()
        self.model(input_ids=self.tokens, labels=self.tokens).loss.backward()
        if self.sparsifier is not None:
            self.sparsifier.update()
        self.optimizer.step()

    def check(self) -> None:
        """Half of the weights of the MLPs are zero after a merge."""
        merged = copy.deepcopy(self.model).merge_and_unload()
        for name, weight in merged.named_parameters():
            if ".mlp." in name and self.sparsifier is not None:
                assert float((weight == 0).double().mean()) == 0.5, name


def main() -> None:
    """Check, then print the ratios."""
    torch.set_num_threads(1)
    runs = {name: Tuning(patterns) for name, patterns in PATTERNS.items()}
    for run in runs.values():
        run.check()
    found = ratios({name: run.step for name, run in runs.items()}, "plain LoRA", rounds=15)
    print(f"a step with LoRA of rank 8 on a Llama of 4 layers, {TOKENS[0]}×{TOKENS[1]} tokens, {machine()}")
    for name, ratio in found.items():
        limit = f"  (limit {LIMIT})" if name == "coupled units" else ""
        print(f"{name:>15}: {ratio:.3f} × plain{limit}")


if __name__ == "__main__":
    main()
