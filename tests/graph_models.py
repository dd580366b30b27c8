"""Models for the tests of couplings: plain ones, and models of Hugging Face from small configurations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, scaled_dot_product_attention, silu

TOKENS = torch.arange(14).view(2, 7)
IMAGES = torch.linspace(-1, 1, 2 * 3 * 64).view(2, 3, 8, 8)
VECTORS = torch.linspace(-1, 1, 8).view(2, 4)
SEQUENCE = torch.linspace(-1, 1, 2 * 5 * 16).view(2, 5, 16)


class Function(nn.Module):
    """Parts by name, and a function of them and of the inputs."""

    def __init__(self, forward: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self._forward(self, *inputs)


@dataclass(frozen=True)
class Case:
    """A model with its inputs, the number of units of each family by name, and some of the expected refusals.

    Args:
        build: makes the model.
        inputs: of the model.
        units: by family, worked out by hand.
        refused: a part of the reason for each parameter: the operation and the module.
    """

    build: Callable[[], nn.Module]
    inputs: Any
    units: dict[str, int]
    refused: dict[str, tuple[str, str]]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 6), nn.Sigmoid(), nn.Linear(6, 3))


def gated() -> nn.Module:
    return Function(
        lambda m, x: m.down(silu(m.gate(x)) * m.up(x)),
        gate=nn.Linear(4, 6), up=nn.Linear(4, 6), down=nn.Linear(6, 4),
    )  # fmt: skip


def fused_gate() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        gate, up = m.both(x).chunk(2, -1)
        return m.down(gelu(gate) * up)

    return Function(forward, both=nn.Linear(4, 12), down=nn.Linear(6, 4))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Conv2d(6, 6, 3, groups=6), nn.BatchNorm2d(6), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24, 5),
    )  # fmt: skip


def residual() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        x = relu(x + m.bn2(m.conv2(relu(m.bn1(m.conv1(x))))))
        return m.head(x.mean((2, 3)))

    return Function(
        forward, stem=nn.Conv2d(3, 4, 3), conv1=nn.Conv2d(4, 6, 3, padding=1), bn1=nn.BatchNorm2d(6),
        conv2=nn.Conv2d(6, 4, 3, padding=1), bn2=nn.BatchNorm2d(4), head=nn.Linear(4, 5),
    )  # fmt: skip


def densenet() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        a = relu(m.a(x))
        b = relu(m.b(a))
        return m.c(torch.cat([a, b], 1)).mean((2, 3))

    return Function(
        forward, a=nn.Conv2d(3, 4, 3, padding=1), b=nn.Conv2d(4, 6, 3, padding=1), c=nn.Conv2d(10, 5, 3, padding=1)
    )


def doubled() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        hidden = relu(m.a(x))
        return m.b(torch.cat([hidden, hidden], -1))

    return Function(forward, a=nn.Linear(4, 6), b=nn.Linear(12, 3))


def transposed() -> nn.Module:
    return Function(
        lambda m, x: m.up(relu(m.a(x)).view(-1, 3, 2, 2)), a=nn.Linear(4, 12), up=nn.ConvTranspose2d(3, 2, 2)
    )


def squeeze_excite() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.conv(x)
        scale = m.expand(relu(m.squeeze(x.mean((2, 3), keepdim=True)))).sigmoid()
        return m.head((x * scale).flatten(2).mean(-1))

    return Function(
        forward, conv=nn.Conv2d(3, 6, 3), squeeze=nn.Conv2d(6, 2, 1), expand=nn.Conv2d(2, 6, 1), head=nn.Linear(6, 3)
    )


def shuffle() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.a(x)
        b, c, h, w = x.shape
        mixed = x.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)
        return m.b(relu(mixed)).mean((2, 3))

    return Function(forward, a=nn.Conv2d(3, 6, 1), b=nn.Conv2d(6, 4, 1))


def interleaved(fused: str) -> nn.Module:
    """Attention of 4 heads of 4 dimensions; fused rows are `qkv` after one another, or `head` by head."""

    def forward(m: Any, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        if fused == "qkv":
            q, k, v = (part.view(b, t, 4, 4).transpose(1, 2) for part in m.qkv(x).split(16, -1))
        else:
            q, k, v = m.qkv(x).view(b, t, 4, 12).transpose(1, 2).chunk(3, -1)
        return m.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, 16))

    return Function(forward, qkv=nn.Linear(16, 48), out=nn.Linear(16, 16))


def grouped_queries() -> nn.Module:
    """Attention of 4 query heads, 2 for each head of keys and values."""

    def forward(m: Any, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (part(x).view(b, t, -1, 4).transpose(1, 2) for part in (m.q, m.k, m.v))
        attended = scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
        return m.out(attended.transpose(1, 2).reshape(b, t, 16))

    return Function(forward, q=nn.Linear(16, 16), k=nn.Linear(16, 8), v=nn.Linear(16, 8), out=nn.Linear(16, 16))


def attention_module(weights: bool, average: bool = True) -> nn.Module:
    """`nn.MultiheadAttention`, which may return its weights: of each head, or their mean over heads."""

    def forward(m: Any, x: Tensor) -> Any:
        made, shown = m.attn(x, x, x, need_weights=weights, average_attn_weights=average)
        return (made, shown) if weights else made

    return Function(forward, attn=nn.MultiheadAttention(16, 4, batch_first=True))


class NanoBlock(nn.Module):
    """Attention written out, with a causal mask in a buffer, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.c_attn, self.c_proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.fc, self.proj = nn.Linear(16, 64), nn.Linear(64, 16)
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)).view(1, 1, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (part.view(b, t, 4, c // 4).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).split(c, 2))
        scores = (q @ k.transpose(-2, -1)) / k.shape[-1] ** 0.5
        weights = scores.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf")).softmax(-1)
        x = x + self.c_proj((weights @ v).transpose(1, 2).contiguous().view(b, t, c))
        return x + self.proj(gelu(self.fc(self.ln_2(x))))


def nano() -> nn.Module:
    def forward(m: Any, tokens: Tensor) -> Tensor:
        x = m.wte(tokens) + m.wpe(torch.arange(tokens.shape[1]))
        return m.head(m.ln_f(m.block(x)))

    made = Function(
        forward, wte=nn.Embedding(32, 16), wpe=nn.Embedding(8, 16), block=NanoBlock(), ln_f=nn.LayerNorm(16),
        head=nn.Linear(16, 32, bias=False),
    )  # fmt: skip
    made.wte.weight = made.head.weight
    return made


def grouped_convolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5)
    )


class MeanOfUnits(nn.Module):
    """The mean over the units of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).mean(-1, keepdim=True)


def residual_stream(norm: nn.Module) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        return m.head(m.norm(x + m.down(relu(m.up(x)))))

    parts = {"stem": nn.Linear(4, 6), "up": nn.Linear(6, 8), "down": nn.Linear(8, 6), "head": nn.Linear(6, 3)}
    return Function(forward, norm=norm, **parts)


def dense_experts() -> nn.Module:
    """A mixture of 4 experts, each with its own gate: a router without softmax lets an expert be removed."""

    def forward(m: Any, x: Tensor) -> Tensor:
        hidden = relu(torch.einsum("bd,edh->beh", x, m.up))
        each = torch.einsum("beh,ehd->bed", hidden, m.down)
        return (each * m.router(x).sigmoid().unsqueeze(-1)).sum(1)

    return Function(
        forward,
        up=nn.Parameter(torch.randn(4, 4, 6)),
        down=nn.Parameter(torch.randn(4, 6, 4)),
        router=nn.Linear(4, 4),
    )


def tied() -> nn.Module:
    """An embedding whose weight is that of the head, too."""

    def forward(m: Any, tokens: Tensor) -> Tensor:
        return m.head(m.down(relu(m.up(m.embed(tokens)))))

    made = Function(
        forward, embed=nn.Embedding(16, 6), up=nn.Linear(6, 8), down=nn.Linear(8, 6), head=nn.Linear(6, 16, bias=False)
    )
    made.head.weight = made.embed.weight
    return made


PLAIN = {
    "mlp": Case(mlp, (VECTORS,), {"0 (units)": 8, "2 (units)": 6}, {"4.weight": ("output", "")}),
    "gated": Case(gated, (VECTORS,), {"gate (units)": 6}, {"down.bias": ("output", "")}),
    "fused gate": Case(fused_gate, (VECTORS,), {"both (units)": 6}, {}),
    "convolutions": Case(convolutions, (IMAGES,), {"0 (channels)": 6}, {"0.weight": ("input", "")}),
    "residual": Case(residual, (IMAGES,), {"stem (channels)": 4, "conv1 (channels)": 6}, {}),
    "densenet": Case(densenet, (IMAGES,), {"a (channels)": 4, "b (channels)": 6}, {}),
    "doubled": Case(doubled, (VECTORS,), {"a (units)": 6}, {}),
    "transposed": Case(transposed, (VECTORS,), {"a (channels)": 3}, {"up.bias": ("output", "")}),
    "squeeze and excite": Case(squeeze_excite, (IMAGES,), {"conv (channels)": 6, "squeeze (channels)": 2}, {}),
    "shuffle": Case(shuffle, (IMAGES,), {"a (channels)": 2}, {}),
    "fused": Case(lambda: interleaved("qkv"), (SEQUENCE,), {"qkv (heads)": 4}, {}),
    "interleaved": Case(lambda: interleaved("head"), (SEQUENCE,), {"qkv (heads)": 4}, {}),
    "grouped queries": Case(grouped_queries, (SEQUENCE,), {"q (heads)": 2}, {"out.bias": ("output", "")}),
    "multihead attention": Case(
        lambda: nn.TransformerEncoderLayer(16, 4, 24, batch_first=True),
        (SEQUENCE,),
        {"self_attn (heads)": 4, "linear1 (units)": 24},
        {"norm1.weight": ("input", "")},
    ),
    "attention": Case(
        lambda: attention_module(False), (SEQUENCE,), {"attn (heads)": 4}, {"attn.out_proj.bias": ("output", "")}
    ),
    "attention, mean of weights": Case(
        lambda: attention_module(True), (SEQUENCE,), {}, {"attn.in_proj_bias": ("aten.mul", "attn")}
    ),
    "attention, weights of heads": Case(
        lambda: attention_module(True, average=False), (SEQUENCE,), {}, {"attn.in_proj_bias": ("aten.mul", "attn")}
    ),
    "nano": Case(
        nano,
        (TOKENS % 32,),
        {"block (heads)": 4, "block (units)": 64},
        {"wpe.weight": ("aten.layer_norm", "block.ln_1"), "wte.weight": ("aten.embedding", "wte")},
    ),
    # Whole groups; one channel of a group would leave groups of 4 and 3.
    "grouped convolution": Case(
        grouped_convolution, (IMAGES,), {"0 (channels)": 2}, {"2.weight": ("aten.conv2d", "2")}
    ),
    "group norm": Case(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.Conv2d(8, 2, 3)),
        (IMAGES,),
        {},
        {"0.bias": ("aten.group_norm", "1")},
    ),
    "layer norm": Case(
        lambda: residual_stream(nn.LayerNorm(6)),
        (VECTORS,),
        {"up (units)": 8},
        {"stem.bias": ("aten.layer_norm", "norm")},
    ),
    "RMS norm": Case(
        lambda: residual_stream(nn.RMSNorm(6)), (VECTORS,), {"up (units)": 8}, {"stem.bias": ("aten.rms_norm", "norm")}
    ),
    "mean over units": Case(
        lambda: Function(lambda m, x: m.down(m.inner(x)), inner=MeanOfUnits(), down=nn.Linear(1, 3)),
        (VECTORS,),
        {},
        {"inner.up.bias": ("aten.mean", "inner")},
    ),
    "dense experts": Case(dense_experts, (VECTORS,), {"up (experts)": 4, "up (units)": 6}, {"down": ("output", "")}),
    "tied": Case(tied, (TOKENS,), {"down (units)": 6, "up (units)": 8}, {"embed.weight": ("aten.embedding", "embed")}),
}
"""Plain models by name."""


def hugging_face(name: str, **config: Any) -> Callable[[], nn.Module]:
    """Return a function that builds a small model with random weights."""

    def build() -> nn.Module:
        family = name.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration").removesuffix("Model")
        made: nn.Module = getattr(transformers, name)(
            getattr(transformers, f"{family.removesuffix('LMHead')}Config")(**config)
        )
        return made

    return build


SIZES_IN_CODE = {
    "multihead attention",
    "transposed",
    "shuffle",
    "fused",
    "interleaved",
    "attention",
    "grouped queries",
    "nano",
}
"""Plain models whose own code has sizes written into it: no module route, and they cannot get smaller in training."""
