"""GridRun: what a program computes from the folds of all blocks, and from the state of the previous run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_lightning.flow.context import Node, Value
from sparse_lightning.flow.ops import BlockReduction, Elementwise, Grouped, Load, Save
from sparse_lightning.flow.program import Program
from sparse_lightning.flow.ragged_blocks import RaggedBlocks

TOGETHER = {"cpu": 1 << 16}
"""The most blocks that are computed at once, by type of device: what lies between operations stays in a cache."""

MOST = 1 << 24
"""The same on other devices, where it bounds the memory."""


def parts_of(program: Program, count: int, device: torch.device) -> list[slice]:
    """Return the ranges of blocks that are computed one after another; one, if blocks are compared with others."""
    is_pointwise = all(isinstance(node.op, (Elementwise, Load, Save)) for node in program.nodes)
    size = TOGETHER.get(device.type, MOST) if is_pointwise else max(1, count)
    return [slice(begin, min(begin + size, count)) for begin in range(0, max(1, count), size)]


class GridRun:
    """The operations of a program after its folds. Values have the dtypes of the trace.

    Args:
        program: the flow.
        folded: for each fold, the grids of all blocks concatenated, `(S,)`.
        blocks: the blocks in this order, with their sizes and groups.
        inputs: the ragged inputs by name, each `(S, 1, 1)`, or `(1, 1, 1)` for one number.
    """

    def __init__(
        self, program: Program, folded: Sequence[Tensor], blocks: RaggedBlocks, inputs: Mapping[str, Tensor]
    ) -> None:
        self._program, self._blocks = program, blocks
        self._values = {v.id: inputs[n] for n, v in program.context.inputs.items() if n in inputs}
        for node, grid in zip(program.reductions, folded, strict=True):
            assert isinstance(node.op, BlockReduction)
            assert node.output is not None
            self._values[node.output.id] = node.op.finish(grid, blocks).view(-1, 1, 1)

    def reductions(self) -> list[Tensor]:
        """Return the finished reductions of the program, `(S,)`."""
        outputs = [node.output for node in self._program.reductions]
        return [self._values[output.id].view(-1) for output in outputs if output is not None]

    def reduced_scores(self) -> Tensor | None:
        """Return the scores of all blocks if a reduction gives them, without a copy; None otherwise."""
        result = self._program.context.result
        assert result is not None
        reduced = {node.output.id for node in self._program.reductions if node.output is not None}
        is_reduced = result.id in reduced and not self._program.saved()
        scores = self._values[result.id].view(-1) if is_reduced else None
        return scores if scores is not None and scores.dtype == torch.float32 else None

    def state(self, part: slice, loaded: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the new values of each field of state, `(n, D0, D1)`, without the scores.

        Args:
            part: of the blocks, one of `parts_of`.
            loaded: the values of the fields from the previous run, each `(n, D0, D1)`.
        """
        return self._run(self._program.saving, part, loaded)[1]

    def scores(self, part: slice, loaded: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the scores `(n,)`, in fp32 whatever they are computed in, and the new values of each field."""
        values, saved = self._run(self._program.nodes, part, loaded)
        assert self._program.context.result is not None
        scores = values[self._program.context.result.id].float().expand(part.stop - part.start, 1, 1)
        return scores.reshape(-1).contiguous(), saved  # one number per block, even if all are the same

    def _run(
        self, nodes: Sequence[Node], part: slice, loaded: Mapping[str, Tensor]
    ) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
        count = part.stop - part.start
        values = {i: value if len(value) == 1 else value[part] for i, value in self._values.items()}
        saved: dict[str, Tensor] = {}
        for node in nodes:
            if isinstance(node.op, Save):
                source, kept = node.inputs
                assert isinstance(source, Value)
                assert isinstance(kept, Value)
                saved[kept.name] = values[source.id].expand(count, *kept.inner)
                continue
            assert node.output is not None
            values[node.output.id] = self._result(node, values, count, loaded)
        return values, saved

    def _result(self, node: Node, values: Mapping[int, Tensor], count: int, loaded: Mapping[str, Tensor]) -> Tensor:
        assert node.output is not None
        if isinstance(node.op, Load):
            [kept] = node.inputs
            assert isinstance(kept, Value)
            return loaded[kept.name]
        arguments: list[Any] = node.arguments(values)
        if isinstance(node.op, Grouped):
            [x] = arguments
            assert isinstance(x, Tensor)
            arguments = [x.expand(count, *x.shape[1:]), self._blocks.groups[node.op.per]]
        result: Tensor = node.op.execute(*arguments).to(node.output.dtype)
        return result
