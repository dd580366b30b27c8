"""MetricRecord: the values of one metric over a run."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class MetricRecord:
    """The values of a metric, each with the number of optimizer steps.

    Args:
        steps: the number of optimizer steps at each value.
        values: the values.

    Example:
        >>> record = MetricRecord()
        >>> for step in range(5):
        ...     record.add(step, 0.1 * step, max_points=4)
        >>> record.steps
        [0, 2, 4]
    """

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, step: int, value: float, max_points: int) -> None:
        """Add a value, in place of one at the same step; of too many values, drop every second one."""
        if self.steps and self.steps[-1] == step:
            del self.steps[-1], self.values[-1]
        self.steps.append(step)
        self.values.append(value)
        if len(self.steps) > max_points:
            self.steps, self.values = self.steps[::2], self.values[::2]

    def as_lists(self) -> dict[str, list[int] | list[float]]:
        """Return the record as lists of numbers."""
        return {"steps": list(self.steps), "values": list(self.values)}
