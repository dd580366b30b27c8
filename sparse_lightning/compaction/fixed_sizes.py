"""Fixed sizes: batches and sequences that a traced program cannot vary, and a warning of them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.export import ExportedProgram

from sparse_lightning.errors import FixedSizeWarning
from sparse_lightning.graph.call import plain_sizes

DIMENSIONS = ("batch", "sequence")
"""The names of the first dimensions of inputs, which may vary."""


def warn_of_fixed_sizes(program: ExportedProgram, name: str) -> None:
    """Warn once of the batches and sequences that a program takes in one size only.

    Args:
        program: of the model.
        name: of the model.
    """
    found = list(_fixed(program))
    if not found:
        return
    listed = "; ".join(f"{tensor}, dimension {axis} ({DIMENSIONS[axis]}): {size}" for tensor, axis, size in found)
    ones = [size for *_, size in found if size == 1]
    warnings.warn(
        f"the program of {name} takes some inputs in one size only: {listed}. torch.export traces these as fixed, "
        "since the code of the model computes with them: export with the sizes of production, or change that code"
        f"{'. A size of 1 is always fixed: pass inputs in which it is 2 or more' if ones else ''}",
        FixedSizeWarning,
        stacklevel=3,
    )


def _fixed(program: ExportedProgram) -> Iterator[tuple[str, int, int]]:
    """Yield the input, dimension and size of each batch and sequence that is fixed."""
    of_layers = {size for tensor in program.state_dict.values() for size in tensor.shape}
    names = set(program.graph_signature.user_inputs)
    for node in program.graph.find_nodes(op="placeholder"):
        tensor = node.meta.get("val")
        if node.name in names and isinstance(tensor, Tensor):
            sizes = [size if isinstance(size, int) else None for size in plain_sizes(tensor)]
            of_numbers = tensor.is_floating_point() or tensor.is_complex()
            for axis in _should_vary(sizes, of_numbers, of_layers):
                if (size := sizes[axis]) is not None:
                    yield node.name, axis, size


def _should_vary(sizes: Sequence[int | None], of_numbers: bool, of_layers: set[int]) -> list[int]:
    """Return the dimensions that are a batch or a sequence; features and channels have the sizes of layers.

    Args:
        sizes: of an input; None for those that vary.
        of_numbers: whether it holds floating-point numbers, not tokens or a mask.
        of_layers: the sizes of all parameters.
    """
    batch = [0] if len(sizes) > of_numbers else []  # a vector of numbers is one example
    if len(sizes) == 2 and not of_numbers:
        return [*batch, 1]
    if len(sizes) not in (2, 3):
        return batch
    flattened = math.prod(size or 1 for size in sizes[1:])
    return batch if {sizes[1], flattened} & of_layers else [*batch, 1]
