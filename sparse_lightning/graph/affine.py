"""Affine index sets: the coordinates of units as strided layouts, where strides can express them."""

from __future__ import annotations

import numpy as np

from sparse_lightning.graph.atoms import Ids
from sparse_lightning.layout import Layout


def affine_layouts(indices: Ids) -> list[Layout] | None:
    """Return layouts `(units, …)` that together have the coordinates of each unit; None if strides cannot express them.

    Args:
        indices: `(units, coordinates of a unit)`, sorted in each row.

    Example:
        >>> affine_layouts(np.array([[0, 1, 8, 9], [2, 3, 10, 11]]))
        [Layout((2, 2, 2), stride=(2, 8, 1), offset=0)]
        >>> affine_layouts(np.array([[0], [1], [3]])) is None
        True
    """
    units = len(indices)
    steps = indices[1] - indices[0] if units > 1 else np.zeros(indices.shape[1], np.int64)
    if not (indices == indices[0] + np.arange(units)[:, None] * steps).all():
        return None
    layouts = []
    for step in np.unique(steps):
        for shape, stride, offset in _lattices(indices[0][steps == step]):
            layouts.append(Layout((units, *shape), (int(step), *stride), offset))
    return sorted(layouts, key=lambda layout: layout.offset)


def _lattices(points: Ids) -> list[tuple[list[int], list[int], int]]:
    """Return sorted points as lattices of shape, stride and offset: one where possible, else one for each run."""
    cuts = np.flatnonzero(np.diff(points) != 1) + 1
    runs = np.split(points, cuts)
    lengths = {len(run) for run in runs}
    starts = np.array([run[0] for run in runs])
    gaps = np.unique(np.diff(starts))
    if len(lengths) == 1 and len(gaps) <= 1:
        outer = [(len(runs), int(gaps[0]))] if len(runs) > 1 else []
        inner = [(len(runs[0]), 1)] if len(runs[0]) > 1 else []
        shape, stride = [n for n, _ in outer + inner], [s for _, s in outer + inner]
        return [(shape, stride, int(starts[0]))]
    return [([len(run)] if len(run) > 1 else [], [1] if len(run) > 1 else [], int(run[0])) for run in runs]
