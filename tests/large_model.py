"""Patterns on a model of 70 billion parameters without weights; run as a program it prints what attaching takes."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import torch
from torch import nn

from sparse_lightning import Blocks, Heads, Neurons, Sparsifier, couplings
from sparse_lightning.engine.masks import pack_all
from sparse_lightning.patterns import resolve
from sparse_lightning.schedules import Cubic

LAYERS, WIDTH, HIDDEN, HEADS, KEY_HEADS, WORDS = 80, 8192, 28672, 64, 8, 128256


class Attention(nn.Module):
    """Grouped queries: 64 heads on 8 of keys and values."""

    num_heads = HEADS

    def __init__(self):
        super().__init__()
        keys = WIDTH // HEADS * KEY_HEADS
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, keys, bias=False), nn.Linear(WIDTH, keys, bias=False)


class Layer(nn.Module):
    """Attention and a gated MLP."""

    def __init__(self):
        super().__init__()
        self.attn = Attention()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)


def llama() -> nn.Module:
    """The shapes of Llama 70B."""
    with torch.device("meta"):
        parts = {"embed": nn.Embedding(WORDS, WIDTH), "head": nn.Linear(WIDTH, WORDS, bias=False)}
        return nn.ModuleDict({**parts, "layers": nn.ModuleList(Layer() for _ in range(LAYERS))})


def peak() -> int:
    """Return the peak memory of this process in KiB; getrusage counts the process before exec too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def analyse_large_model(layers: int, width: int, hidden: int, heads: int, key_heads: int, words: int) -> None:
    """Find the units of a Llama on the meta device; print how many families have how many units, and the memory."""
    import transformers

    sizes = {"hidden_size": width, "intermediate_size": hidden, "vocab_size": words}
    counts = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": key_heads}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **counts))
    before = peak()
    found = couplings(model, {"input_ids": torch.zeros(2, 8, dtype=torch.long)})
    more = (peak() - before) / 2**20
    for units, families in sorted(Counter(family.units for family in found).items()):
        print(f"{families} families of {units} units")
    print(f"{sum(p.numel() for p in model.parameters()) / 1e9:.1f} B parameters, {more:.2f} GiB")
    assert more < 3, f"the analysis took {more:.2f} GiB"


def attach_to_large_model() -> None:
    """Attach tiles to the MLPs and heads to the attentions, then neurons in place of tiles."""
    model = llama()
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters > 70e9, parameters
    begin, before = time.perf_counter(), peak()
    tiles = [Heads("layers.*.attn"), Blocks("layers.*.weight", (32, 32))]
    blocks = sum(found.scope.numblk() for found in resolve(tiles, model))
    neurons = resolve([Neurons("layers.*.up", "layers.*.down", gate="layers.*.gate")], model)
    assert sum(found.scope.numblk() for found in neurons) == LAYERS * HIDDEN
    sparsifier = Sparsifier(tiles, Cubic(0.75, end=1000))
    sparsifier.attach(model, torch.optim.AdamW(model.parameters()))
    assert sum(mask.numel() for mask in sparsifier.masks.values()) == blocks
    assert blocks == LAYERS * (KEY_HEADS + 3 * WIDTH * HIDDEN // 1024), blocks
    seconds = time.perf_counter() - begin
    # Masks live where the parameters do, here nowhere: with as many real ones beside, as a run would have.
    real = {name: torch.zeros(mask.shape, dtype=torch.bool) for name, mask in sparsifier.masks.items()}
    assert sum(entry["bits"].nbytes for entry in pack_all(real).values()) < 10e6
    after = peak()
    assert after < 2 * 1024**2, f"{after} KiB at the peak"
    taken = f"{seconds:.1f} s, {(after - before) // 1024} MiB more"
    print(f"{parameters / 1e9:.1f} B parameters, {blocks:,} blocks: {taken}")


if __name__ == "__main__":
    attach_to_large_model()
