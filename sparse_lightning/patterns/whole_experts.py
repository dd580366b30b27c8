"""Experts: whole experts of a mixture, pruned together with what routes to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from sparse_lightning.blocks.scope import ScopeCoupling
from sparse_lightning.errors import PatternError
from sparse_lightning.layout import Layout
from sparse_lightning.patterns.coupled import Piece, couple
from sparse_lightning.patterns.layer import Layer, find_by_text, partner
from sparse_lightning.patterns.names import Names, nearest
from sparse_lightning.patterns.pattern import Attachment, Pattern


@dataclass(frozen=True)
class Experts(Pattern):
    """Experts of a mixture-of-experts layer: all weights of an expert, with its row of the router and its bias.

    The experts of one layer compete in one scope. They are either the children of a module list, or slices of weights
    that are stacked, `(experts, …)`, as in models of transformers. Modules and routers are paired by the text that the
    wildcards match.

    A pruned expert computes zero. `compact` removes it where that leaves the outputs as they are: where each expert has
    a gate of its own, such as a sigmoid. A softmax over all experts still gives a pruned one, with its logit of zero, a
    share of the sum, and a token may choose it by its number: there `compact` removes the neurons of listed experts.

    Args:
        match: a glob, or a regular expression after `re:`, of the modules that contain the experts.
        router: a glob of the layers with one output for each expert.

    Example:
        >>> moe = nn.ModuleDict(
        ...     {"experts": nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]), "gate": nn.Linear(4, 3)}
        ... )
        >>> [found] = Experts("experts", router="gate").resolve(Names(moe))
        >>> found.name, found.scope.numblk_per_scope()
        ('experts (experts)', 3)
        >>> [spec.name for spec in found.scope.blocks()[0].blocks()]
        ['experts.0.weight', 'experts.0.bias', 'gate.weight', 'gate.bias']
    """

    match: str
    router: str

    label: ClassVar[str] = "experts"

    def resolve(self, names: Names) -> list[Attachment]:
        """Return one attachment for each layer of experts."""
        found, routers = names.find_modules(self.match), find_by_text(self, names, self.router)
        if not found:
            raise PatternError(f"{self}: {self.match!r} matches no module{nearest(self.match, names.modules)}")
        made = []
        for name, text in found.items():
            owner = Layer(name, next(iter(routers.values())).weight)
            router = partner(self, owner, text, "router", routers)
            is_list = isinstance(names.modules[name], nn.ModuleList | nn.ModuleDict)
            made.append(self._listed(names, name, router) if is_list else self._stacked(names, name, router))
        return made

    def _stacked(self, names: Names, name: str, router: Layer) -> Attachment:
        """Return the scope of experts whose weights are slices of stacked ones."""
        experts = router.rows().shape[0]
        own = {key: param for key, param in names.parameters.items() if key.startswith(f"{name}.")}
        if not own or any(param.ndim < 2 or param.shape[0] != experts for param in own.values()):
            shapes = ", ".join(f"{key} {tuple(param.shape)}" for key, param in own.items()) or "none"
            raise PatternError(
                f"{self}: {name} has the parameters {shapes}, which are not stacks of the {experts} experts of "
                f"{router.name}: name a module list of experts, or one whose parameters are (experts, …)"
            )
        pieces = [Piece(key, param, Layout.of(param)) for key, param in own.items()]
        return couple(self, f"{name} ({self.label})", [*pieces, *_routes(router, 0, experts)])

    def _listed(self, names: Names, name: str, router: Layer) -> Attachment:
        """Return the scope of experts that are modules of their own."""
        children = [child for child, _ in names.modules[name].named_children()]
        if len(children) != router.rows().shape[0]:
            raise PatternError(
                f"{self}: {name} has {len(children)} experts, but {router.name} of shape {tuple(router.weight.shape)} "
                f"routes to {router.rows().shape[0]}: name the router of these experts"
            )
        scopes = []
        for i, child in enumerate(children):
            own = {key: param for key, param in names.parameters.items() if key.startswith(f"{name}.{child}.")}
            pieces = [Piece(key, p, Layout.of(p).reshape((1, *p.shape))) for key, p in own.items()]
            scopes += couple(self, f"{name}.{child}", [*pieces, *_routes(router, i, i + 1)]).scope.members()
        return Attachment(f"{name} ({self.label})", self.label, ScopeCoupling(scopes, name=f"{name} ({self.label})"))


def _routes(router: Layer, first: int, last: int) -> list[Piece]:
    """Return what routes to some of the experts."""
    pieces = [Piece(router.name, router.weight, router.rows().slice(0, first, last))]
    if router.bias is not None and router.bias_name is not None:
        pieces.append(Piece(router.bias_name, router.bias, Layout.of(router.bias).slice(0, first, last)))
    return pieces
