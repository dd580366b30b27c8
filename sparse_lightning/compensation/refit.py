"""Refit: least squares on the inputs of a layer, after any choice of masks."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from sparse_lightning.compensation.least_squares import damped, refit_groups, refit_rows
from sparse_lightning.errors import SparsityError


class Compensation(ABC):
    """Computes the kept weights of a layer that is about to be pruned."""

    @abstractmethod
    def fit(self, rows: Tensor, pruned: Tensor, gram: Tensor, owner: str) -> Tensor:
        """Return new weights, zero where they are pruned.

        Args:
            rows: the weights before pruning, `(rows, inputs)`, in fp64; the bias is the last column, if there is one.
            pruned: which of them are pruned, in the same shape.
            gram: the Gram matrix of the inputs.
            owner: the name of the weight, for errors.
        """


class Refit(Compensation):
    """Refit the kept weights of each row by least squares, so that the layer gives its outputs before pruning.

    Rows that are pruned alike, as with coupled units and tiles, are solved by one factorization each. If most rows have
    masks of their own, as with N:M sparsity, one factorization serves all: see `refit_rows`. The bias is refitted too.

    Args:
        damp: the mean of the diagonal of the Gram matrix times this is added to the diagonal. It keeps weights near
            their values where inputs depend on each other; 0 needs inputs that do not.

    Example:
        >>> inputs = torch.tensor([[1.0, 1.0, 0.0], [2.0, 2.0, 1.0]]).double()  # the first two are the same
        >>> weights, pruned = torch.ones(1, 3).double(), torch.tensor([[True, False, False]])
        >>> Refit(damp=0).fit(weights, pruned, inputs.T @ inputs, "fc.weight").round(decimals=3)
        tensor([[0., 2., 1.]], dtype=torch.float64)
    """

    def __init__(self, damp: float = 0.01) -> None:
        if not damp >= 0:
            raise SparsityError(f"damp={damp} is out of range: pass 0 or a small positive number, such as 0.01")
        self.damp = damp

    def __repr__(self) -> str:
        return f"Refit(damp={self.damp})"

    def fit(self, rows: Tensor, pruned: Tensor, gram: Tensor, owner: str) -> Tensor:
        """Return the least-squares solution."""
        patterns = len(torch.unique(pruned, dim=0))
        solve = refit_groups if patterns <= max(1, len(rows) // 2) else refit_rows
        return solve(rows, pruned, damped(gram, self.damp), owner)
