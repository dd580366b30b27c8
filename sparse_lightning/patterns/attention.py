"""What the parts of attention modules are called, and how many heads they say they have."""

from __future__ import annotations

from sparse_lightning.names import Names
from sparse_lightning.patterns.layer import Layer

_SEPARATE = [
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("q_lin", "k_lin", "v_lin"),
    ("wq", "wk", "wv"),
    ("q", "k", "v"),
    ("self.query", "self.key", "self.value"),
    ("attention.query", "attention.key", "attention.value"),
]
_FUSED = ["qkv", "qkv_proj", "c_attn", "in_proj", "to_qkv", "Wqkv"]
_OUT = [
    "o_proj",
    "out_proj",
    "proj",
    "c_proj",
    "to_out.0",
    "to_out",
    "out_lin",
    "output.dense",
    "wo",
    "o",
    "out",
    "dense",
]

_HEAD_DIM = ["head_dim", "attention_head_size", "head_size", "dim_head", "d_head", "key_value_proj_dim"]
_HEADS = ["num_heads", "num_attention_heads", "n_head", "n_heads", "nhead", "heads"]


def projections(names: Names, owner: str) -> dict[str, Layer] | None:
    """The layers q, k, v and out, or qkv and out, of an attention module; None where it has no such children."""
    out = next((layer for child in _OUT if (layer := _child(names, owner, child))), None)
    if out is None:
        return None
    for child in _FUSED:
        qkv = _child(names, owner, child)
        if qkv is not None:
            return {"qkv": qkv, "out": out}
    for children in _SEPARATE:
        q, k, v = (_child(names, owner, child) for child in children)
        if q is not None and k is not None and v is not None:
            return {"q": q, "k": k, "v": v, "out": out}
    return None


def _child(names: Names, owner: str, child: str) -> Layer | None:
    """A layer below a module; `nn.MultiheadAttention` has weights of its own, such as `in_proj_weight`."""
    for name in (f"{owner}.{child}.weight", f"{owner}.{child}_weight"):
        if name.lstrip(".") in names.parameters:
            return Layer.at(names, name.lstrip("."))
    return None


def head_dim_of(names: Names, inner: str, outer: str, width: int) -> int | None:
    """The size of a head, as a module from `inner` out to `outer`, which holds it, says by an attribute.

    `width` is that of all query heads together, for modules that tell how many heads they have.
    """
    owner = inner
    while True:
        module = names.modules.get(owner)
        for holder in (module, getattr(module, "config", None)):
            size, count = _attribute(holder, _HEAD_DIM), _attribute(holder, _HEADS)
            if size is not None:
                return size
            if count is not None and width % count == 0:
                return width // count
        if owner in (outer, ""):
            return None
        owner = owner.rpartition(".")[0]


def _attribute(holder: object, known: list[str]) -> int | None:
    values = (getattr(holder, name, None) for name in known)
    return next((n for n in values if isinstance(n, int) and not isinstance(n, bool) and n > 0), None)
