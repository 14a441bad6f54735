"""What each tree size gives on a machine, and the best size: tokens/s over a staircase.

The curve need not have one peak, so every measured size is compared with every other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, hypot, log
from typing import Any

from treeopt.replay import Interval

NO_SPECULATION = 1  # the tree size of the root alone: plain decoding


@dataclass(frozen=True)
class SizePoint:
    """What one tree size promises for one batch size and context length.

    tree_size: rows of the verify call; ``NO_SPECULATION`` stands for plain decoding.
    acceptance_length: replayed on held-out documents. step_ms: median time of a step.
    """

    batch: int
    context: int
    tree_size: int
    acceptance_length: Interval
    step_ms: Interval

    @property
    def tokens_per_s(self) -> Interval:
        """Tokens per step over time per step, for one sequence of the batch.

        The two are measured apart, so their relative errors add as squares.
        """
        length, step = self.acceptance_length, self.step_ms
        value = 1000 * length.value / step.value
        below = hypot(log(length.value / length.low), log(step.high / step.value))
        above = hypot(log(length.high / length.value), log(step.value / step.low))
        return Interval(value, value * exp(-below), value * exp(above))

    def as_row(self) -> dict[str, Any]:
        """Return the point as an entry of a preset's ``curve``."""
        length, step = self.acceptance_length, self.step_ms
        return {
            "batch": self.batch,
            "context": self.context,
            "tree_size": self.tree_size,
            "acceptance_length": round(length.value, 4),
            "low": round(length.low, 4),
            "high": round(length.high, 4),
            "step_ms": round(step.value, 4),
            "step_low_ms": round(step.low, 4),
            "step_high_ms": round(step.high, 4),
        }

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> SizePoint:
        """Read what ``as_row`` wrote."""
        return cls(
            row["batch"],
            row["context"],
            row["tree_size"],
            Interval(row["acceptance_length"], row["low"], row["high"]),
            Interval(row["step_ms"], row["step_low_ms"], row["step_high_ms"]),
        )


def best_point(points: Iterable[SizePoint]) -> SizePoint:
    """Return the smallest size whose tokens/s lie within the interval of the most tokens/s.

    A larger tree that is not surely faster only costs memory and other requests' time.
    """
    known = list(points)
    most = max((point.tokens_per_s for point in known), key=lambda speed: speed.value)
    good = [point for point in known if point.tokens_per_s.value >= most.low]
    return min(good, key=lambda point: point.tree_size)


def by_situation(points: Sequence[SizePoint]) -> dict[tuple[int, int], list[SizePoint]]:
    """Return the points of each (batch, context), in their order."""
    found: dict[tuple[int, int], list[SizePoint]] = {}
    for point in points:
        found.setdefault((point.batch, point.context), []).append(point)
    return found
