"""Heads: whole attention heads, pruned in the projections that make them and in the one that reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sparse_lightning.errors import PatternError
from sparse_lightning.layout import Layout
from sparse_lightning.names import Names, nearest
from sparse_lightning.patterns.attention import head_dim_of, projections
from sparse_lightning.patterns.coupled import Piece, by_unit, column_piece, couple, row_pieces
from sparse_lightning.patterns.layer import Layer, common_owner, find_together, once
from sparse_lightning.patterns.pattern import Attachment, Pattern


@dataclass(frozen=True)
class Heads(Pattern):
    """Attention heads: rows of the projections q, k and v with their biases, and the columns of `out`.

    With grouped-query attention one decision prunes a key-value head with all its query heads.
    `Heads("*.attn")`, with nothing else, names attention modules, and finds the projections in them by the names
    that are common.

    Args:
        q: a glob, or a regular expression after `re:`, of the layers that make queries; alone: of attention modules.
        k: of the layers that make keys.
        v: of the layers that make values.
        out: of the layers that read all heads.
        head_dim: the size of a head; None asks the attention module.
        qkv: of the layers that make queries, keys and values at once, in this order, in place of q, k and v.

    Example:
        >>> from torch import nn
        >>> model = nn.ModuleDict({"attn": nn.MultiheadAttention(16, 4)})
        >>> [found] = Heads("attn").resolve(Names(model))
        >>> found.name, found.scope.numblk_per_scope()
        ('attn (heads)', 4)
    """

    q: str | None = None
    k: str | None = None
    v: str | None = None
    out: str | None = None
    head_dim: int | None = None
    qkv: str | None = None

    label: ClassVar[str] = "heads"

    def __post_init__(self) -> None:
        given = {role for role in ("q", "k", "v", "out", "qkv") if getattr(self, role) is not None}
        if given not in ({"q"}, {"q", "k", "v", "out"}, {"qkv", "out"}):
            raise PatternError(
                f"{self}: give q, k, v and out; or qkv and out; or, as the first, attention modules alone"
            )
        if self.head_dim is not None and self.head_dim < 1:
            raise PatternError(f"{self}: a head has a size of 1 or more")

    def resolve(self, names: Names) -> list[Attachment]:
        """A scope for each attention."""
        if self.k is None and self.qkv is None:
            groups = self._in_modules(names, str(self.q))
        else:
            roles = {"q": self.q, "k": self.k, "v": self.v, "qkv": self.qkv, "out": self.out}
            groups = find_together(self, names, roles)
        return [self._attach(names, group) for group in groups]

    def _in_modules(self, names: Names, glob: str) -> list[dict[str, Layer]]:
        """The projections of all attention modules that match; what lies inside of one is no other."""
        matching = sorted(names.find_modules(glob), key=lambda name: name.count("."))
        if not matching:
            raise PatternError(f"{self}: {glob!r} matches no module{nearest(glob, names.modules)}")
        groups: dict[str, dict[str, Layer]] = {}
        for name in matching:
            found = projections(names, name)
            if found is not None:
                groups[name] = found
            elif not any(name.startswith(f"{owner}.") for owner in groups):
                children = [child for child, _ in names.modules[name].named_children()]
                raise PatternError(
                    f"{self}: the projections in {name!r} have no names that are known; it has {children}. Give "
                    "them with q, k, v and out, or with qkv and out"
                )
        return once([groups[name] for name in names.modules if name in groups])

    def _attach(self, names: Names, layers: dict[str, Layer]) -> Attachment:
        out = layers["out"]
        owner = common_owner(*layers.values())
        for layer in layers.values():
            if layer.weight.ndim != 2:
                raise PatternError(f"{self}: {layer.name} of shape {tuple(layer.weight.shape)} is not a matrix")
        with self.refusing(out.name, out.weight):
            units = self._units(names, layers, owner)
            pieces = self._pieces(names, layers, units)
            return couple(self, f"{owner or out.title} ({self.label})", [*pieces, column_piece(out, units)])

    def _units(self, names: Names, layers: dict[str, Layer], owner: str) -> int:
        """How many decisions there are: key-value heads."""
        width = layers["out"].columns().shape[0]
        rows = {role: layer.rows().shape[0] for role, layer in layers.items() if role != "out"}
        queries = rows.get("q", width)
        keys = rows["k"] if "k" in rows else (rows["qkv"] - width) // 2
        first = next(iter(layers.values()))
        size = self.head_dim or head_dim_of(names, first.name.rpartition(".")[0], owner, queries)
        shapes = ", ".join(f"{role} {layer.name} {tuple(layer.weight.shape)}" for role, layer in layers.items())
        if size is None:
            raise PatternError(f"{self}: no module says how large a head is in {shapes}. Give head_dim")
        whole = size > 0 and queries % size == 0 and keys % size == 0 and keys > 0 and queries % keys == 0
        even = "qkv" not in rows or rows["qkv"] == width + 2 * keys
        if not (whole and even) or any(n % (keys // size) for n in (width, rows.get("v", keys))):
            raise PatternError(
                f"{self}: heads of size {size} do not divide {shapes}: {queries} query rows and {keys} key rows. "
                "Change head_dim, or the names of the projections"
            )
        return keys // size

    def _pieces(self, names: Names, layers: dict[str, Layer], units: int) -> list[Piece]:
        if "qkv" in layers:
            qkv, width = layers["qkv"], layers["out"].columns().shape[0]
            pieces = _fused(qkv.name, qkv.weight, qkv.rows(), width, units)
            if qkv.bias is not None and qkv.bias_name is not None:
                pieces += _fused(qkv.bias_name, qkv.bias, Layout.of(qkv.bias), width, units)
        else:
            pieces = [piece for role in ("q", "k", "v") for piece in row_pieces(layers[role], units)]
        return pieces + _biases_of_multihead_attention(names, layers, units)


def _fused(name: str, parameter: Tensor, rows: Layout, width: int, units: int) -> list[Piece]:
    """The rows `[q; k; v]`: at once where there are as many of each, else those of q and those of k and v."""
    total = rows.shape[0]
    bands = [(0, total, 3)] if total == 3 * width else [(0, width, 1), (width, total, 2)]
    return [Piece(name, parameter, by_unit(rows.slice(0, low, high), units, parts)) for low, high, parts in bands]


def _biases_of_multihead_attention(names: Names, layers: dict[str, Layer], units: int) -> list[Piece]:
    """What `nn.MultiheadAttention` keeps beside its projections: one bias for separate weights, `bias_k`, `bias_v`."""
    first = next(iter(layers.values()))
    owner, _, last = first.name.rpartition(".")
    if last not in ("in_proj_weight", "q_proj_weight"):
        return []
    pieces = []
    for name, parts in (("in_proj_bias", 3), ("bias_k", 1), ("bias_v", 1)):
        full = f"{owner}.{name}".lstrip(".")
        parameter = names.parameters.get(full)
        if parameter is not None and full != first.bias_name:
            flat = Layout.of(parameter).reshape((-1,))
            pieces.append(Piece(full, parameter, by_unit(flat, units, parts)))
    return pieces
