"""tile_linear: a linear layer that skips the zero tiles of its weight, as an operator of torch.

A weight `(out_features, in_features)` is divided into tiles; those that are not zero are kept:

- `tiles`: `(kept, tile_in, tile_out)`, row by row of the grid of tiles; tiles at the edge are filled with zeros;
- `pointers`: int32, `(rows of tiles + 1,)`: the tiles of row `i` are `pointers[i]` to `pointers[i + 1]`;
- `columns`: int32, `(kept,)`: the column of each kept tile.

The operator `sparse_lightning::tile_linear` has a gradient for its inputs, not for the weight. On a CPU, C++ computes
it, or products of torch where there is no compiler; on a GPU, Triton does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from sparse_lightning.kernels.availability import takes_triton
from sparse_lightning.kernels.tile_linear import gathered, native, reference

SCHEMA = "(Tensor inputs, Tensor tiles, Tensor pointers, Tensor columns, Tensor? bias, SymInt out_features) -> Tensor"


def tile_linear(
    inputs: Tensor, tiles: Tensor, pointers: Tensor, columns: Tensor, bias: Tensor | None, out_features: int
) -> Tensor:
    """Return `inputs @ weight.T + bias` for a weight that is given by its kept tiles.

    Args:
        inputs: `(…, in_features)`, any strides.
        tiles: the kept tiles, of the dtype of the inputs.
        pointers: where each row of tiles begins.
        columns: the column of each tile.
        bias: `(out_features,)`, or None.
        out_features: the size of the last dimension of the outputs.

    Example:
        >>> tiles, pointers = torch.ones(1, 2, 2), torch.tensor([0, 0, 1], dtype=torch.int32)
        >>> tile_linear(torch.arange(4.0), tiles, pointers, torch.tensor([1], dtype=torch.int32), None, 4)
        tensor([0., 0., 5., 5.])
    """
    # The operator in C++ is called at once where that is possible: the one below is in Python, and takes longer.
    if inputs.is_cpu and not is_compiling():
        made = native.operator()(inputs, tiles, pointers, columns, bias, out_features)
        if made is not None:
            return made
    device = inputs.device.type
    if not torch.is_autocast_enabled(device):
        outputs: Tensor = _operator(inputs, tiles, pointers, columns, bias, out_features)
        return outputs
    dtype = torch.get_autocast_dtype(device)
    inputs, tiles, bias = inputs.to(dtype), tiles.to(dtype), None if bias is None else bias.to(dtype)
    with torch.autocast(device, enabled=False):
        return tile_linear(inputs, tiles, pointers, columns, bias, out_features)


@torch.library.custom_op("sparse_lightning::tile_linear", mutates_args=(), schema=SCHEMA)
def _operator(
    inputs: Tensor, tiles: Tensor, pointers: Tensor, columns: Tensor, bias: Tensor | None, out_features: int
) -> Tensor:
    if takes_triton(inputs):
        from sparse_lightning.kernels.tile_linear import triton

        return triton.tile_linear(inputs, tiles, pointers, columns, bias, out_features)
    made = native.operator()(inputs, tiles, pointers, columns, bias, out_features) if inputs.is_cpu else None
    if made is not None:
        return made
    multiply = gathered.tile_linear if inputs.device.type == "cpu" else reference.tile_linear
    return multiply(inputs, tiles, pointers, columns, bias, out_features)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, tiles, pointers, columns, _, _ = inputs
    ctx.save_for_backward(tiles, pointers, columns)
    ctx.in_features = rows.shape[-1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    tiles, pointers, columns = ctx.saved_tensors
    found = reference.grad_inputs(grad, tiles, pointers, columns, ctx.in_features)
    return found, None, None, None, None, None


_operator.register_fake(native.fake)
_operator.register_autograd(_backward, setup_context=_save)
