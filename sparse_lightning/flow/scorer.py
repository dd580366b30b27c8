"""Scorer: runs the flow of a criterion on the blocks of scopes, and keeps its state from run to run."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparse_lightning.block import BlockSpec
from sparse_lightning.distributed import Part, complete
from sparse_lightning.errors import CheckpointError, FlowError
from sparse_lightning.flow.criterion import Criterion
from sparse_lightning.flow.end_to_end import EndToEnd, owners
from sparse_lightning.flow.paged import PagedField, PageTable
from sparse_lightning.flow.program import Program, trace
from sparse_lightning.flow.sources import Sources
from sparse_lightning.kernels import block_score
from sparse_lightning.kernels.block_score import reference
from sparse_lightning.nearest import did_you_mean
from sparse_lightning.scope import SparseScope
from sparse_lightning.sparse_block import SparseBlock


@dataclass(frozen=True)
class Proposal:
    """A run that has not been saved: the scores of each block, and what the flow wants in its fields of state."""

    scores: dict[SparseBlock, Tensor]
    saved: dict[str, Tensor]


class Scorer:
    """A criterion at work on the scopes that are attached to it.

    Data flow of a run: for each block the elements of its specs go through the program's stage into grids; the
    grids of all blocks stand end to end; the rest of the program runs on them once, with the state of the
    previous run; what it saves is written to its pages; the scores come back as a grid for each block.

    Args:
        criterion: what computes the scores.
        device: where the parameters live.
        lowering: "reference", "compiled" or "triton" runs all stages that way; None chooses by what pays.
        seed: of the random numbers, the same on all ranks.

    Example:
        >>> from sparse_lightning import BlockSpec, ScopeSpec
        >>> from sparse_lightning.criteria import Magnitude
        >>> weights = BlockSpec(torch.tensor([[3.0, 4.0, 0.0, 1.0]]), (1, 2))
        >>> scorer = Scorer(Magnitude(p=2))
        >>> scorer.attach("fc", ScopeSpec(weights))
        >>> scorer.score()[weights]
        tensor([[5., 1.]])
    """

    def __init__(
        self,
        criterion: Criterion,
        device: torch.device | str = "cpu",
        lowering: str | None = None,
        seed: int = 0,
    ) -> None:
        self.criterion = criterion
        self.program = Program.of(trace(criterion, device))
        self.lowering = block_score.check_lowering(lowering)
        self.seed = seed
        self.runs = 0
        self._device = torch.device(device)
        self._scopes: dict[str, SparseScope] = {}
        self._table = PageTable()
        self._end_to_end = EndToEnd({}, self._table, self._device)
        self._fields = {name: PagedField(state, self._device) for name, state in criterion.states.items()}

    def attach(self, name: str, scope: SparseScope) -> None:
        """Add a scope under a name; its state begins at each field's fill."""
        taken = self._end_to_end.blocks
        if name in self._scopes or any(owner in taken for owner, _ in owners(name, scope)):
            raise FlowError(f"{name!r} is attached already: detach it first, or give another name")
        if any(block is other for other in taken.values() for block in scope.blocks()):
            raise FlowError(f"a block of {name!r} is attached already under another name")
        for param in scope.parameters():
            if param.device.type != self._device.type:
                raise FlowError(f"{name!r} has a parameter on {param.device}, the flow was traced for {self._device}")
        self._scopes[name] = scope
        for owner, block in owners(name, scope):
            pages = self._table.take(owner, block.numblk())
            for field in self._fields.values():
                field.reserve(self._table, pages)
        self._end_to_end = EndToEnd(self._scopes, self._table, self._device)

    def detach(self, name: str) -> None:
        """Take a scope out; its pages become free."""
        if name not in self._scopes:
            raise FlowError(f"{name!r} is not attached{did_you_mean(name, self._scopes)}")
        for owner, _ in owners(name, self._scopes.pop(name)):
            self._table.release(owner)
        self._end_to_end = EndToEnd(self._scopes, self._table, self._device)

    def check(self, sources: Sources) -> None:
        """Raise before training where a run would not find what the flow asks for."""
        for owner, block in self._end_to_end.blocks.items():
            for param in block.parameters():
                sources.check(self.program.names(), owner, param)

    def score(self, sources: Sources | None = None) -> dict[SparseBlock, Tensor]:
        """Run the flow once; the scores of each attached block as its grid."""
        proposal = self.propose(sources)
        self.commit(proposal)
        return proposal.scores

    def commit(self, proposal: Proposal) -> None:
        """Save what a run wants to save: the next run sees it."""
        for name, values in proposal.saved.items():
            self._fields[name].save(self._end_to_end.places, values)
        self.runs += 1

    def propose(self, sources: Sources | None = None) -> Proposal:
        """Run the flow once without a trace: its state stays as it was until `commit`."""
        sources, all_blocks = sources or Sources(), self._end_to_end
        if not all_blocks.blocks:
            return Proposal({}, {})
        ragged = [all_blocks.join(grids) for grids in zip(*self._folds(sources), strict=True)]
        loaded = {name: field.load(all_blocks.places) for name, field in self._fields.items()}
        scores, saved = self.program.run_grids(ragged, all_blocks, self._ragged_inputs(sources), loaded)
        return Proposal(all_blocks.split(scores), saved)

    def _folds(self, sources: Sources) -> list[list[Tensor]]:
        """The stage on all elements, whoever holds them: for each block and each fold a grid."""
        kinds = [kind for _, kind in self.program.stage.folds]
        blocks = self._end_to_end.blocks
        specs = [(owner, spec) for owner, block in blocks.items() for spec in block.blocks()] if kinds else []
        parts: list[Part] = []
        for (owner, spec), grids in zip(specs, self._room([spec for _, spec in specs]), strict=True):
            self._fold_here(grids, owner, spec, sources)
            parts += [(grid, kind, spec.param) for grid, kind in zip(grids, kinds, strict=True)]
        whole = iter(complete(parts))
        return [self._over_specs(block, whole) for block in blocks.values()]

    def _room(self, specs: Sequence[BlockSpec]) -> Iterator[list[Tensor]]:
        """For each spec a grid for each fold, all in one piece of memory: small ones would leave holes in the heap."""
        is_wide = any(reference.accumulation_dtype(spec.param.dtype) != torch.float32 for spec in specs)
        like = torch.empty(0, dtype=torch.float64 if is_wide else torch.float32, device=self._device)
        sizes = [spec.numblk() for spec in specs]
        rows = [reference.start(kind, (sum(sizes),), like) for _, kind in self.program.stage.folds]
        for spec, *grids in zip(specs, *(torch.split(row, sizes) for row in rows), strict=True):
            yield [grid.view(spec.grid_shape) for grid in grids]

    def _fold_here(self, grids: Sequence[Tensor], owner: str, spec: BlockSpec, sources: Sources) -> None:
        """The stage on the elements that this process holds, into a grid for each fold."""
        others = [sources.element(name, spec.param, owner) for name in self.program.elements[1:]]
        spec.part(None, others).fold_into(grids, self.program.stage, self._run())

    def _over_specs(self, block: SparseBlock, grids: Iterator[Tensor]) -> list[Tensor]:
        """For each fold the next grids, one for each spec of a block, combined in the block's order."""
        kinds = [kind for _, kind in self.program.stage.folds]
        total: list[Tensor] = []
        for spec in block.blocks() if kinds else []:
            own = [next(grids).permute(block.order_of(spec)).float() for _ in kinds]
            joined = zip(kinds, total, own, strict=True) if total else []
            total = [reference.combine(kind, a, b) for kind, a, b in joined] or own
        return total

    def _run(self) -> Callable[..., list[Tensor]]:
        return block_score.choose(self._device, self._end_to_end.elements, self.lowering)

    def _ragged_inputs(self, sources: Sources) -> dict[str, Tensor]:
        numbers = {"step": float(sources.step), "target": float(sources.target)}
        found = {name: torch.full((1, 1, 1), x, device=self._device) for name, x in numbers.items()}
        if "random" in self.program.names():
            draws = [self._draw(owner, block.numblk()) for owner, block in self._end_to_end.blocks.items()]
            found["random"] = self._end_to_end.join(draws).view(-1, 1, 1)
        return found

    def _draw(self, owner: str, n: int) -> Tensor:
        """Random numbers that depend on the seed, the run and the owner alone: alike on all ranks."""
        key = zlib.crc32(f"{self.seed} {self.runs} {owner}".encode())
        return torch.rand(n, generator=torch.Generator().manual_seed(key))

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers only: the number of runs, and for each field the entries of each block."""
        fields = {
            name: {owner: field.load(self._table.places(owner)).cpu() for owner in self._end_to_end.blocks}
            for name, field in self._fields.items()
        }
        return {"runs": self.runs, "fields": fields}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave, for the same criterion and the same blocks."""
        owners = {owner: block.numblk() for owner, block in self._end_to_end.blocks.items()}
        for name, field in self._fields.items():
            kept = state["fields"].get(name)
            if kept is None or set(kept) != set(owners):
                raise CheckpointError(
                    f"the checkpoint has state {name!r} for {sorted(kept or {})}, not {sorted(owners)}"
                )
            for owner, entries in kept.items():
                if tuple(entries.shape) != (owners[owner], *field.state.inner):
                    raise CheckpointError(
                        f"the checkpoint has {tuple(entries.shape)} entries of state {name!r} for {owner!r}, which "
                        f"has {owners[owner]} blocks: it belongs to another model or block shape"
                    )
        for name, field in self._fields.items():
            for owner, entries in state["fields"][name].items():
                field.save(self._table.places(owner), entries.to(self._device))
        self.runs = int(state["runs"])
