"""Heads: whole attention heads, pruned in the query, key, value and output projections together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from sparse_lightning.errors import PatternError
from sparse_lightning.layout import Layout
from sparse_lightning.patterns.attention import head_dim_of, projections, row_order, why_neither_order
from sparse_lightning.patterns.coupled import Piece, by_unit, column_piece, couple, row_pieces
from sparse_lightning.patterns.layer import Layer, common_owner, find_together, once
from sparse_lightning.patterns.names import Names, nearest
from sparse_lightning.patterns.pattern import Attachment, Pattern


@dataclass(frozen=True)
class Heads(Pattern):
    """Attention heads: rows of the projections q, k and v with their biases, and columns of `out`.

    With grouped-query attention, a key-value head is pruned together with all of its query heads. `Heads("*.attn")`
    alone names attention modules; their projections are found by common names, such as `q_proj` or `qkv`.

    Args:
        q: a glob, or a regular expression after `re:`, of the query projections; alone: of attention modules.
        k: a glob of the key projections.
        v: a glob of the value projections.
        out: a glob of the output projections.
        head_dim: the size of a head, for modules that do not give it; None reads it from the attention module or its
            config.
        qkv: a glob of fused projections, instead of q, k and v.
        order: the order of the rows of a fused projection. "qkv": all queries, then all keys, then all values, as in
            GPT-2, Phi-3 and timm. "head": the queries, key and value of the first head, then those of the second, as in
            GPT-NeoX, BLOOM and Falcon. None takes it from the class of the attention module, if it is one of torch,
            torchvision, timm or transformers, and raises an error otherwise. `check_pruned` verifies it.

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
    order: Literal["qkv", "head"] | None = None

    label: ClassVar[str] = "heads"

    def __post_init__(self) -> None:
        given = {role for role in ("q", "k", "v", "out", "qkv") if getattr(self, role) is not None}
        if given not in ({"q"}, {"q", "k", "v", "out"}, {"qkv", "out"}):
            raise PatternError(
                f"{self} names no set of projections: pass q, k, v and out; or qkv and out; or attention modules alone"
            )
        if self.head_dim is not None and self.head_dim < 1:
            raise PatternError(f"{self}: head_dim={self.head_dim} must be at least 1")
        if self.order not in (None, "qkv", "head"):
            raise PatternError(f"{self}: order={self.order!r} is not an order of rows: pass 'qkv' or 'head'")

    def resolve(self, names: Names) -> list[Attachment]:
        """Return one attachment for each attention module."""
        if self.k is None and self.qkv is None:
            groups = self._in_modules(names, str(self.q))
        else:
            roles = {"q": self.q, "k": self.k, "v": self.v, "qkv": self.qkv, "out": self.out}
            groups = find_together(self, names, roles)
        return [self._attach(names, group) for group in groups]

    def _in_modules(self, names: Names, glob: str) -> list[dict[str, Layer]]:
        """Return the projections of all matching attention modules; submodules of a match are not matches."""
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
                    f"{self}: the projections in {name!r} have unknown names; its children are {children}. Pass q, k, "
                    "v and out, or qkv and out with the order of the fused rows"
                )
        return once([groups[name] for name in names.modules if name in groups])

    def _attach(self, names: Names, layers: dict[str, Layer]) -> Attachment:
        out = layers["out"]
        owner = common_owner(*layers.values())
        for layer in layers.values():
            if layer.weight.ndim != 2:
                shape = tuple(layer.weight.shape)
                raise PatternError(f"{self}: {layer.name} of shape {shape} is not a matrix: name linear layers")
        with self.error_context(out.name, out.weight):
            units = self._units(names, layers, owner)
            pieces = self._pieces(names, layers, units)
            return couple(self, f"{owner or out.title} ({self.label})", [*pieces, column_piece(out, units)])

    def _units(self, names: Names, layers: dict[str, Layer], owner: str) -> int:
        """Return the number of units: key-value heads."""
        width = layers["out"].columns().shape[0]
        rows = {role: layer.rows().shape[0] for role, layer in layers.items() if role != "out"}
        queries = rows.get("q", width)
        keys = rows["k"] if "k" in rows else (rows["qkv"] - width) // 2
        first = next(iter(layers.values()))
        known = head_dim_of(names, first.name.rpartition(".")[0], owner, queries)
        shapes = ", ".join(f"{role} {layer.name} {tuple(layer.weight.shape)}" for role, layer in layers.items())
        if known is not None and self.head_dim not in (None, known):
            raise PatternError(
                f"{self}: head_dim={self.head_dim}, but the heads of {owner or 'the model'} have size {known} by its "
                f"attributes or config. Leave head_dim out, or pass {known}"
            )
        size = self.head_dim or known
        if size is None:
            raise PatternError(f"{self}: no module has the head size of {shapes} as an attribute. Pass head_dim")
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
            pieces = self._fused_pieces(names, layers["qkv"], layers["out"].columns().shape[0], units)
        else:
            pieces = [piece for role in ("q", "k", "v") for piece in row_pieces(layers[role], units)]
        return pieces + _biases_of_multihead_attention(names, layers, units)

    def _fused_pieces(self, names: Names, qkv: Layer, width: int, units: int) -> list[Piece]:
        if self._row_order(names, qkv) == "head":
            return row_pieces(qkv, units)
        pieces = _fused(qkv.name, qkv.weight, qkv.rows(), width, units)
        if qkv.bias is not None and qkv.bias_name is not None:
            pieces += _fused(qkv.bias_name, qkv.bias, Layout.of(qkv.bias), width, units)
        return pieces

    def _row_order(self, names: Names, qkv: Layer) -> str:
        order = self.order or row_order(names, qkv)
        if order is None:
            owner = names.modules.get(qkv.title.rpartition(".")[0])
            why = why_neither_order(names, qkv)
            raise PatternError(
                f"{self}: the order of the rows of {qkv.name} in {type(owner).__name__} is unknown"
                + (f": {why}. Use Custom for its heads, or another pattern" if why else ONE_OF_TWO)
            )
        return order


ONE_OF_TWO = (
    ". Pass order='qkv' if all queries come first, then all keys, then all values; or order='head' if each head has "
    "its queries, key and value in a row. Verify it by check_pruned"
)


def _fused(name: str, parameter: Tensor, rows: Layout, width: int, units: int) -> list[Piece]:
    """Return the rows `[q; k; v]`: as one piece if q, k and v have equal sizes, else q apart from k and v."""
    total = rows.shape[0]
    bands = [(0, total, 3)] if total == 3 * width else [(0, width, 1), (width, total, 2)]
    return [Piece(name, parameter, by_unit(rows.slice(0, low, high), units, parts)) for low, high, parts in bands]


def _biases_of_multihead_attention(names: Names, layers: dict[str, Layer], units: int) -> list[Piece]:
    """Return what `nn.MultiheadAttention` has besides its projections: `in_proj_bias`, `bias_k` and `bias_v`."""
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
