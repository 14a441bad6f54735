"""The search for the best tree.

The N most probable paths are prefix-closed, because no path is more probable than its parent, so
they are the best tree of N nodes below the root. Taking paths in falling order of probability
therefore yields one list, the *ladder*, whose every leading slice is an optimal tree (``grow``).

Where a child needs the sibling before it, because candidates are sampled and tested one after the
other, the N best paths may leave gaps. The best tree without gaps is a tree knapsack
(``grow_contiguous``).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from treeopt.acceptance import AcceptanceModel, FloatArray, IndependentAcceptance, RankedChildren
from treeopt.errors import TreeError
from treeopt.tree import Path, Tree


@dataclass(frozen=True)
class Ladder:
    """Paths in the order in which a search adds them.

    paths: without the root; ``paths[: n - 1]`` is the tree of tree_size n, the best one where the
        search says so.
    probs: float64 [len(paths)], the model's path probabilities.
    """

    paths: tuple[Path, ...]
    probs: NDArray[np.float64]

    @property
    def max_tree_size(self) -> int:
        """Size of the largest tree on the ladder, root included."""
        return len(self.paths) + 1

    def tree(self, tree_size: int) -> Tree:
        """Return the ladder's tree of ``tree_size`` nodes, root included.

        Raises:
            TreeError: ``tree_size`` is below 1 or beyond the ladder.
        """
        if not 1 <= tree_size <= self.max_tree_size:
            raise TreeError(f"tree_size {tree_size} is not between 1 and {self.max_tree_size}")
        return Tree.from_paths(self.paths[: tree_size - 1])

    def expected_acceptance_lengths(self) -> NDArray[np.float64]:
        """Return the objective of every tree on the ladder: float64 [max_tree_size].

        Entry n - 1 is 1 + the sum of the first n - 1 path probabilities: the tokens that a step
        with the tree of size n is expected to emit.
        """
        return np.concatenate([[1.0], 1.0 + np.cumsum(self.probs)])


def grow(
    model: AcceptanceModel,
    tree_size: int,
    max_depth: int | None = None,
    max_ranks: int | None = None,
) -> Ladder:
    """Return the ladder up to ``tree_size``, root included; each of its trees is the best.

    It is shorter when the model knows no further path with a probability above 0. Probabilities
    never rise along it; ties go to the shorter path, then to the smaller ranks.

    Args:
        model: probability of paths.
        tree_size: rows of the verify call, at least 1.
        max_depth: use at most this many heads.
        max_ranks: use only ranks below this.

    Raises:
        TreeError: a limit is not positive, or ``max_depth`` exceeds the heads.
    """
    max_depth = model.num_heads if max_depth is None else max_depth
    max_ranks = model.num_ranks if max_ranks is None else max_ranks
    _check_limits(model, tree_size, max_depth, max_ranks)
    frontier: list[tuple[float, int, Path, _Siblings, int]] = []

    def push(siblings: _Siblings, position: int) -> None:
        """Put the most probable sibling from ``position`` on into the frontier."""
        ranks = siblings.children.ranks
        while position < len(ranks) and ranks[position] >= max_ranks:
            position += 1
        if position < len(ranks):
            prob = siblings.parent_prob * siblings.children.probs[position]
            path = (*siblings.parent, ranks[position])
            heapq.heappush(frontier, (-prob, len(path), path, siblings, position))

    push(_Siblings((), 1.0, model.ranked_children(())), 0)
    paths: list[Path] = []
    probs: list[float] = []
    while frontier and len(paths) < tree_size - 1:
        negative_prob, depth, path, siblings, position = heapq.heappop(frontier)
        paths.append(path)
        probs.append(-negative_prob)
        push(siblings, position + 1)
        if depth < max_depth:
            push(_Siblings(path, -negative_prob, model.ranked_children(path)), 0)
    return Ladder(tuple(paths), np.array(probs))


def grow_contiguous(
    model: IndependentAcceptance,
    tree_size: int,
    max_depth: int | None = None,
    max_ranks: int | None = None,
) -> Ladder:
    """Return the best tree of at most ``tree_size`` nodes in which siblings leave no gap.

    Exact for any rates, also where they rise with the rank. Best trees of other sizes need not
    contain each other: the whole ladder is the best tree, and its slices are trees without gaps.

    Source: the dynamic programme of arXiv 2402.12374 (Sequoia), section 4.1, here with rates that
    may differ by depth.

    Args:
        model: rates by depth and rank; a path's probability is their product.
        tree_size: rows of the verify call, at least 1.
        max_depth: use at most this many heads.
        max_ranks: use only ranks below this.

    Raises:
        TreeError: a limit is not positive, or ``max_depth`` exceeds the heads.
    """
    max_depth = model.num_heads if max_depth is None else max_depth
    max_ranks = model.num_ranks if max_ranks is None else max_ranks
    _check_limits(model, tree_size, max_depth, max_ranks)
    num_nodes = tree_size - 1
    rates = model.rates[: min(max_depth, num_nodes), : min(max_ranks, num_nodes)]
    return _in_order(_extract(_knapsack(rates, num_nodes), num_nodes), rates)


def _knapsack(rates: FloatArray, num_nodes: int) -> list[NDArray[np.int64]]:
    """Return the tables of ``_divide`` for every depth, the root's children first.

    Args:
        rates: [K, R], by depth and rank.
        num_nodes: nodes below the root.
    """
    below, settled = np.zeros(num_nodes + 1), False
    tables: list[NDArray[np.int64]] = []
    for depth in reversed(range(len(rates))):
        if settled and np.array_equal(rates[depth], rates[depth + 1]):
            tables.append(tables[-1])  # a deeper tree would be worth no more, and is none
            continue
        table, worth = _divide(rates[depth], below)
        settled = np.array_equal(worth, below)
        tables.append(table)
        below = worth
    return tables[::-1]


def _divide(rates: FloatArray, below: FloatArray) -> tuple[NDArray[np.int64], FloatArray]:
    """Return how best to divide nodes among the children of one node, and what that is worth.

    Args:
        rates: [R], of the children.
        below: [n + 1], what m nodes below a child are worth once the child is right.

    Returns:
        int64 [R, n + 1]: how many of m nodes, left for child r and the siblings behind it, go to
        child r and below it; 0 where none is of use. And [n + 1]: the worth of m nodes in all.
    """
    num_nodes = len(below) - 1
    table = np.zeros((len(rates), num_nodes + 1), dtype=np.int64)
    behind = np.zeros(num_nodes + 1)  # what the siblings behind make of m nodes
    for rank in reversed(range(len(rates))):
        # worth[m, s - 1]: s of m nodes go to this child and the others behind it.
        others = np.concatenate([np.full(num_nodes, -np.inf), behind])[::-1]
        worth = sliding_window_view(others, num_nodes)[:0:-1] + rates[rank] * (1 + below[:-1])
        taken = worth.argmax(axis=1)
        value = worth[np.arange(num_nodes + 1), taken]
        table[rank] = np.where(value > 0, taken + 1, 0)
        behind = value.clip(min=0)
    return table, behind


def _extract(tables: list[NDArray[np.int64]], num_nodes: int) -> set[Path]:
    """Return the paths of the tree that ``_knapsack`` describes."""
    paths: set[Path] = set()
    waiting: list[tuple[Path, int]] = [((), num_nodes)]
    while waiting:
        parent, left = waiting.pop()
        if len(parent) == len(tables):
            continue
        for rank, table in enumerate(tables[len(parent)]):
            taken = int(table[left])
            if taken == 0:
                break
            paths.add((*parent, rank))
            waiting.append(((*parent, rank), taken - 1))
            left -= taken
    return paths


def _in_order(paths: set[Path], rates: FloatArray) -> Ladder:
    """Return ``paths`` as a ladder: the most probable first, behind its parent and its siblings."""
    prob_of: dict[Path, float] = {(): 1.0}
    frontier: list[tuple[float, int, Path]] = []

    def push(path: Path) -> None:
        if path in paths:
            prob = prob_of[path[:-1]] * float(rates[len(path) - 1, path[-1]])
            heapq.heappush(frontier, (-prob, len(path), path))

    push((0,))
    while frontier:
        negative_prob, _, path = heapq.heappop(frontier)
        prob_of[path] = -negative_prob
        push((*path[:-1], path[-1] + 1))
        push((*path, 0))
    del prob_of[()]
    return Ladder(tuple(prob_of), np.array(list(prob_of.values())))


@dataclass(frozen=True, eq=False)
class _Siblings:
    """The children of one tree node; all are considered, the best first."""

    parent: Path
    parent_prob: float
    children: RankedChildren


def _check_limits(model: AcceptanceModel, tree_size: int, max_depth: int, max_ranks: int) -> None:
    if tree_size < 1:
        raise TreeError(f"a budget of {tree_size} is too small; the root alone needs 1")
    if not 1 <= max_depth <= model.num_heads:
        raise TreeError(f"depth {max_depth} is not between 1 and the {model.num_heads} heads")
    if not 1 <= max_ranks <= model.num_ranks:
        raise TreeError(f"{max_ranks} ranks is not between 1 and the {model.num_ranks} known")
