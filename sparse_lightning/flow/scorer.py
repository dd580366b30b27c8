"""Scorer: run the flow of a criterion on the blocks of scopes, and keep its state between runs."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sparse_lightning.blocks.alike_blocks import AlikeBlocks, CopyRoom
from sparse_lightning.blocks.live_scope import LiveScope
from sparse_lightning.blocks.local_blocks import Fold
from sparse_lightning.blocks.scope import SparseScope
from sparse_lightning.blocks.scope_stack import ScopeStack
from sparse_lightning.blocks.shards import Part, complete
from sparse_lightning.blocks.sparse_block import SparseBlock
from sparse_lightning.blocks.spec import BlockSpec
from sparse_lightning.errors import CheckpointError, FlowError, did_you_mean
from sparse_lightning.flow.criterion import Criterion
from sparse_lightning.flow.finite import all_finite
from sparse_lightning.flow.grid_run import GridRun, parts_of
from sparse_lightning.flow.live_blocks import LiveBlocks
from sparse_lightning.flow.paged import EntryIndex, PagedField, PageTable, shortened
from sparse_lightning.flow.program import Program, trace
from sparse_lightning.flow.pruned_blocks import PrunedBlocks
from sparse_lightning.flow.ragged_blocks import RaggedBlocks, concatenated
from sparse_lightning.flow.sources import Sources
from sparse_lightning.flow.state_kernel import StateKernel
from sparse_lightning.kernels import block_score
from sparse_lightning.kernels.block_score import LOWERINGS, reference
from sparse_lightning.kernels.stage import vanishes

MANY = 1 << 16
"""The blocks from which on a kernel of its own advances the state: for fewer, building it would not pay."""


@dataclass(frozen=True)
class Proposal:
    """The result of a run whose state is not saved yet.

    Attributes:
        scores: for each scope, by name, `(*scope.grid_shape, blocks per scope)`: the form that budgets and methods use.
        saved: the new values of the fields of state, in their dtypes.
        values: all scores in one tensor, `(S,)`, of which `scores` are views.
    """

    scores: dict[str, Tensor]
    saved: dict[str, Tensor]
    values: Tensor


class Scorer:
    """Runs the flow of a criterion on the attached scopes.

    Data flow of a run: the stage of the program reduces the weights of each block to grids. The grids of all blocks
    are concatenated, gathered by scope. The rest of the program runs on them once, with the state of the previous run.
    The new state is written to its pages. The scores stay gathered by scope.

    Args:
        criterion: computes the scores.
        device: of the parameters.
        lowering: "reference", "native", "compiled" or "triton", for all stages; None chooses the fastest.
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
        self._vanishes = vanishes(self.program.stage)
        self.lowering = block_score.check_lowering(lowering, torch.device(device))
        self.seed = seed
        self.runs = 0
        self._device = torch.device(device)
        self._scopes: dict[str, SparseScope] = {}
        self._left: dict[str, LiveScope] = {}
        self.table = PageTable()
        self._blocks: dict[str, SparseBlock] = {}
        self._fields = {name: PagedField(state, self._device) for name, state in criterion.states.items()}
        self._kept_room: list[Tensor] | None = None

    def attach(self, name: str, scope: SparseScope, left: LiveScope | None = None) -> None:
        """Add a scope under a name, with new state at the fill value of each field.

        Args:
            name: of the scope.
            scope: whose blocks are scored.
            left: what is left of them, if units of the model are removed: those that are removed have no weights, and
                their blocks are reduced to zero.
        """
        taken, named = self._blocks, scope.named_blocks(name)
        if name in self._scopes or any(owner in taken for owner in named):
            raise FlowError(f"{name!r} is already attached: detach it first, or use another name")
        if any(block is other for other in taken.values() for block in named.values()):
            raise FlowError(f"a block of {name!r} is already attached under another name: detach that one first")
        live = scope if left is None else left.scope
        for param in live.unique_params():
            if param.device.type != self._device.type:
                raise FlowError(
                    f"{name!r} has a parameter on {param.device}, but the flow was traced for {self._device}: create "
                    "the Scorer with the device of the parameters"
                )
        self._scopes[name] = scope
        self._left |= {} if left is None else {name: left}
        for owner, block in named.items():
            pages = self.table.allocate(owner, block.numblk())
            for field in self._fields.values():
                field.reserve(self.table, pages)
        self._blocks |= named
        self._forget_layout()

    def detach(self, name: str) -> None:
        """Remove a scope and its state."""
        if name not in self._scopes:
            raise FlowError(f"{name!r} is not attached{did_you_mean(name, self._scopes)}")
        self._left.pop(name, None)
        for owner in self._scopes.pop(name).named_blocks(name):
            self.table.free(owner)
            del self._blocks[owner]
        self._forget_layout()

    def _forget_layout(self) -> None:
        self._kept_room = None
        for name in ("_ragged", "_live", "_groups", "_pruned", "_run", "_parts", "_state_kernel"):
            self.__dict__.pop(name, None)

    @cached_property
    def _ragged(self) -> RaggedBlocks:
        """The attached scopes, laid out when they are first scored."""
        return RaggedBlocks(self._scopes, self.table, self._device)

    @cached_property
    def _live(self) -> LiveBlocks:
        """What is left of the blocks in the model."""
        return LiveBlocks(self._ragged, self._left, self.table, self._device)

    @cached_property
    def _groups(self) -> list[list[BlockSpec]]:
        """The specs of all blocks, those that are read in one call together."""
        return [group for stack in self._live.ragged.stacks for group in _alike_specs(stack)]

    @cached_property
    def _pruned(self) -> PrunedBlocks:
        return PrunedBlocks(self._live.ragged)

    def check(self, sources: Sources) -> None:
        """Raise `FlowError` if an input of the flow would be missing in a run."""
        for owner, block in self._live.ragged.blocks.items():
            for param in block.unique_params():
                sources.check(self.program.names, owner, param)

    def score(self, sources: Sources | None = None) -> dict[SparseBlock, Tensor]:
        """Run the flow once, save its state, and return the scores as one grid per attached block."""
        proposal = self.propose(sources)
        self.commit(proposal)
        return self._ragged.scatter(proposal.scores)

    def commit(self, proposal: Proposal) -> None:
        """Save the state of a run for the next run."""
        for name, values in proposal.saved.items():
            self._fields[name].save(self._ragged.places, values)
        self.runs += 1

    def observe(self, sources: Sources | None = None) -> None:
        """Run the flow once and save its state only: what is not finite leaves the state as it was.

        Nothing waits for the device. A criterion without state is not run.
        """
        if not self._blocks or not self._fields:
            return
        run = self._grid_run(sources or Sources())
        self.runs += 1
        if self._state_kernel is not None and self._state_kernel.advance(
            run.reductions(), self._fields, self._ragged.places
        ):
            return
        news = [self._new_state(run, *self._parts[0])] if len(self._parts) == 1 else []
        finite = torch.stack([all_finite(new.values()) for new in news or self._new_states(run)]).all()
        is_known = self._device.type == "cpu" and bool(finite)  # nothing has to wait for a CPU
        for (_, places), new in zip(self._parts, news or self._new_states(run), strict=True):
            for name, values in new.items():
                self._fields[name].save(places, values, None if is_known else finite)

    def propose(self, sources: Sources | None = None) -> Proposal:
        """Run the flow once without saving its state: see `commit`."""
        if not self._blocks:
            return Proposal({}, {}, torch.empty(0))
        run, count = self._grid_run(sources or Sources()), self._ragged.count
        self._kept_room = None  # the proposal may hold it, and until the next observation it would be kept for nothing
        reduced = run.reduced_scores()
        if reduced is not None:
            return Proposal(self._ragged.split(reduced), {}, reduced)
        scores = torch.empty(count, device=self._device)
        saved = {name: self._fields[name].state.empty(count, self._device) for name in self.program.saved()}
        for part, places in self._parts:
            scores[part], new = run.scores(part, self._loaded(places))
            for name, values in new.items():
                saved[name][part] = self._fields[name].state.convert(values)
        return Proposal(self._ragged.split(scores), saved, scores)

    def _grid_run(self, sources: Sources) -> GridRun:
        return GridRun(self.program, self._folds(sources), self._ragged, self._ragged_inputs(sources))

    @cached_property
    def _state_kernel(self) -> StateKernel | None:
        """What advances the state in place, if stages run in C++ and there are many blocks."""
        is_native = self._run is LOWERINGS["native"] and self._ragged.count > MANY
        return StateKernel.of(self.program) if is_native else None

    @cached_property
    def _parts(self) -> list[tuple[slice, EntryIndex]]:
        """The blocks that are computed together, and where their state is."""
        places = self._ragged.places if self._fields else EntryIndex(())
        return [(part, places.part(part)) for part in parts_of(self.program, self._ragged.count, self._device)]

    def _new_states(self, run: GridRun) -> Iterator[dict[str, Tensor]]:
        """Compute the new state of one part after another: as often as it is iterated, so that none has to be kept."""
        return (self._new_state(run, part, places) for part, places in self._parts)

    def _new_state(self, run: GridRun, part: slice, places: EntryIndex) -> dict[str, Tensor]:
        return run.state(part, self._loaded(places))

    def _loaded(self, places: EntryIndex) -> dict[str, Tensor]:
        return {name: field.load(places) for name, field in self._fields.items()}

    def _folds(self, sources: Sources) -> list[Tensor]:
        """Run the stage on the weights of all ranks; return for each fold the values of all blocks, `(S,)`."""
        kinds = [kind for _, kind in self.program.stage.folds]
        if not kinds:
            return []
        parts: list[Part] = []
        room = CopyRoom()
        for specs, grids in zip(self._groups, self._room(self._groups), strict=True):
            self._fold_here(grids, specs, sources, room)
            parts += [(grid, kind, specs[0].param) for grid, kind in zip(grids, kinds, strict=True)]
        whole = iter(complete(parts))
        gathered = [self._gather(stack, whole) for stack in self._live.ragged.stacks]
        folds = [concatenated([values.reshape(-1) for values in fold]) for fold in zip(*gathered, strict=True)]
        return [self._live.widened(fold) for fold in folds]

    def _room(self, groups: Sequence[Sequence[BlockSpec]]) -> Iterator[list[Tensor]]:
        """Allocate the grids of each group, one per fold, all in one buffer: small tensors would fragment the heap.

        Memory that is new costs more than what is written to it, so each run writes over the grids of the one before.
        """
        is_wide = any(reference.accumulation_dtype(specs[0].param.dtype) != torch.float32 for specs in groups)
        like = torch.empty(0, dtype=torch.float64 if is_wide else torch.float32, device=self._device)
        sizes = [len(specs) * specs[0].numblk() for specs in groups]
        kinds = [kind for _, kind in self.program.stage.folds]
        kept = self._kept_room
        if kept and kept[0].dtype == like.dtype:
            rows = [reference.start_over(kind, row) for kind, row in zip(kinds, kept, strict=True)]
        else:
            rows = [reference.start(kind, (sum(sizes),), like) for kind in kinds]
        self._kept_room = rows
        for specs, *grids in zip(groups, *(torch.split(row, sizes) for row in rows), strict=True):
            yield [grid.view(len(specs), *specs[0].grid_shape) for grid in grids]

    def _fold_here(self, grids: Sequence[Tensor], specs: Sequence[BlockSpec], sources: Sources, room: CopyRoom) -> None:
        """Run the stage on the weights of this process, those of alike specs in one call."""
        names, owners = self.program.elements[1:], self._live.ragged.owners
        others = [[sources.element(name, spec.param, owners[id(spec)]) for spec in specs] for name in names]
        zeros = self._pruned.of(specs, sources.pruned) if sources.pruned and self._vanishes else None
        AlikeBlocks(specs, others, zeros).fold_into(grids, self.program.stage, self._run, room)

    def _gather(self, stack: ScopeStack, grids: Iterator[Tensor]) -> list[Tensor]:
        """Combine the next grids over the specs of each block, and gather the blocks by scope: one tensor per fold."""
        kinds = [kind for _, kind in self.program.stage.folds]
        columns = []
        for block in stack.scopes[0].blocks():
            total: list[Tensor] = []
            for spec in block.blocks():
                order = (0, *(d + 1 for d in block.order_of(spec)))
                own = [next(grids).permute(order).float() for _ in kinds]
                pairs = zip(kinds, total, own, strict=True) if total else []
                total = [reference.combine(kind, a, b) for kind, a, b in pairs] or own
            columns.append(total)
        return [stack.gather_stacked(fold) for fold in zip(*columns, strict=True)]

    @cached_property
    def _run(self) -> Fold:
        """The lowering of the stage."""
        return block_score.choose(self._device, self._live.ragged.elements, self.lowering)

    def _ragged_inputs(self, sources: Sources) -> dict[str, Tensor]:
        numbers = {"step": float(sources.step), "target": float(sources.target)}
        found = {name: torch.full((1, 1, 1), x, device=self._device) for name, x in numbers.items()}
        if "random" in self.program.names:
            draws = [self._draw(owner, block.numblk()) for owner, block in self._ragged.blocks.items()]
            found["random"] = self._ragged.join(draws).view(-1, 1, 1)
        if "removal_error" in self.program.names and sources.removal_error is not None:
            errors = [sources.removal_error(block).float() for block in self._live.ragged.blocks.values()]
            found["removal_error"] = self._live.widened(self._live.ragged.join(errors)).view(-1, 1, 1)
        return found

    def _draw(self, owner: str, n: int) -> Tensor:
        """Draw random numbers that depend only on the seed, the run and the owner: the same on all ranks."""
        key = zlib.crc32(f"{self.seed} {self.runs} {owner}".encode())
        return torch.rand(n, generator=torch.Generator().manual_seed(key))

    def forget(self) -> None:
        """Set all state to its fill value."""
        for part, places in self._parts if self._blocks else []:
            for field in self._fields.values():
                field.save(places, field.state.full(part.stop - part.start, self._device))

    def state_dict(self) -> dict[str, Any]:
        """Return the number of runs, and for each field the entries of each block: tensors and numbers only.

        A field whose entries are all equal is saved as one entry.
        """
        fields = {
            name: {owner: shortened(field.load(self.table.places(owner)).cpu()) for owner in self._blocks}
            for name, field in self._fields.items()
        }
        entries = {owner: block.numblk() for owner, block in self._blocks.items()}
        return {"runs": self.runs, "entries": entries, "fields": fields}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict` of a scorer with the same criterion and the same blocks."""
        owners = {owner: block.numblk() for owner, block in self._blocks.items()}
        for name, field in self._fields.items():
            kept = state["fields"].get(name)
            if kept is None or set(kept) != set(owners):
                raise CheckpointError(
                    f"the checkpoint has state {name!r} for {sorted(kept or {})}, not {sorted(owners)}: attach the "
                    "same scopes under the same names"
                )
            for owner, entries in kept.items():
                saved = (state.get("entries", {}).get(owner, len(entries)), *entries.shape[1:])
                if saved != (owners[owner], *field.state.inner) or len(entries) not in (1, owners[owner]):
                    raise CheckpointError(
                        f"the checkpoint has {saved} entries of state {name!r} for {owner!r}, which "
                        f"has {owners[owner]} blocks: it belongs to another model or block shape"
                    )
                if entries.dtype != field.state.dtype:
                    raise CheckpointError(
                        f"the checkpoint has state {name!r} in {entries.dtype}, but the criterion declares "
                        f"{field.state.dtype}: resume with the criterion that it was saved with"
                    )
        for name, field in self._fields.items():
            for owner, entries in state["fields"][name].items():
                whole = entries.to(self._device).expand(owners[owner], *field.state.inner)
                field.save(self.table.places(owner), whole)
        self.runs = int(state["runs"])


def _alike_specs(stack: ScopeStack) -> Iterator[list[BlockSpec]]:
    """Yield the specs that stand at the same place in each scope of a stack."""
    listed = [[spec for block in scope.blocks() for spec in block.blocks()] for scope in stack.scopes]
    yield from (list(specs) for specs in zip(*listed, strict=True))
