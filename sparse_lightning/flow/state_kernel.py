"""StateKernel: the state of a flow is advanced where it lies, without copies of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_lightning.flow.context import Node, Value
from sparse_lightning.flow.ops import Elementwise, Load, Save
from sparse_lightning.flow.paged import EntryIndex, PagedField
from sparse_lightning.flow.program import Program
from sparse_lightning.kernels.entry_steps import EntrySteps
from sparse_lightning.kernels.stage import Ref, Step


@dataclass(frozen=True)
class StateKernel:
    """The operations of a program that state depends on, as one kernel.

    Attributes:
        loaded: the names of the fields of state that it reads.
        saved: the names of those that it writes.
        steps: the kernel; its inputs are the reductions of the program, then the fields.
    """

    loaded: tuple[str, ...]
    saved: tuple[str, ...]
    steps: EntrySteps

    @classmethod
    def of(cls, program: Program) -> StateKernel | None:
        """Return the kernel; None unless state is computed from reductions, elementwise and in fp32."""
        loads = [node for node in program.saving if isinstance(node.op, Load)]
        saves = [node for node in program.saving if isinstance(node.op, Save)]
        others = [node for node in program.saving if not isinstance(node.op, (Load, Save))]
        if not saves or not all(map(_is_simple, others)) or not all(map(_is_single, program.saving)):
            return None
        given = [node.output.id for node in (*program.reductions, *loads) if node.output is not None]
        refs = {value: Ref(i) for i, value in enumerate(given)}
        steps: list[Step] = []
        for node in others:
            if not refs.keys() >= set(node.needs()):  # an input of another kind
                return None
            steps.append(_step(node, refs))
            refs[node.output.id] = Ref(len(given) + len(steps) - 1)  # type: ignore[union-attr]
        sources, fields = zip(*(_values(node.inputs) for node in saves), strict=True)
        if not refs.keys() >= {source.id for source in sources}:
            return None
        kernel = EntrySteps(len(given), tuple(steps), tuple(refs[source.id] for source in sources))
        loaded = tuple(field.name for node in loads for field in _values(node.inputs))
        return cls(loaded, tuple(field.name for field in fields), kernel)

    def advance(self, reductions: Sequence[Tensor], fields: Mapping[str, PagedField], places: EntryIndex) -> bool:
        """Compute the new state and write it if all of it is finite; return False if there is no kernel for it.

        Args:
            reductions: the finished ones of the program, `(S,)`.
            fields: of state, by name.
            places: of the S entries.
        """
        if isinstance(places.found, Tensor) or not all(r.dtype == torch.float32 for r in reductions):
            return False
        is_finite = True
        for writes in (False, True):
            begin = 0
            for start, end in places.found:
                parts = [reduction[begin : begin + end - start].contiguous() for reduction in reductions]
                begin += end - start
                inputs = [*parts, *(fields[name].buffer[start:end] for name in self.loaded)]
                found = self.steps.run(inputs, [fields[name].buffer[start:end] for name in self.saved], writes)
                if found is None:
                    return False
                is_finite = is_finite and found
            if not is_finite:
                return True
        return True


def _values(inputs: Sequence[Value | float]) -> list[Value]:
    return [value for value in inputs if isinstance(value, Value)]


def _is_simple(node: Node) -> bool:
    """Whether an operation has the same bits in the kernel as in torch, which rounds some others twice."""
    if not isinstance(node.op, Elementwise) or not node.op.has_element_rule():
        return False
    is_reciprocal = node.op.operation == "div" and not isinstance(node.inputs[0], Value)
    return node.op.operation != "sqrt" and not is_reciprocal


def _is_single(node: Node) -> bool:
    """Whether all values of a node are one number per block in fp32, or a condition."""
    values = _values([*node.inputs, *([node.output] if node.output is not None else [])])
    return all(v.dtype in (torch.float32, torch.bool) and v.inner == (1, 1) for v in values)


def _step(node: Node, refs: Mapping[int, Ref]) -> Step:
    assert isinstance(node.op, Elementwise)
    return Step(node.op.operation, tuple(refs[x.id] if isinstance(x, Value) else float(x) for x in node.inputs))
