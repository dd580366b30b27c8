"""Adapters of LoRA: which of their rows and columns belong to the blocks of a base weight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import Tensor, nn

from sparse_lightning.blocks.scope import ScopeCoupling, ScopeSpec, SparseScope
from sparse_lightning.blocks.sparse_block import SparseBlock
from sparse_lightning.blocks.spec import BlockCoupling, BlockSpec
from sparse_lightning.blocks.view import View
from sparse_lightning.errors import PatternError
from sparse_lightning.layout import Layout
from sparse_lightning.patterns.masked_product import MaskedProduct
from sparse_lightning.patterns.names import Names
from sparse_lightning.patterns.pattern import Attachment


@dataclass(frozen=True)
class AdaptedLayer:
    """A linear layer that adapters are added to, as PEFT does.

    Args:
        name: of its base weight.
        wrapper: the module with `base_layer`, `lora_A` and `lora_B`.
        weight: of the base layer.
    """

    name: str
    wrapper: Any
    weight: Tensor

    @property
    def is_transposed(self) -> bool:
        """Whether the base weight has its inputs first."""
        return bool(getattr(self.wrapper, "fan_in_fan_out", False))

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters."""
        return list(self.wrapper.lora_A)

    def check(self) -> None:
        """Raise a PatternError for adapters whose product cannot be kept sparse."""
        wrong = [name for name in self.adapters if name in getattr(self.wrapper, "lora_magnitude_vector", {})]
        if wrong:
            raise PatternError(
                f"{self.name} has the DoRA adapter {wrong[0]!r}, which divides the adapted weight by its norms: they "
                "change with what is pruned, and are zero where a whole row is. Use LoRA without use_dora"
            )
        variants: Mapping[str, object] = getattr(self.wrapper, "lora_variant", {})
        other = [name for name, variant in variants.items() if not isinstance(variant, MaskedProduct)]
        if other:
            raise PatternError(
                f"the adapter {other[0]!r} of {self.name} is a {type(variants[other[0]]).__name__}, whose merge is not "
                "the product of two matrices: pruned weights could not be kept at zero. Use plain LoRA"
            )
        if self.weight.ndim != 2 or getattr(self.wrapper, "merged", False):
            what = "is merged" if self.weight.ndim == 2 else "is not that of a matrix"
            raise PatternError(
                f"the adapter of {self.name} {what}: unmerge it, or exclude the weight from the patterns"
            )

    def factors(self, spec: BlockSpec) -> list[BlockSpec]:
        """Return the rows or columns of the adapters that belong to the blocks of a spec; none if it has no such.

        The blocks of a spec on whole rows of the base weight are pruned in the product `B·A` if the same rows of B
        are, and those on whole columns if the same columns of A are.
        """
        steps = _Factored.of(spec, self.weight, self.is_transposed)
        if steps is None:
            return []
        made = []
        for name in self.adapters:
            down, up = self.wrapper.lora_A[name], self.wrapper.lora_B[name]
            if steps.side == "outputs":
                made.append(steps.spec_on(up.weight, f"{self.name} (lora_B {name})"))
                if up.bias is not None:
                    made.append(steps.spec_on(up.bias, f"{self.name} (lora_B {name} bias)"))
            else:
                made.append(steps.spec_on(down.weight, f"{self.name} (lora_A {name})"))
        return made


@dataclass(frozen=True)
class _Factored:
    """A spec on whole rows or whole columns of a matrix.

    Args:
        side: "outputs" for blocks of all weights of some outputs, "inputs" for those of some inputs.
        steps: for each dimension of the view the step in outputs or inputs; None for dimensions that a block spans.
        first: the first output or input.
        spec: the spec.
    """

    side: str
    steps: tuple[int | None, ...]
    first: int
    spec: BlockSpec

    @classmethod
    def of(cls, spec: BlockSpec, weight: Tensor, transposed: bool) -> _Factored | None:
        """Return the steps; None where a block is neither whole rows nor whole columns."""
        base, layout = Layout.of(weight), spec.view.layout
        rows, columns = base.shape
        if base.stride != (columns, 1):
            return None
        row, column = divmod(layout.offset - base.offset, columns)
        sides = ("inputs", "outputs") if transposed else ("outputs", "inputs")
        kinds = [_kind(size, step, columns) for size, step in zip(layout.shape, layout.stride, strict=True)]
        by_row = ("row", "column", columns, columns, row, column, sides[0])
        by_column = ("column", "row", rows, 1, column, row, sides[1])
        for own, other, size, step, first, rest, side in (by_row, by_column):
            spanned = [d for d, kind in enumerate(kinds) if kind == other]
            covers = prod(layout.shape[d] for d in spanned) == size and rest == 0
            if spanned and covers and "mixed" not in kinds and all(spec.shape[d] == layout.shape[d] for d in spanned):
                steps = [layout.stride[d] // step if kind == own else 0 for d, kind in enumerate(kinds)]
                return cls(side, tuple(None if d in spanned else n for d, n in enumerate(steps)), first, spec)
        return None

    def spec_on(self, param: Tensor, name: str) -> BlockSpec:
        """Return the same rows of B or of its bias, or the same columns of A."""
        base = Layout.of(param)
        along, across = (base.stride[0], 1) if self.side == "outputs" else (base.stride[-1], base.stride[0])
        rank = 1 if param.ndim == 1 else param.shape[1 if self.side == "outputs" else 0]
        shape, stride, is_placed = [], [], False
        for size, step in zip(self.spec.view.shape, self.steps, strict=True):
            is_rank = step is None and not is_placed
            is_placed = is_placed or is_rank
            shape.append(rank if is_rank else 1 if step is None else size)
            stride.append(across if is_rank else 0 if step is None else step * along)
        view = View(param, shape, stride, base.offset + self.first * along)
        block = [-1 if step is None else n for n, step in zip(self.spec.shape, self.steps, strict=True)]
        return BlockSpec(view, block, name=name, edge=self.spec.edge)


def _kind(size: int, step: int, columns: int) -> str:
    """Return whether a dimension of a view goes along rows, along columns, neither or both."""
    if size == 1:
        return "one"
    return "row" if step % columns == 0 else "column" if abs(step) < columns else "mixed"


def adapted_layers(names: Names) -> dict[int, AdaptedLayer]:
    """Return the layers of a model that have adapters, by the id of their base weight."""
    found = {}
    wrapper: Any
    for wrapper in names.model.modules():
        pairs = getattr(wrapper, "lora_A", None)
        base = wrapper.get_base_layer() if hasattr(wrapper, "get_base_layer") else getattr(wrapper, "base_layer", None)
        # PEFT also adapts parameters of modules with several, such as stacked experts.
        weight = getattr(base, getattr(wrapper, "parameter_name", "weight"), None)
        if isinstance(pairs, nn.ModuleDict) and len(pairs) and isinstance(weight, Tensor):
            found[id(weight)] = AdaptedLayer(names.name_of(weight) or "weight", wrapper, weight)
    return found


def with_adapters(attachment: Attachment, layers: Mapping[int, AdaptedLayer]) -> Attachment:
    """Return an attachment whose blocks include the rows and columns of adapters that are pruned with them.

    Raises:
        PatternError: for adapters that cannot be kept sparse, such as those of DoRA.
    """
    scope = attachment.scope
    touched = list(_touched(scope.blocks(), layers))
    for layer in touched:
        layer.check()
    return replace(attachment, scope=_extended_scope(scope, layers)) if touched else attachment


def _extended_scope(scope: SparseScope, layers: Mapping[int, AdaptedLayer]) -> SparseScope:
    members = [ScopeSpec(_extended(each.block, layers), each.shape, each.name) for each in scope.members()]
    if isinstance(scope, ScopeSpec):
        return members[0]
    return ScopeCoupling(members, [scope.order_of(each) for each in scope.members()], scope.name)


def _extended(block: SparseBlock, layers: Mapping[int, AdaptedLayer]) -> SparseBlock:
    """Return the coupling of blocks with those of their adapters; the block itself if there are none.

    Adapters follow their base weights: slices of them that a traced model has already are replaced.
    """
    factors = {spec: layers[id(spec.param)].factors(spec) for spec in block.blocks() if id(spec.param) in layers}
    added = [(each, spec) for spec, made in factors.items() for each in made]
    if not added:
        return block
    replaced = {id(each.param) for each, _ in added}
    pairs = [*((spec, spec) for spec in block.blocks() if id(spec.param) not in replaced), *added]
    readers = [each for each, source in pairs if source in block.readers()]
    return BlockCoupling([each for each, _ in pairs], [block.order_of(of) for _, of in pairs], block.name, readers)


def _touched(blocks: Iterable[SparseBlock], layers: Mapping[int, AdaptedLayer]) -> Iterator[AdaptedLayer]:
    params = {id(spec.param) for block in blocks for spec in block.blocks()}
    return (layer for key, layer in layers.items() if key in params)


class AdapterWatch:
    """The adapters of a model when it is attached; products that do not factor are masked from now on.

    Blocks that are neither whole rows nor whole columns, as tiles and N:M groups, need the product of an adapter to be
    masked, in its forward pass and in its merge. This stays when the model is detached, so that a merge after training
    keeps the zeros of the base weight.

    Args:
        attachments: what patterns have found.
        names: the model.

    Raises:
        PatternError: for adapters without a place for a mask, which are not those of PEFT.
    """

    def __init__(self, attachments: Iterable[Attachment], names: Names) -> None:
        layers = adapted_layers(names)
        blocks = [block for attachment in attachments for block in attachment.scope.blocks()]
        specs = [spec for block in blocks for spec in block.blocks()]
        self._model, self._weights = names.model, {id(spec.param) for spec in specs}
        for spec in [spec for spec in specs if id(spec.param) in layers]:
            _mask_product(spec, layers[id(spec.param)])
        self._adapters, self._modules = self._now(layers), self._count()

    def _count(self) -> int:
        return sum(1 for _ in self._model.modules())

    def _now(self, layers: Mapping[int, AdaptedLayer]) -> dict[int, list[str]]:
        return {key: layer.adapters for key, layer in layers.items() if key in self._weights}

    def check(self) -> None:
        """Raise a PatternError if adapters were added to pruned weights since; they are modules, which are counted."""
        if self._count() == self._modules:
            return
        layers = adapted_layers(Names(self._model))
        for key, adapters in self._now(layers).items():
            added = [name for name in adapters if name not in self._adapters.get(key, [])]
            if added:
                raise PatternError(
                    f"the adapter {added[0]!r} was added to {layers[key].name} after a Sparsifier was attached: its "
                    "product is not pruned. Add adapters first, then attach"
                )


def _mask_product(spec: BlockSpec, layer: AdaptedLayer) -> None:
    if _Factored.of(spec, layer.weight, layer.is_transposed) is not None:
        return
    variants = getattr(layer.wrapper, "lora_variant", None)
    if not isinstance(variants, dict):
        raise PatternError(
            f"the product of the adapters of {layer.name} cannot be masked: {type(layer.wrapper).__name__} has no "
            "lora_variant. Use LoRA of PEFT 0.16 or newer, or blocks of whole rows or columns"
        )
    for name in layer.adapters:
        variants.setdefault(name, MaskedProduct())
