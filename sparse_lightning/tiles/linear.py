"""TileLinear: a linear layer that stores and computes only the tiles of its weight that are not zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparse_lightning.errors import LayoutError
from sparse_lightning.kernels.tile_linear import tile_linear
from sparse_lightning.tiles.cutting import cut, joined


class TileLinear(nn.Module):
    """Takes the place of an `nn.Linear` for inference: the same outputs from the kept tiles of its weight.

    All tensors are buffers. Gradients flow to the inputs, not to the weight.

    Args:
        in_features: the size of the last dimension of the inputs.
        out_features: the size of the last dimension of the outputs.
        tiles: the kept tiles, `(kept, tile_in, tile_out)`, in the order of rows.
        pointers: where each row of tiles begins, int32, `(rows of tiles + 1,)`.
        columns: the column of each kept tile, int32, `(kept,)`.
        bias: `(out_features,)`, or None.

    Example:
        >>> linear = nn.Linear(64, 64)
        >>> with torch.no_grad():
        ...     _ = linear.weight[:32].zero_()
        >>> tiled = TileLinear.of(linear, (32, 32))
        >>> tiled
        TileLinear(in_features=64, out_features=64, bias=True, tile=32×32, kept=2 of 4)
        >>> inputs = torch.randn(8, 64)
        >>> torch.allclose(tiled(inputs), linear(inputs), atol=1e-5)
        True
    """

    tiles: Tensor
    pointers: Tensor
    columns: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        tiles: Tensor,
        pointers: Tensor,
        columns: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self._check(tiles, pointers, columns, bias)
        self.register_buffer("tiles", tiles)
        self.register_buffer("pointers", pointers)
        self.register_buffer("columns", columns)
        self.register_buffer("bias", bias)

    @staticmethod
    def of(linear: nn.Linear, tile: tuple[int, int]) -> TileLinear:
        """Return the tiles of a linear layer.

        Args:
            linear: the layer; its weight and bias are copied.
            tile: outputs × inputs of a tile, as in the shape of the weight.
        """
        if min(tile) < 1:
            raise LayoutError(f"tiles of {tile[0]}×{tile[1]} weights are not possible: both sizes must be at least 1")
        bias: Tensor | None = linear.bias
        own = None if bias is None else bias.detach().clone()
        layer = TileLinear(linear.in_features, linear.out_features, *cut(linear.weight, tile), own)
        return layer.train(linear.training)

    @property
    def tile(self) -> tuple[int, int]:
        """The outputs × inputs of a tile."""
        return self.tiles.shape[2], self.tiles.shape[1]

    @property
    def grid(self) -> tuple[int, int]:
        """The number of tiles along the outputs and the inputs, including those that are zero."""
        return -(-self.out_features // self.tile[0]), -(-self.in_features // self.tile[1])

    def dense_weight(self) -> Tensor:
        """Return a new tensor with the whole weight, `(out_features, in_features)`."""
        return joined(self.tiles, self.pointers, self.columns, (self.out_features, self.in_features))

    def forward(self, input: Tensor) -> Tensor:
        """Return `input @ weight.T + bias`; the input is `(…, in_features)`."""
        if input.size(-1) != self.in_features:
            raise LayoutError(
                f"inputs of shape {tuple(input.shape)} do not fit a layer with {self.in_features} input features: the "
                "last dimension must be that number"
            )
        # Not by attributes: that takes longer than the rest of this function.
        own: dict[str, Any] = self._buffers
        return tile_linear(input, own["tiles"], own["pointers"], own["columns"], own["bias"], self.out_features)

    def extra_repr(self) -> str:
        """Return the sizes that `print(model)` shows."""
        kept = f"tile={self.tile[0]}×{self.tile[1]}, kept={len(self.tiles)} of {self.grid[0] * self.grid[1]}"
        features = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{features}, bias={self.bias is not None}, {kept}"

    def _check(self, tiles: Tensor, pointers: Tensor, columns: Tensor, bias: Tensor | None) -> None:
        """Check that the tensors describe a matrix of these features: kernels would read out of bounds otherwise."""
        wrong = _wrong_form(tiles, pointers, columns)
        if not wrong:
            rows, width = -(-self.out_features // tiles.shape[2]), -(-self.in_features // tiles.shape[1])
            wrong = _wrong_place(len(tiles), pointers, columns, rows, width)
        if not wrong and bias is not None and bias.shape != (self.out_features,):
            wrong = f"the bias has shape {tuple(bias.shape)}"
        if wrong:
            raise LayoutError(
                f"these are not the tiles of a {self.out_features}×{self.in_features} weight: {wrong}. TileLinear.of "
                "cuts a linear layer into tiles"
            )


def _wrong_form(tiles: Tensor, pointers: Tensor, columns: Tensor) -> str:
    """Return what is wrong with the shapes and dtypes; an empty string where nothing is."""
    if tiles.ndim != 3 or min(tiles.shape[1:]) < 1 or not tiles.is_floating_point():
        return f"tiles have shape {tuple(tiles.shape)} and dtype {tiles.dtype}, not (kept, tile_in, tile_out) floats"
    if any(t.ndim != 1 or t.dtype != torch.int32 for t in (pointers, columns)):
        return "pointers and columns must be int32 with one dimension"
    return "" if len(columns) == len(tiles) else f"there are {len(tiles)} tiles and {len(columns)} columns"


def _wrong_place(kept: int, pointers: Tensor, columns: Tensor, rows: int, width: int) -> str:
    """Return which tile lies outside of the grid or is there twice; an empty string where none does."""
    if len(pointers) != rows + 1 or pointers[0] != 0 or pointers[-1] != kept or (pointers.diff() < 0).any():
        return f"pointers must rise from 0 to {kept} over {rows} rows of tiles"
    if kept and not (columns.min() >= 0 and columns.max() < width):
        return f"columns lie outside of the {width} columns of tiles"
    starts = torch.zeros(kept + 1, dtype=torch.bool, device=columns.device)
    starts[pointers.long()] = True
    falls = columns.diff() <= 0
    return "columns must rise in each row of tiles" if (falls & ~starts[1:kept]).any() else ""
