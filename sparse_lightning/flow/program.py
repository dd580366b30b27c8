"""Program: a traced flow, split into a stage on elements and a stage on grids."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from sparse_lightning.errors import FlowError
from sparse_lightning.flow.context import FORMAT, Context, Node, Value, depended_on
from sparse_lightning.flow.criterion import Criterion
from sparse_lightning.flow.inputs import Inputs
from sparse_lightning.flow.ops import BlockReduction, Elementwise, Save
from sparse_lightning.kernels.stage import Ref, Stage, Step


def trace(criterion: Criterion, device: torch.device | str = "cpu") -> Context:
    """Call the flow of a criterion once with symbolic values, and return the recorded operations."""
    context = Context(torch.device(device))
    for name, state in criterion.states.items():
        context.fields[name] = context.value(name, FORMAT.PAGED, tuple(state.inner), state.dtype)
    with context.tracing():
        result: object = criterion.flow(Inputs(context))
    if not isinstance(result, Value) or result.format is not FORMAT.RAGGED or result.inner != (1, 1):
        raise FlowError(
            f"the flow of {type(criterion).__name__} must return one number per block (RAGGED, inner shape "
            f"[1, 1]), not {result!r}: reduce elements with Sum, Mean, Max, Min or L2Norm"
        )
    if result.dtype == torch.bool:
        raise FlowError(
            f"the flow of {type(criterion).__name__} returns the condition {result}, not a number: convert it with "
            "Where"
        )
    context.result = result
    return context


@dataclass(frozen=True)
class Program:
    """A flow that is ready to run.

    Attributes:
        elements: the names of the inputs with one entry per weight, the weight itself first.
        stage: the operations on them, and the folds over each block.
        reductions: the node of each fold of the stage.
        nodes: the operations that run on grids after that, in order: see `GridRun`.
        saving: those of them that state depends on.
        context: the trace.
    """

    elements: tuple[str, ...]
    stage: Stage
    reductions: tuple[Node, ...]
    nodes: tuple[Node, ...]
    saving: tuple[Node, ...]
    context: Context

    @classmethod
    def of(cls, context: Context) -> Program:
        """Split the live nodes of a trace into the two stages."""
        live = context.live_nodes()
        used = {i for node in live for i in node.needs()}
        others = [n for n, v in context.inputs.items() if v.format is FORMAT.ELEMENT and v.id in used and n != "weight"]
        elements = ("weight", *others)
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
        stage = Stage(len(elements), tuple(steps), tuple(folds))
        return cls(elements, stage, tuple(reductions), rest, tuple(depended_on(set(), rest)), context)

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all inputs that the program reads; the weight is always one of them."""
        used = {i for node in self.context.live_nodes() for i in node.needs()}
        result = self.context.result
        return frozenset({n for n, v in self.context.inputs.items() if v.id in used or v is result} | {"weight"})

    def saved(self) -> list[str]:
        """Return the names of the fields of state that a run saves."""
        kept = [node.inputs[1] for node in self.nodes if isinstance(node.op, Save)]
        return [field.name for field in kept if isinstance(field, Value)]
