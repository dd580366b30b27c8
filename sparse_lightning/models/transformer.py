"""Block: a pre-norm transformer block with a fused QKV projection and a GELU MLP."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from sparse_lightning.errors import LayoutError


class Attention(nn.Module):
    """Self-attention; `qkv` projects to queries, keys and values, and `out` reads all heads.

    Args:
        width: features of a token.
        num_heads: attention heads, each of `width / num_heads` features.
        causal: whether a token attends to earlier ones only.
    """

    def __init__(self, width: int, num_heads: int, causal: bool) -> None:
        super().__init__()
        if width % num_heads:
            raise LayoutError(f"heads={num_heads} does not divide width={width}: change one of them")
        self.num_heads = num_heads
        self.causal = causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, tokens, width)` → the same."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        made: Tensor = self.out(scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))
        return made


class MLP(nn.Module):
    """Two linear layers with a GELU in between.

    Args:
        width: features of a token.
        hidden: neurons.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """`(…, width)` → the same."""
        made: Tensor = self.down(gelu(self.up(x)))
        return made


class Block(nn.Module):
    """Attention and MLP, each with a layer norm and a residual connection.

    Args:
        width: features of a token.
        num_heads: attention heads.
        causal: whether a token attends to earlier ones only.

    Example:
        >>> import torch
        >>> Block(width=16, num_heads=4, causal=True)(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(self, width: int, num_heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, num_heads, causal)
        self.norm2, self.mlp = nn.LayerNorm(width), MLP(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, tokens, width)` → the same."""
        x = x + self.attn(self.norm1(x))
        made: Tensor = x + self.mlp(self.norm2(x))
        return made
