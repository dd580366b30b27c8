"""Head attributes: what attention modules remember of their number of heads, by the names that are usual."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from sparse_lightning.compaction.zero_units import KeptUnits
from sparse_lightning.graph import Family

QUERY_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "num_query_heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
REPEATS = ("num_key_value_groups", "n_rep", "num_queries_per_kv")
WIDTHS = ("all_head_size", "split_size", "inner_dim")
HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim", "d_head")

_BY_KIND = {
    "(heads)": (*QUERY_HEADS, *KEY_HEADS, *WIDTHS),
    "(q heads of each group)": (*QUERY_HEADS, *REPEATS, *WIDTHS),
    "(head dimensions)": (*HEAD_SIZES, *WIDTHS),
}
"""The attributes that are proportional to the number of units of a family, by the end of its name."""

HEAD_ATTRIBUTES = frozenset(name for names in _BY_KIND.values() for name in names)


def head_attributes(module: nn.Module, touching: Iterable[tuple[Family, KeptUnits]]) -> dict[str, int]:
    """Return the new values of the attributes of an attention module.

    Args:
        module: whose own parameters, or those of its children, belong to the families.
        touching: the families with the units that are left.

    Example:
        >>> import numpy as np
        >>> attention = nn.Module()
        >>> attention.num_heads, attention.head_dim = 8, 4
        >>> heads = Family("attn (heads)", 8, (), np.arange(8))
        >>> head_attributes(attention, [(heads, KeptUnits(8, [0, 3, 4]))])
        {'num_heads': 3}
    """
    found: dict[str, int] = {}
    if isinstance(module, nn.MultiheadAttention):  # it computes the size of a head from the width of its inputs
        return found
    for family, left in touching:
        kind = family.name[family.name.rfind("(") :].split(" #")[0]
        for name in _BY_KIND.get(kind, ()):
            value = found.get(name, vars(module).get(name))
            if type(value) is int and value and value % left.total == 0:
                found[name] = value // left.total * len(left.kept)
    return found
