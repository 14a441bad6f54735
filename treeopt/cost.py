"""What a verify step costs on a machine: measured times by tree size, context and batch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from treeopt.errors import CostError
from treeopt.files import read_json, write_text

SCHEMA = "treeopt.cost/1"
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)  # where edges cannot be searched for

# What a cost file must share with a calibration: key -> where its name is.
_MUST_MATCH = {
    "backbone_sha256": "backbone",
    "heads_sha256": "heads",
    "dtype": "dtype",
    "device": "device",
}


@dataclass(frozen=True)
class StepTime:
    """Median time of one step in one situation, with the 95 % interval of that median.

    A ``tree_size`` of 0 is a plain decode step: one row, no heads.
    """

    batch: int
    context: int
    tree_size: int
    step_ms: float
    low_ms: float
    high_ms: float
    repeats: int


@dataclass(frozen=True)
class StepCost:
    """Step times of one backbone with its heads on one machine.

    times: plain decode and at least one tree size per (batch, context). The curve over tree_size
        is a staircase and is kept as measured: a size between two measured ones costs what the
        next larger one does.
    machine: device, dtype, threads, backbone and library versions, as one flat mapping.
    measured: False when a model of the machine made the times.
    """

    times: tuple[StepTime, ...]
    machine: dict[str, Any]
    measured: bool = True

    def __post_init__(self) -> None:
        if not self.times:
            raise CostError("a step cost needs at least one measured situation")
        for batch, context in self.situations():
            sizes = [row.tree_size for row in self._rows(batch, context)]
            if sizes[0] != 0 or len(sizes) < 2 or len(set(sizes)) < len(sizes):
                raise CostError(
                    f"batch {batch}, context {context} needs a plain step and one tree size, "
                    f"each once, not the sizes {sizes}"
                )
        for row in self.times:
            if not 0 < row.step_ms < math.inf:
                raise CostError(f"step times must be above 0 ms and finite, not {row.step_ms}")
            if not 0 < row.low_ms <= row.step_ms <= row.high_ms < math.inf:
                raise CostError(
                    f"a step of {row.step_ms} ms cannot have the interval "
                    f"[{row.low_ms}, {row.high_ms}]"
                )

    def situations(self) -> list[tuple[int, int]]:
        """Return the measured (batch, context) pairs, rising."""
        return sorted({(row.batch, row.context) for row in self.times})

    def sizes(self, batch: int, context: int) -> list[int]:
        """Return the measured tree sizes of a situation, rising."""
        return [row.tree_size for row in self._rows(batch, context) if row.tree_size > 0]

    def plain(self, batch: int, context: int) -> StepTime:
        """Return the time of a plain decode step."""
        return self._rows(batch, context)[0]

    def plain_ms(self, batch: int, context: int) -> float:
        """Return the median time of a plain decode step."""
        return self.plain(batch, context).step_ms

    def step(self, tree_size: int, batch: int, context: int) -> StepTime:
        """Return the time of a step with ``tree_size`` rows, root included.

        Raises:
            CostError: ``tree_size`` is beyond what was measured.
        """
        for row in self._rows(batch, context):
            if row.tree_size >= max(tree_size, 1):
                return row
        raise CostError(
            f"no step of {tree_size} rows was measured at batch {batch}, context {context}; "
            f"the largest is {self.sizes(batch, context)[-1]}"
        )

    def step_ms(self, tree_size: int, batch: int, context: int) -> float:
        """Return the median time of a step with ``tree_size`` rows, root included."""
        return self.step(tree_size, batch, context).step_ms

    def nearest(self, batch: int, context: int) -> tuple[int, int]:
        """Return the measured situation of this ``batch`` whose context is closest."""
        contexts = [c for b, c in self.situations() if b == batch]
        if not contexts:
            known = sorted({b for b, _ in self.situations()})
            raise CostError(f"batch {batch} was not measured; measured: {known}")
        return batch, min(contexts, key=lambda c: abs(c - context))

    def save(self, path: str | Path) -> None:
        """Write the cost as JSON, whole or not at all."""
        value = {
            "schema": SCHEMA,
            "measured": self.measured,
            "machine": self.machine,
            "times": [asdict(row) for row in self.times],
        }
        write_text(path, json.dumps(value, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> StepCost:
        """Read what ``save`` wrote.

        Raises:
            CostError: missing, damaged, or not a step-cost file.
        """
        value = read_json(path, CostError)
        if not isinstance(value, dict) or value.get("schema") != SCHEMA:
            raise CostError(f"{path} is not a step-cost file of schema {SCHEMA}")
        try:
            times = tuple(StepTime(**row) for row in value["times"])
            return cls(times, dict(value["machine"]), bool(value["measured"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CostError(f"{path} is damaged: {error}") from error

    def check_matches(self, provenance: dict[str, Any]) -> None:
        """Raise CostError when ``provenance`` names another model, dtype or device than this.

        What only one of the two knows is not compared. Modelled times are for any weights of a
        shape and any 16-bit dtype, so nothing is.
        """
        if not self.measured:
            return
        for key, name in _MUST_MATCH.items():
            values = self.machine.get(key), provenance.get(key)
            if None in values or values[0] == values[1]:
                continue
            ours, theirs = (
                f"{source.get(name)}" + (f" (sha256 {str(value)[:8]})" if key != name else "")
                for source, value in zip((self.machine, provenance), values, strict=True)
            )
            raise CostError(
                f"the step costs were measured with {name} {ours}, the calibration with {theirs}; "
                "make both with the same"
            )

    def check_choice(self) -> None:
        """Raise CostError when a situation has one tree size only, so that there is no choice."""
        for batch, context in self.situations():
            if len(sizes := self.sizes(batch, context)) < 2:
                raise CostError(
                    f"batch {batch}, context {context}: {sizes[0]} is the only tree size measured; "
                    "a choice takes two (`treeopt profile` without --sizes measures enough)"
                )

    def doubts(self, batch: int, context: int, best: int) -> list[str]:
        """Return what says that the sizes do not show where the best one, ``best``, lies."""
        sizes = self.sizes(batch, context)
        where = f"batch {batch}, context {context}"
        smallest, largest = (self.step(size, batch, context) for size in (sizes[0], sizes[-1]))
        found = []
        if largest.low_ms <= smallest.high_ms:
            found.append(
                f"{where}: a step of {largest.tree_size} rows took {largest.step_ms:.1f} ms, of "
                f"{smallest.tree_size} {smallest.step_ms:.1f} ms; where more rows cost nothing, "
                "the choice of size is the noise's: measure again, with larger --sizes too"
            )
        if best == sizes[-1]:
            found.append(f"{where}: {best} rows are best, the most measured; more may be better")
        return found

    def _rows(self, batch: int, context: int) -> Sequence[StepTime]:
        rows = [row for row in self.times if (row.batch, row.context) == (batch, context)]
        return sorted(rows, key=lambda row: row.tree_size)
