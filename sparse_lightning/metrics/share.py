"""ShareMetric: what metrics that divide one count by another have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import Metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class ShareMetric(Metric):
    """A metric between 0 and 1 whose states are two counts, summed over updates and over processes.

    Each subclass names its counts differently: a `MetricCollection` takes metrics whose states have the same
    names and the same values for one metric.
    """

    is_differentiable = False
    higher_is_better = None
    full_state_update = False
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    def add_count(self, name: str) -> None:
        """Declare a state that counts from 0."""
        self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def set_dtype(self, dst_type: str | torch.dtype) -> ShareMetric:
        """Counts stay whole numbers: a bf16 would count to 256 and no further."""
        return self

    def plot(self, val: Tensor | Sequence[Tensor] | None = None, ax: Axes | None = None) -> tuple[Any, Any]:
        """Draw one value as a point, or several as a line over steps.

        Args:
            val: what `compute` or `forward` gave, or a list of such values; None for the value now.
            ax: the axes to draw on; None makes a new figure, with pyplot.

        Returns:
            The figure (None where axes were given) and the axes.
        """
        return self._plot(val, ax)
