"""Random models for the tests of couplings: chains and branches of layers, reshapes, splits, joins and attention."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, scaled_dot_product_attention, silu

Step = Callable[[Tensor], Tensor]


class RandomModel(nn.Module):
    """A random chain of steps on sequences `(batch, tokens, channels)` or images `(batch, channels, 4, 4)`.

    Args:
        seed: of all choices.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.pick = random.Random(seed)
        torch.manual_seed(seed)
        self.parts = nn.ModuleList()
        self.steps: list[Step] = []
        self.width = 6
        if seed % 3:
            kinds = [getattr(self, name) for name in dir(type(self)) if name.startswith("sequence_")]
            self.inputs = (torch.randn(2, 3, 6),)
        else:
            kinds = [getattr(self, name) for name in dir(type(self)) if name.startswith("image_")]
            self.inputs = (torch.randn(2, 6, 4, 4),)
        for _ in range(self.pick.randint(2, 4)):
            self.steps.append(self.pick.choice(kinds)())
        self.images = not seed % 3
        flat = self.images and self.pick.random() < 0.5
        self.flat, self.head = flat, nn.Linear(self.width * (16 if flat else 1), 3)

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        if self.images:
            x = x.flatten(1) if self.flat else x.mean((2, 3))
        return self.head(x)

    def add(self, part: Any) -> Any:
        self.parts.append(part)
        return part

    def linear(self, width: int | None = None) -> nn.Linear:
        """A linear layer to a new width, which is that of the chain from here on."""
        before, self.width = self.width, width or self.pick.choice([4, 6, 8, 12])
        return self.add(nn.Linear(before, self.width, bias=self.pick.random() < 0.7))

    def sequence_linear(self) -> Step:
        layer, act = (
            self.linear(),
            self.pick.choice([relu, gelu, silu, torch.sigmoid, torch.tanh, torch.exp, torch.cos]),
        )
        return lambda x: act(layer(x))

    def sequence_residual(self) -> Step:
        layer = self.linear(self.width)
        return lambda x: x + gelu(layer(x))

    def sequence_norm(self) -> Step:
        norm = self.add(self.pick.choice([nn.LayerNorm, nn.RMSNorm])(self.width))
        layer = self.linear()
        return lambda x: layer(norm(x))

    def sequence_gate(self) -> Step:
        before = self.width
        layer, gate = self.linear(), self.add(nn.Linear(before, self.width))
        return lambda x: layer(x) * torch.sigmoid(gate(x))

    def sequence_split(self) -> Step:
        layer, kind = self.linear(), self.pick.randrange(4)
        self.width = self.width // 2 if kind < 2 else self.width

        def step(x: Tensor) -> Tensor:
            a, b = layer(x).chunk(2, -1)
            return (a * b, a + gelu(b), torch.cat([b, a], -1), torch.cat([a, relu(a)], -1))[kind]

        return step

    def sequence_join(self) -> Step:
        before = self.width
        layer = self.linear()
        self.width += before
        return lambda x: torch.cat([x, relu(layer(x))], -1)

    def sequence_reshape(self) -> Step:
        layer = self.linear(12)
        outer = self.pick.choice([2, 3, 4, 6])
        inner = self.add(nn.Linear(12 // outer, 12 // outer)) if self.pick.random() < 0.5 else None
        swap, mean = self.pick.random() < 0.5, self.pick.choice(["", "", "mean", "sum", "softmax"])
        self.width = 12 if mean in ("", "softmax") else (outer if not swap else 12 // outer)

        def step(x: Tensor) -> Tensor:
            b, t, _ = x.shape
            x = layer(x).view(b, t, outer, 12 // outer)
            x = x if inner is None else relu(inner(x))
            x = x.transpose(2, 3) if swap else x
            if mean in ("mean", "sum"):
                return getattr(x, mean)(-1)
            return (x.softmax(-1) if mean else x).reshape(b, t, 12)

        return step

    def sequence_attention(self) -> Step:
        """4 heads of 2 dimensions: fused or interleaved, of one kernel or written out, with shared keys or without."""
        before = self.width
        qkv = self.linear(24)
        out = self.add(nn.Linear(8, before))
        self.width = before
        order, eager, shared = (self.pick.random() < 0.5 for _ in range(3))

        def step(x: Tensor) -> Tensor:
            b, t, _ = x.shape
            if order:
                q, k, v = (part.view(b, t, 4, 2).transpose(1, 2) for part in qkv(x).split(8, -1))
            else:
                q, k, v = qkv(x).view(b, t, 4, 6).transpose(1, 2).split(2, -1)
            if shared:
                k, v = (part[:, :2].repeat_interleave(2, 1) for part in (k, v))
            made = (q @ k.transpose(-1, -2)).softmax(-1) @ v if eager else scaled_dot_product_attention(q, k, v)
            return x + out(made.transpose(1, 2).reshape(b, t, 8))

        return step

    def sequence_convolution(self) -> Step:
        groups = self.pick.choice([1, 1, 2])
        before, self.width = self.width, self.pick.choice([4, 6, 8])
        layer = self.add(nn.Conv1d(before, self.width, 3, padding=1, groups=groups))
        norm = self.add(nn.BatchNorm1d(self.width))
        return lambda x: relu(norm(layer(x.transpose(1, 2)))).transpose(1, 2)

    def sequence_slice(self) -> Step:
        layer = self.linear()
        low = self.pick.randrange(2)
        self.width = self.width - 2
        return lambda x: layer(x)[..., low : low + layer.out_features - 2]

    def sequence_twice(self) -> Step:
        """A layer that is called twice."""
        layer = self.linear(self.width)
        return lambda x: layer(relu(layer(x)))

    def image_convolution(self) -> Step:
        groups = self.pick.choice([1, 1, 1, 2])
        before, self.width = self.width, self.pick.choice([4, 6, 8])
        layer, norm = self.add(nn.Conv2d(before, self.width, 3, padding=1, groups=groups)), self._norm()
        return lambda x: relu(norm(layer(x)))

    def image_residual(self) -> Step:
        hidden = self.pick.choice([4, 6])
        one = self.add(nn.Conv2d(self.width, hidden, 1))
        two, norm = self.add(nn.Conv2d(hidden, self.width, 3, padding=1)), self._norm()
        return lambda x: x + norm(two(relu(one(x))))

    def image_depthwise(self) -> Step:
        more = self.pick.choice([1, 1, 2])
        before, self.width = self.width, self.width * more
        layer, norm = self.add(nn.Conv2d(before, self.width, 3, padding=1, groups=before)), self._norm()
        return lambda x: norm(layer(x))

    def image_squeeze(self) -> Step:
        down, up = self.add(nn.Linear(self.width, 4)), self.add(nn.Linear(4, self.width))
        return lambda x: x * torch.sigmoid(up(relu(down(x.mean((2, 3))))))[:, :, None, None]

    def image_join(self) -> Step:
        layer = self.add(nn.Conv2d(self.width, 4, 1))
        self.width += 4
        return lambda x: torch.cat([x, relu(layer(x))], 1)

    def image_shuffle(self) -> Step:
        def step(x: Tensor) -> Tensor:
            b, c, h, w = x.shape
            return x.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)

        return step

    def _norm(self) -> Any:
        kind = self.pick.choice(["batch", "batch", "group", "none"])
        if kind == "none":
            return nn.Identity()
        return self.add(nn.BatchNorm2d(self.width) if kind == "batch" else nn.GroupNorm(2, self.width))
