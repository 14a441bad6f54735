"""Trees chosen anew at every step, by what the heads themselves say there.

A static tree holds the paths that are right most often. A dynamic one holds those that are the
likeliest here: each head's probability of a guess is turned into the chance that the guess is
right, and a path's weight is the product of the chances along it. No weight exceeds its parent's,
so the N heaviest nodes form a tree, as on a ladder, and the shapes of a step stay fixed.

Legend: ``P`` positions, ``K`` heads, ``R`` ranks, ``U`` nodes of the universe, ``N`` tree size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from treeopt.acceptance import FloatArray, require_trials
from treeopt.errors import TableError
from treeopt.trace import RankTrace
from treeopt.tree import Tree

_GROUPS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24)  # ranks from one to the next share a map
_KNOTS = 8
ONE = int(np.float16(1).view(np.int16))  # bits of 1; positive halves are ordered like theirs
_HALVES = np.arange(ONE + 1, dtype=np.int16).view(np.float16).astype(np.float64)
_LOGS = np.log(_HALVES.clip(min=_HALVES[1]))  # 0 counts as the smallest half above it


@dataclass(frozen=True)
class ChanceMap:
    """The chance that a guess is right, by the probability that its head gives it.

    Linear in logarithms between its knots, and flat beyond them.

    head: which head's guesses, from 1.
    first_rank: the map serves ranks from here up to the first one of the head's next map.
    probs, chances: the knots, both above 0 and at most 1; probs rise, chances never fall.
    """

    head: int
    first_rank: int
    probs: tuple[float, ...]
    chances: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.probs or len(self.probs) != len(self.chances):
            raise TableError(
                f"{self._name} has {len(self.probs)} probs and {len(self.chances)} chances; "
                "every knot needs both"
            )
        for values in (self.probs, self.chances):
            for value in values:
                if not 0 < value <= 1:
                    raise TableError(f"{self._name} holds {value}; knots are above 0, at most 1")
        if any(left >= right for left, right in pairwise(self.probs)):
            raise TableError(f"{self._name}: probs must rise, not {list(self.probs)}")
        if any(left > right for left, right in pairwise(self.chances)):
            raise TableError(f"{self._name}: chances must not fall, as {list(self.chances)} do")

    @property
    def _name(self) -> str:
        return f"the map of head {self.head}, rank {self.first_rank}"

    def table(self) -> NDArray[np.float32]:
        """Return the chance for every float16 from 0 to 1, by its bits: float32 [15361]."""
        logs = np.interp(_LOGS, np.log(self.probs), np.log(self.chances))
        table: NDArray[np.float32] = np.exp(logs).clip(max=1).astype(np.float32)
        return table


@dataclass(frozen=True)
class DynamicTree:
    """Chooses the N likeliest nodes of a universe at each position.

    universe: a tree of all paths that can be chosen.
    tree_size: N, the root included.
    maps: for every head and rank that the universe uses.
    """

    universe: Tree
    tree_size: int
    maps: tuple[ChanceMap, ...]

    def __post_init__(self) -> None:
        if not 1 <= self.tree_size <= self.universe.tree_size:
            raise TableError(
                f"tree_size {self.tree_size} is not between 1 and the "
                f"{self.universe.tree_size} nodes there are to choose from"
            )
        keys = [(chance_map.head, chance_map.first_rank) for chance_map in self.maps]
        if keys != sorted(set(keys)):
            raise TableError("maps must be ordered by head and first_rank, each once")
        for head in range(1, self.universe.depth + 1):
            if (head, 0) not in keys:
                raise TableError(f"there is no map of head {head}, rank 0")

    @property
    def depth(self) -> int:
        """Heads needed."""
        return self.universe.depth

    @property
    def num_ranks(self) -> int:
        """R: length of the candidate lists needed."""
        return self.universe.num_ranks

    def check_fits(self, num_heads: int, num_ranks: int) -> None:
        """Raise TreeError unless ``num_heads`` lists of ``num_ranks`` candidates are enough."""
        self.universe.check_fits(num_heads, num_ranks)

    @cached_property
    def table(self) -> NDArray[np.float32]:
        """float32 [maps × 15361]: chances by ``starts[k - 1, r]`` + the bits of a float16."""
        return np.concatenate([chance_map.table() for chance_map in self.maps])

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """int64 [K, R]: where in ``table`` the chances of each head's rank start."""
        keys = [(chance_map.head, chance_map.first_rank) for chance_map in self.maps]
        wanted = [(k, r) for k in range(1, self.depth + 1) for r in range(self.num_ranks)]
        serving = [sum(key <= slot for key in keys) - 1 for slot in wanted]
        return np.array(serving, dtype=np.int64).reshape(self.depth, -1) * len(_HALVES)

    @cached_property
    def levels(self) -> list[tuple[int, NDArray[np.int64]]]:
        """The factors of the weights, depth by depth from the root: (first node, slots).

        For the first node at depth d and all behind it, slots name their ancestor at d (or
        themselves) by ``(d - 1) * R + rank``.
        """
        tree = self.universe
        levels = []
        for depth in range(1, tree.depth + 1):
            first = int(np.searchsorted(tree.depths, depth))
            at_depth = np.flatnonzero(tree.depths == depth)
            ancestors = at_depth[tree.ancestor_mask[first:, at_depth].argmax(1)]
            levels.append((first, (depth - 1) * self.num_ranks + tree.ranks[ancestors]))
        return levels

    def chosen(self, probs: NDArray[np.float16]) -> NDArray[np.bool_]:
        """Return bool [P, U]: the nodes of the tree at each position, N of them.

        Args:
            probs: [P, heads, ranks], at least K and R of them: the heads' own probabilities.

        Of equal weights the shallower node goes first, then the one whose path is smaller.
        """
        weights = self.weights(probs)
        order = np.argsort(-weights, axis=1, kind="stable")[:, : self.tree_size]
        chosen = np.zeros(weights.shape, dtype=np.bool_)
        np.put_along_axis(chosen, order, True, axis=1)
        return chosen

    def weights(self, probs: NDArray[np.float16]) -> NDArray[np.float32]:
        """Return the chance of every path of the universe: float32 [P, U], the root's 1.

        Tables and products only: any device comes to the same bits.
        """
        bits = probs[:, : self.depth, : self.num_ranks].view(np.int16).clip(0, ONE)
        chances = self.table[self.starts + bits].reshape(len(probs), -1)
        weights = np.ones((len(probs), self.universe.tree_size), dtype=np.float32)
        for first, slots in self.levels:
            weights[:, first:] *= chances[:, slots]
        return weights


def fit_maps(trace: RankTrace) -> tuple[ChanceMap, ...]:
    """Return maps of every head, from how often guesses of like probability were right.

    Guesses are dealt into bins of equal count, and the bins' shares made to rise by pooling
    neighbours that fall (isotonic regression). Ranks from the 4th on share maps.

    Raises:
        TraceError: a head was never scored.
    """
    require_trials(trace)
    maps = []
    ends = [*_GROUPS[1:], trace.num_ranks]
    for head in range(trace.num_heads):
        scored = trace.num_scored > head
        bits = trace.probs[scored, head].view(np.int16).clip(1, ONE)  # 0 as the least above it
        ranks = trace.ranks[scored, head]
        for first, end in zip(_GROUPS, ends, strict=True):
            end = min(end, trace.num_ranks)
            if first < end:
                right = ranks[:, None] == np.arange(first, end)
                maps.append(ChanceMap(head + 1, first, *_knots(bits[:, first:end], right)))
    return tuple(maps)


def _knots(
    bits: NDArray[np.int16], right: NDArray[np.bool_]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the knots of one map from guesses of any shape: their float16 bits, and the truth."""
    trials = np.bincount(bits.ravel(), minlength=len(_HALVES))
    hits = np.bincount(bits[right], minlength=len(_HALVES))
    seen = np.flatnonzero(trials)
    trials, hits = trials[seen], hits[seen]
    middles = trials.cumsum() - trials / 2
    bins = (middles / trials.sum() * _KNOTS).astype(np.int64)
    starts = np.flatnonzero(np.diff(bins, prepend=-1))
    count, num_hits = np.add.reduceat(trials, starts), np.add.reduceat(hits, starts)
    probs = np.exp(np.add.reduceat(_LOGS[seen] * trials, starts) / count)
    rate = (hits.sum() + 1) / (trials.sum() + 2)
    chances = _isotonic((num_hits + rate) / (count + 1), count)
    return tuple(probs.clip(max=1).tolist()), tuple(chances)


def _isotonic(values: FloatArray, counts: NDArray[np.int64]) -> list[float]:
    """Return the closest values that never fall, by pooling adjacent violators."""
    blocks: list[tuple[float, int, int]] = []  # mean, count, length
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        block = (value, count, 1)
        while blocks and blocks[-1][0] >= block[0]:
            mean, weight, length = blocks.pop()
            total = weight + block[1]
            block = ((mean * weight + block[0] * block[1]) / total, total, length + block[2])
        blocks.append(block)
    return [mean for mean, _, length in blocks for _ in range(length)]
