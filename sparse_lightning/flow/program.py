"""Program: a traced flow, split into what runs on elements and what runs on grids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparse_lightning.errors import FlowError
from sparse_lightning.flow.context import FORMAT, Context, Node, Value
from sparse_lightning.flow.end_to_end import EndToEnd
from sparse_lightning.flow.inputs import Inputs
from sparse_lightning.flow.ops import BlockReduction, Elementwise, Grouped, Load, Save
from sparse_lightning.kernels.block_score.stage import Ref, Stage, Step

if TYPE_CHECKING:
    from sparse_lightning.flow.criterion import Criterion


def trace(criterion: Criterion, device: torch.device | str = "cpu") -> Context:
    """Call the flow of a criterion once with symbolic values and record what it does."""
    context = Context(torch.device(device))
    for name, state in criterion.states.items():
        context.fields[name] = context.value(name, FORMAT.PAGED, tuple(state.inner))
    with context.tracing():
        result: object = criterion.flow(Inputs(context))
    if not isinstance(result, Value) or result.format is not FORMAT.RAGGED or result.inner != (1, 1):
        raise FlowError(
            f"the flow of {type(criterion).__name__} must give one number for each block (RAGGED, inner shape "
            f"[1, 1]), not {result!r}: reduce elements with Sum, Mean, Max, Min or L2Norm"
        )
    if result.dtype == torch.bool:
        raise FlowError(f"the flow of {type(criterion).__name__} gives the condition {result}: choose with Where")
    context.result = result
    return context


@dataclass(frozen=True)
class Program:
    """A flow ready to run.

    Attributes:
        elements: the names of the inputs that have one entry for each weight, the weight itself first.
        stage: what is computed on them and folded over each block.
        reductions: the nodes that the folds of the stage belong to.
        nodes: what runs on grids after that, in order.
        context: the trace.
    """

    elements: tuple[str, ...]
    stage: Stage
    reductions: tuple[Node, ...]
    nodes: tuple[Node, ...]
    context: Context

    @classmethod
    def of(cls, context: Context) -> Program:
        """Split the live nodes of a trace."""
        live = context.live_nodes()
        used = {i for node in live for i in node.needs()}
        asked = [n for n, v in context.inputs.items() if v.format is FORMAT.ELEMENT and v.id in used and n != "weight"]
        elements = ("weight", *asked)
        refs = {context.inputs[name].id: Ref(i) for i, name in enumerate(elements) if name in context.inputs}
        steps: list[Step] = []
        folds = []
        reductions = []

        def add(operation: str, arguments: tuple[Ref | float, ...]) -> Ref:
            steps.append(Step(operation, arguments))
            return Ref(len(elements) + len(steps) - 1)

        for node in live:
            arguments = tuple(refs.get(x.id, Ref(0)) if isinstance(x, Value) else float(x) for x in node.inputs)
            if isinstance(node.op, BlockReduction) and isinstance(arguments[0], Ref):
                folded = add(node.op.prepares, arguments) if node.op.prepares else arguments[0]
                folds.append((folded, node.op.kind))
                reductions.append(node)
            elif isinstance(node.op, Elementwise) and node.output is not None and node.output.format is FORMAT.ELEMENT:
                refs[node.output.id] = add(node.op.operation, arguments)
        rest = tuple(n for n in live if n not in reductions and (n.output is None or n.output.id not in refs))
        return cls(elements, Stage(len(elements), tuple(steps), tuple(folds)), tuple(reductions), rest, context)

    def names(self) -> set[str]:
        """All inputs that the program needs, by name; the weight is always there."""
        used = {i for node in (*self.reductions, *self.nodes, *self.context.live_nodes()) for i in node.needs()}
        result = self.context.result
        return {n for n, v in self.context.inputs.items() if v.id in used or v is result} | {"weight"}

    def run_grids(
        self,
        folded: list[Tensor],
        blocks: EndToEnd,
        inputs: Mapping[str, Tensor],
        loaded: Mapping[str, Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Everything after the folds: the scores `(S,)`, and what each field of state is to keep.

        Args:
            folded: for each fold the grids of all blocks end to end, `(S,)`.
            blocks: the blocks that stand end to end, asked for their sizes and groups where the program needs them.
            inputs: the ragged inputs by name, each `(S, 1, 1)` or one value `(1, 1, 1)`.
            loaded: what the fields of state hold from the previous run, each `(S, D0, D1)`.
        """
        count = blocks.count
        values: dict[int, Tensor] = {v.id: inputs[n] for n, v in self.context.inputs.items() if n in inputs}
        saved: dict[str, Tensor] = {}
        for node, grid in zip(self.reductions, folded, strict=True):
            assert isinstance(node.op, BlockReduction)
            assert node.output is not None
            values[node.output.id] = node.op.finish(grid, blocks).view(-1, 1, 1)
        for node in self.nodes:
            if isinstance(node.op, Save):
                source, kept = node.inputs
                assert isinstance(source, Value)
                assert isinstance(kept, Value)
                saved[kept.name] = values[source.id].expand(count, *kept.inner)
                continue
            assert node.output is not None
            if isinstance(node.op, Load):
                [kept] = node.inputs
                assert isinstance(kept, Value)
                values[node.output.id] = loaded[kept.name]
                continue
            arguments: list[Any] = [values[x.id] if isinstance(x, Value) else float(x) for x in node.inputs]
            if isinstance(node.op, Grouped):
                [x] = arguments
                assert isinstance(x, Tensor)
                arguments = [x.expand(count, *x.shape[1:]), blocks.groups[node.op.per]]
            values[node.output.id] = node.op.execute(*arguments)
        assert self.context.result is not None
        scores = values[self.context.result.id].expand(count, 1, 1)
        return scores.reshape(-1).contiguous(), saved  # a number for each block, also where all have the same
