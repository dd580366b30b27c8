"""What is known of attention modules: names of projections, the order of fused rows, where the head size is."""

from __future__ import annotations

from torch import nn

from sparse_lightning.patterns.layer import Layer
from sparse_lightning.patterns.names import Names

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
_FUSED = ["qkv", "qkv_proj", "c_attn", "in_proj", "to_qkv", "Wqkv", "query_key_value"]
_QUERIES_FIRST = ["qkv", "qkv_proj", "c_attn", "in_proj", "in_proj_weight", "to_qkv", "Wqkv"]
_HEAD_BY_HEAD = [
    "BloomAttention",
    "DisentangledSelfAttention",
    "FalconAttention",
    "GPTNeoXAttention",
    "GPTNeoXJapaneseAttention",
    "PersimmonAttention",
]
_PACKAGES = ["sparse_lightning", "timm", "torchvision", "transformers"]
"""Their attention modules have all queries first wherever a layer has a name of `_QUERIES_FIRST`."""

_IN_NEITHER_ORDER = {
    "CodeGenAttention": "its rows are queries, values and keys in four groups of heads",
    "MiniMaxLightningAttention": "its norm mixes all heads, and its gate reads them",
}
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
    """Return the layers q, k, v and out, or qkv and out, of an attention module; None if it has no such children."""
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


def row_order(names: Names, layer: Layer) -> str | None:
    """Return the order of the rows of a fused projection: "qkv" or "head"; None if it is unknown.

    The class of the attention module decides where it is known. In other classes of known packages, the name of the
    layer decides. A class of anyone else may have either order, whatever its names are.
    """
    owner = names.modules.get(layer.title.rpartition(".")[0])
    classes = _class_names(owner)
    if any(name in _HEAD_BY_HEAD for name in classes):
        return "head"
    if "GPTBigCodeAttention" in classes:
        return "qkv" if getattr(owner, "multi_query", False) else "head"
    if why_neither_order(names, layer) is not None:
        return None
    named = layer.title.rpartition(".")[2] in _QUERIES_FIRST
    return "qkv" if named and (isinstance(owner, nn.MultiheadAttention) or _package(owner) in _PACKAGES) else None


def _package(module: nn.Module | None) -> str:
    """Return the package whose code is the forward pass of a module."""
    owner = next((cls for cls in type(module).__mro__ if "forward" in vars(cls)), type(module))
    return owner.__module__.partition(".")[0]


def why_neither_order(names: Names, layer: Layer) -> str | None:
    """Return why the heads of a known class are not rows of its fused projection; None for other classes."""
    owner = names.modules.get(layer.title.rpartition(".")[0])
    return next((_IN_NEITHER_ORDER[name] for name in _class_names(owner) if name in _IN_NEITHER_ORDER), None)


def _class_names(module: nn.Module | None) -> list[str]:
    return [cls.__name__ for cls in type(module).__mro__]


def _child(names: Names, owner: str, child: str) -> Layer | None:
    """Return a layer of a module; `nn.MultiheadAttention` holds weights itself, such as `in_proj_weight`."""
    for name in (f"{owner}.{child}.weight", f"{owner}.{child}_weight"):
        if name.lstrip(".") in names.parameters:
            return Layer.at(names, name.lstrip("."))
    return None


def head_dim_of(names: Names, inner: str, outer: str, width: int) -> int | None:
    """Return the head size that an attribute of a module or of its `config` gives; None if there is none.

    Args:
        names: the model.
        inner: the name of the module to search first.
        outer: the name of the enclosing module to search last.
        width: the size of all query heads together, for modules that give the number of heads.
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
