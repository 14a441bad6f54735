"""How likely is it that a path is right: models of acceptance.

Legend: ``K`` heads, ``R`` ranks. ``a[k-1, r]`` is the share of scored positions at which head k's
rank-r guess was right.

Under greedy decoding the expected number of accepted draft tokens of a tree is the sum of
``path_prob`` over its nodes, because the right nodes form one chain from the root. That holds for
every model here; independence is a claim about ``path_prob`` only, never about the search.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import TableError, TraceError
from treeopt.trace import RankTrace
from treeopt.tree import Path

FloatArray = NDArray[np.float64]

KINDS = ("per_rank", "cumulative", "positional")  # of tables of rates
BACK_OFF = 30.0  # pseudo-counts given to the pooled rates; see `JointAcceptance`


@dataclass(frozen=True)
class RankedChildren:
    """The children of one path, most probable first; ties by rank.

    ranks: their ranks. probs: P(child is right | its parent is right), falling.
    """

    ranks: list[int]
    probs: list[float]

    @classmethod
    def of(cls, conditional: FloatArray) -> RankedChildren:
        """Rank the children whose conditional probabilities [R] are above 0."""
        order = np.argsort(-conditional, kind="stable")
        order = order[conditional[order] > 0]
        return cls(order.tolist(), conditional[order].tolist())


class AcceptanceModel(ABC):
    """Maps a path to the probability that all its guesses are right."""

    num_heads: int
    num_ranks: int

    @abstractmethod
    def ranked_children(self, path: Path) -> RankedChildren:
        """Return the children of ``path``, which is shorter than ``num_heads``."""

    def path_prob(self, path: Path) -> float:
        """Return P(path is right): 1 for the root, never rising along a path."""
        prob = 1.0
        for depth, rank in enumerate(path):
            children = self.ranked_children(path[:depth])
            prob *= dict(zip(children.ranks, children.probs, strict=True)).get(rank, 0.0)
        return prob


class IndependentAcceptance(AcceptanceModel):
    """Heads are right independently: ``path_prob`` is the product of ``a[k-1, r_k]``.

    Source: arXiv 2401.10774, section 2.1.1 and appendix C.
    """

    def __init__(self, rates: FloatArray) -> None:
        """Take ``rates`` [K, R], each row the rates of one head by rank."""
        self.rates = check_rates(rates)
        self.num_heads, self.num_ranks = self.rates.shape
        self._ranked = [RankedChildren.of(row) for row in self.rates]

    @classmethod
    def positional(cls, rates: FloatArray, num_heads: int) -> IndependentAcceptance:
        """Take one vector of ``rates`` [R] for every depth: a child counts by its place alone.

        Of candidates that are sampled and tested in turn, ``rates[i]`` is the share of tests that
        accept the i-th; what came before the parent is taken not to matter.

        Source: arXiv 2402.12374 (Sequoia), definition 4.1.
        """
        return cls(np.tile(rates, (num_heads, 1)))

    @classmethod
    def from_trace(cls, trace: RankTrace) -> IndependentAcceptance:
        """Estimate the rates as hits over trials."""
        return cls(rates_of(trace))

    def ranked_children(self, path: Path) -> RankedChildren:  # noqa: D102
        return self._ranked[len(path)]


class JointAcceptance(AcceptanceModel):
    """Counts whole paths, and backs off to pooled rates where a path was seen too seldom.

    With n positions at which ``path`` was right and head k = len(path) + 1 could be scored,
    c of them with rank r next::

        P(r | path) = (c + m · b[k-1, r]) / (n + m)

    where ``b[k-1, r]`` pools all positions whose first k - 1 tokens were all in their heads'
    lists, whatever their ranks: heads are right together more often than independence has it.
    """

    def __init__(self, trace: RankTrace, back_off: float = BACK_OFF) -> None:
        """Count the paths of ``trace``; ``back_off`` is m, in positions."""
        require_trials(trace)
        self.num_heads, self.num_ranks = trace.num_heads, trace.num_ranks
        self.back_off = back_off
        self._pooled: list[FloatArray] = []
        self._trials: list[dict[Path, int]] = []
        self._hits: list[dict[Path, NDArray[np.int64]]] = []
        self._count(trace)
        self._unseen = [RankedChildren.of(row) for row in self._pooled]

    def ranked_children(self, path: Path) -> RankedChildren:  # noqa: D102
        depth = len(path)
        trials = self._trials[depth].get(path, 0)
        if trials == 0:
            return self._unseen[depth]
        prior = self.back_off * self._pooled[depth]
        hits = self._hits[depth].get(path, 0)
        return RankedChildren.of((hits + prior) / (trials + self.back_off))

    def _count(self, trace: RankTrace) -> None:
        """Fill the tables of every depth; ``reached`` are positions whose path so far is right."""
        reached = np.arange(trace.num_positions)
        for depth in range(trace.num_heads):
            reached = reached[trace.num_scored[reached] > depth]
            parents, next_ranks = trace.ranks[reached, :depth], trace.ranks[reached, depth]
            hit = next_ranks >= 0
            pooled = np.bincount(next_ranks[hit], minlength=self.num_ranks)
            self._pooled.append(pooled / max(len(reached), 1))
            self._trials.append(_count_rows(parents))
            pairs = _count_rows(trace.ranks[reached[hit], : depth + 1])
            table: dict[Path, NDArray[np.int64]] = {}
            for (*parent, rank), count in pairs.items():
                row = table.setdefault(tuple(parent), np.zeros(self.num_ranks, dtype=np.int64))
                row[rank] = count
            self._hits.append(table)
            reached = reached[hit]


MODELS: dict[str, Callable[[RankTrace], AcceptanceModel]] = {
    "joint": JointAcceptance,
    "independent": IndependentAcceptance.from_trace,
}


def rates_of(trace: RankTrace) -> FloatArray:
    """Return the rates [K, R]: hits over trials of each head.

    Raises:
        TraceError: a head was never scored.
    """
    require_trials(trace)
    return trace.hits() / trace.trials()[:, None]


def rates_from_table(table: Any, source: str = "the table") -> FloatArray:
    """Return rates [K, R] from ``{"heads": [[…], …], "kind": "per_rank" | "cumulative"}``.

    A cumulative row holds top-1, top-2, … accuracies; its differences are the rates. Rows may be
    of unlike length; missing ranks count as never right. Of the kind ``positional`` there is one
    row, the rates of sampled candidates in the order in which they are tested, for every depth.

    Raises:
        TableError: another shape, a number outside [0, 1], or rows that exceed 1 or fall.
    """
    if not isinstance(table, dict) or set(table) != {"heads", "kind"}:
        keys = sorted(table) if isinstance(table, dict) else type(table).__name__
        raise TableError(f"{source} must hold exactly the keys heads and kind, not {keys}")
    if table["kind"] not in KINDS:
        known = ", ".join(KINDS)
        raise TableError(f"{source}: kind is {table['kind']!r}; choose one of {known}")
    rows = table["heads"]
    if not isinstance(rows, list) or not rows or not all(isinstance(r, list) and r for r in rows):
        raise TableError(f"{source}: heads must be a list with one non-empty list per head")
    if table["kind"] == "positional" and len(rows) > 1:
        raise TableError(
            f"{source}: a positional table has one row, the same for every depth, not {len(rows)}"
        )
    rates = np.zeros((len(rows), max(map(len, rows))))
    for head, row in enumerate(rows):
        if not all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in row):
            raise TableError(f"{source}: head {head + 1} holds something that is not a number")
        values = np.array(row, dtype=np.float64)
        if table["kind"] == "cumulative":
            values = np.diff(values, prepend=0.0)
            if (values < 0).any():
                at = int(np.argmax(values < 0))
                raise TableError(
                    f"{source}: head {head + 1} falls at top-{at + 1} ({row[at]}); cumulative "
                    "rows never fall (is this a per_rank table?)"
                )
        rates[head, : len(row)] = values
    return check_rates(rates, source)


def check_rates(rates: FloatArray, source: str = "the table") -> FloatArray:
    """Return ``rates`` [K, R] when every row is a sub-distribution; raise TableError otherwise."""
    for head, row in enumerate(rates):
        if not np.isfinite(row).all() or (row < 0).any() or (row > 1).any():
            bad = row[~((row >= 0) & (row <= 1))][0]
            raise TableError(f"{source}: head {head + 1} holds {bad}; rates lie between 0 and 1")
        if row.sum() > 1 + 1e-9:
            raise TableError(
                f"{source}: head {head + 1} sums to {row.sum():.4f}; at most one rank is right "
                "at a time, so a row cannot exceed 1 (is this a cumulative table?)"
            )
    return rates


def require_trials(trace: RankTrace) -> None:
    """Raise TraceError unless every head was scored."""
    trials = trace.trials()
    if (trials == 0).any():
        head = int(np.argmax(trials == 0)) + 1
        raise TraceError(f"no document is long enough to score head {head}; calibrate on more text")


def _count_rows(rows: NDArray[np.int16]) -> dict[Path, int]:
    """Return how often each distinct row occurs, keyed by the row as a path."""
    if rows.shape[1] == 0:
        return {(): len(rows)}
    if len(rows) == 0:
        return {}
    distinct, counts = np.unique(rows, axis=0, return_counts=True)
    return dict(zip(map(tuple, distinct.tolist()), counts.tolist(), strict=True))
