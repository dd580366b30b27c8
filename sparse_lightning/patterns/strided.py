"""Strided: blocks of a strided view of each matching parameter, written as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from sparse_lightning.blocks.scope import ScopeSpec
from sparse_lightning.blocks.spec import BlockSpec
from sparse_lightning.blocks.view import View
from sparse_lightning.errors import PatternError, did_you_mean
from sparse_lightning.layout import Layout
from sparse_lightning.patterns.names import Names
from sparse_lightning.patterns.pattern import Attachment, Globs, Pattern, as_globs, as_shape


@dataclass(frozen=True)
class Strided(Pattern):
    """Blocks of a strided view of every matching parameter: weights that lie apart form a block.

    Parameters that an earlier pattern claimed are skipped.

    Args:
        match: a glob of parameter names, a regular expression after `re:`, or a list of them.
        view: `{shape, stride, offset}` as the arguments of `View`, for parameters of one shape; or
            `{split, permute}`, for parameters of any: `split` has for each dimension the sizes that it is split into,
            row-major, with −1 for the rest, and `permute` orders the dimensions that result.
        block: the block shape on the view; −1 spans its dimension, missing trailing entries are 1.
        scope: which blocks compete: a shape in blocks; −1 or a missing entry spans its dimension.
        edge: "error" raises an error where the block does not divide the view; "partial" allows a smaller last block
            in each dimension.

    Example:
        Columns eight apart, kept or pruned together, two of every four pairs:

        >>> from torch import nn
        >>> apart = {"split": [[-1], [-1, 2, 8]], "permute": [0, 1, 3, 2]}
        >>> pairs = Strided("*.weight", apart, block=(1, 1, 1, 2), scope=(1, 1, 4, 1))
        >>> [found] = pairs.resolve(Names(nn.Sequential(nn.Linear(32, 8))))
        >>> found.scope.blocks()[0].parameters()
        [View((8, 2, 8, 2), stride=(32, 16, 1, 8), offset=0, of Parameter (8, 32) torch.float32)]
        >>> found.scope.numblk_per_scope(), found.scope.numel_per_scope()
        (4, 8)
    """

    match: Globs
    view: Mapping[str, Any]
    block: Sequence[int]
    scope: Sequence[int] = ()
    edge: Literal["error", "partial"] = "error"

    label: ClassVar[str] = "strided"

    def __post_init__(self) -> None:
        object.__setattr__(self, "match", as_globs(self.match))
        object.__setattr__(self, "view", _as_given(self.view))
        object.__setattr__(self, "block", as_shape("block", self.block))
        object.__setattr__(self, "scope", as_shape("scope", self.scope))

    def __hash__(self) -> int:
        return hash((self.match, str(self.view), self.block, self.scope, self.edge))

    def resolve(self, names: Names) -> list[Attachment]:
        """Return one attachment for each parameter."""
        return [self._attach(names, name) for name in self.unclaimed(names, self.match)]

    def _attach(self, names: Names, name: str) -> Attachment:
        parameter = names.parameters[name]
        with self.error_context(name, parameter):
            layout = self._layout(Layout.of(parameter))
            view = View(parameter, layout.shape, layout.stride, layout.offset)
            spec = BlockSpec(view, self.block, name=name, edge=self.edge)
            return Attachment(name, self.label, ScopeSpec(spec, self.scope, name=name))

    def _layout(self, base: Layout) -> Layout:
        if "split" not in self.view:
            return Layout(self.view["shape"], self.view["stride"], self.view.get("offset", base.offset))
        if len(self.view["split"]) > base.ndim:
            raise PatternError(
                f"{self} splits {len(self.view['split'])} dimensions of a parameter of shape {base.shape}: change the "
                "names to exclude it, or remove entries of split"
            )
        layout = base
        for dim, sizes in reversed(list(enumerate(self.view["split"]))):
            layout = layout.split(dim, sizes)
        return layout.permute(self.view["permute"]) if "permute" in self.view else layout


_FORMS = {"shape", "stride", "offset"}, {"split", "permute"}


def _as_given(view: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a view that are set, with tuples for lists; raise a PatternError if the keys do not fit."""
    if not isinstance(view, Mapping):
        raise PatternError(f"{view!r} is not a view: pass a mapping with shape and stride, or with split and permute")
    known = set.union(*_FORMS)
    for key in view:
        if key not in known:
            raise PatternError(f"a view has no {key!r}{did_you_mean(str(key), sorted(known))}")
    given = {key: value for key, value in view.items() if value is not None}
    form = next((form for form in _FORMS if set(given) <= form), None)
    if form is None or not ({"shape", "stride"} <= set(given) or "split" in given):
        raise PatternError(
            f"a view has {', '.join(sorted(given)) or 'no keys'}: pass shape and stride, and perhaps offset; or split, "
            "and perhaps permute"
        )
    if "split" in given:
        given["split"] = tuple((sizes,) if isinstance(sizes, int) else tuple(sizes) for sizes in given["split"])
    return {key: value if isinstance(value, int) else tuple(value) for key, value in given.items()}
