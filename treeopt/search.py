"""Best-first growth of candidate trees.

The N most probable paths are prefix-closed, because no path is more probable than its parent, so
they are the best tree of N nodes below the root. Taking paths in falling order of probability
therefore yields one list, the *ladder*, whose every leading slice is an optimal tree.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.acceptance import AcceptanceModel, RankedChildren
from treeopt.errors import TreeError
from treeopt.tree import Path, Tree


@dataclass(frozen=True)
class Ladder:
    """Paths in the order best-first search adds them.

    paths: without the root; ``paths[: n - 1]`` is the best tree of tree_size n.
    probs: float64 [len(paths)], the model's path probabilities; they never rise.
    """

    paths: tuple[Path, ...]
    probs: NDArray[np.float64]

    @property
    def max_tree_size(self) -> int:
        """Size of the largest tree on the ladder, root included."""
        return len(self.paths) + 1

    def tree(self, tree_size: int) -> Tree:
        """Return the best tree of ``tree_size`` nodes, root included.

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
    """Return the ladder up to ``tree_size``, root included.

    It is shorter when the model knows no further path with a probability above 0. Ties go to the
    shorter path, then to the smaller ranks.

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
