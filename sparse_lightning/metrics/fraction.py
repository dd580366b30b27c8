"""FractionMetric: the base class of metrics that divide one count by another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.plot import plot_single_or_multi_val

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class FractionMetric(Metric):
    """A metric between 0 and 1 whose states are two counts, summed over updates and over processes.

    Subclasses must use different names for their counts: a `MetricCollection` merges metrics whose states have the
    same names and values.
    """

    is_differentiable = False
    higher_is_better = None
    full_state_update = False
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    def add_count(self, name: str) -> None:
        """Add a state that counts from 0."""
        self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def set_dtype(self, dst_type: str | torch.dtype) -> FractionMetric:
        """Keep the counts as integers: bf16 cannot count beyond 256."""
        return self

    def plot(self, val: Tensor | Sequence[Tensor] | None = None, ax: Axes | None = None) -> tuple[Any, Any]:
        """Plot one value as a point, or several as a line over steps.

        Args:
            val: a result of `compute` or `forward`, or a list of results; None for the current value.
            ax: the axes to plot on; None creates a new figure with pyplot.

        Returns:
            The figure (None if axes were passed) and the axes.
        """
        value = self.compute() if val is None else val
        low, high = self.plot_lower_bound, self.plot_upper_bound
        return plot_single_or_multi_val(value, ax, name=type(self).__name__, lower_bound=low, upper_bound=high)
