"""How likely is it that a path is right: models of acceptance.

Legend: ``K`` heads, ``R`` ranks. ``a[k-1, r]`` is the share of scored positions at which head k's
rank-r guess was right.

Under greedy decoding the expected number of accepted draft tokens of a tree is the sum of
``path_prob`` over its nodes, because the right nodes form one chain from the root. That holds for
every model here; independence is a claim about ``path_prob`` only, never about the search.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import TableError, TraceError, TreeError
from treeopt.trace import FOLDS, RankTrace
from treeopt.tree import Path

FloatArray = NDArray[np.float64]

KINDS = ("per_rank", "cumulative", "positional")  # of tables of rates
BACK_OFF = 30.0  # pseudo-counts given to the pooled rates; see `JointAcceptance`
# Pseudo-counts given to the pooled rates, see `JointAcceptance`: what is tried, and what is taken
# where there are too few documents to try.
BACK_OFFS, BACK_OFF = (3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0), 30.0


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
        """Return P(path is right): 1 for the root, never rising along a path.

        Raises:
            TreeError: ``path`` is longer than there are heads.
        """
        if len(path) > self.num_heads:
            raise TreeError(
                f"path {list(path)} is {len(path)} deep but there are only {self.num_heads} heads"
            )
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

    def __init__(self, trace: RankTrace, back_off: float | None = None) -> None:
        """Count the paths of ``trace``; ``back_off`` is m, in positions.

        By default m is the one of ``BACK_OFFS`` that makes held-out documents most likely.
        """
        require_trials(trace)
        self.num_heads, self.num_ranks = trace.num_heads, trace.num_ranks
        folded = _count(trace)
        self.back_off = cross_validated(folded) if back_off is None else back_off
        self._levels = [level.total() for level in folded]
        self._pooled = [level.pooled()[:-1] for level in self._levels]
        self._unseen = [RankedChildren.of(row) for row in self._pooled]

    def ranked_children(self, path: Path) -> RankedChildren:  # noqa: D102
        depth, node = len(path), 0
        for level, rank in zip(self._levels, path, strict=False):
            child = level.child(node, rank)
            if child is None:
                return self._unseen[depth]
            node = child
        level = self._levels[depth]
        trials = level.trials[0, node]
        if trials == 0:
            return self._unseen[depth]
        prior = self.back_off * self._pooled[depth]
        return RankedChildren.of((level.hits_below(node) + prior) / (trials + self.back_off))


@dataclass(frozen=True)
class Level:
    """What followed the right paths of one length, counted for ``F`` parts of the documents.

    Paths are numbered: the empty one is node 0; a longer one is the index of its code at the level
    before. An outcome is the rank that came next, or R for a miss.

    codes: int64 [U], rising: node · (R + 1) + outcome.
    hits: int64 [F, U], positions with that path and outcome. trials: int64 [F, nodes].
    """

    num_ranks: int
    codes: NDArray[np.int64]
    hits: NDArray[np.int64]
    trials: NDArray[np.int64]

    def total(self) -> Level:
        """Return the counts of all documents."""
        hits, trials = self.hits.sum(0, keepdims=True), self.trials.sum(0, keepdims=True)
        return Level(self.num_ranks, self.codes, hits, trials)

    def without(self, fold: int) -> Level:
        """Return the counts of the documents outside ``fold``."""
        total = self.total()
        hits, trials = total.hits - self.hits[fold], total.trials - self.trials[fold]
        return Level(self.num_ranks, self.codes, hits, trials)

    def pooled(self) -> FloatArray:
        """Return the share of each outcome, whatever the path: float64 [R + 1]."""
        counts = np.bincount(self.outcomes, weights=self.hits[0], minlength=self.num_ranks + 1)
        shares: FloatArray = counts / max(self.trials.sum(), 1)
        return shares

    @property
    def outcomes(self) -> NDArray[np.int64]:
        """int64 [U]: the outcome of each code."""
        return self.codes % (self.num_ranks + 1)

    def child(self, node: int, rank: int) -> int | None:
        """Return the node of the path that ``rank`` makes longer; None when it was never right."""
        code = node * (self.num_ranks + 1) + rank
        at = int(np.searchsorted(self.codes, code))
        known = 0 <= rank < self.num_ranks and at < len(self.codes) and self.codes[at] == code
        return at if known else None

    def hits_below(self, node: int) -> NDArray[np.int64]:
        """Return int64 [R]: positions at which each rank came next."""
        first = node * (self.num_ranks + 1)
        start, end = np.searchsorted(self.codes, [first, first + self.num_ranks])
        hits = np.zeros(self.num_ranks, dtype=np.int64)
        hits[self.codes[start:end] - first] = self.hits[0, start:end]
        return hits


def _count(trace: RankTrace) -> list[Level]:
    """Return the level of every head, in ``FOLDS`` parts."""
    levels, base = [], trace.num_ranks + 1
    reached = np.arange(trace.num_positions)  # positions whose path so far is right
    node, num_nodes, fold_at = np.zeros_like(reached), 1, trace.fold_at
    for depth in range(trace.num_heads):
        scored = trace.num_scored[reached] > depth
        reached, node = reached[scored], node[scored]
        ranks = trace.ranks[reached, depth]
        outcomes = np.where(ranks < 0, trace.num_ranks, ranks)
        codes, child = np.unique(node * base + outcomes, return_inverse=True)
        fold = fold_at[reached]
        hits = _count_by_fold(fold, child, len(codes))
        levels.append(Level(trace.num_ranks, codes, hits, _count_by_fold(fold, node, num_nodes)))
        right = ranks >= 0
        reached, node, num_nodes = reached[right], child[right], len(codes)
    return levels


def _count_by_fold(
    fold: NDArray[np.int64], values: NDArray[np.int64], num_values: int
) -> NDArray[np.int64]:
    """Return int64 [FOLDS, num_values]: how often each value occurs in each fold."""
    counts = np.bincount(fold * num_values + values, minlength=FOLDS * num_values)
    return counts.reshape(FOLDS, num_values)


def cross_validated(levels: Sequence[Level]) -> float:
    """Return the back-off m under which each fold is most likely, given the others.

    Outcomes that the others never saw have no chance under any m and are left out.
    """
    if not levels[0].trials.all():  # a fold without documents
        return BACK_OFF
    scores = np.zeros(len(BACK_OFFS))
    for fold in range(FOLDS):
        for level in levels:
            known = level.without(fold)
            pooled = known.pooled()[level.outcomes]
            seen = (pooled > 0) & (level.hits[fold] > 0)
            hits, pooled = known.hits[0, seen], pooled[seen]
            trials = known.trials[0, level.codes[seen] // (level.num_ranks + 1)]
            for index, back_off in enumerate(BACK_OFFS):
                probs = (hits + back_off * pooled) / (trials + back_off)
                scores[index] += level.hits[fold, seen] @ np.log(probs)
    return BACK_OFFS[int(scores.argmax())]


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
