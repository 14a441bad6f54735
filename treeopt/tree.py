"""A tree of candidate continuations, as arrays.

Legend: ``N`` nodes, root included; node 0 is the root. A *path* is the tuple of 0-based ranks from
the root to a node; the root's path is ``()``. A node at depth k holds a guess of head k.

The worked example of every docstring here is the tree with paths
``(0,), (1,), (0, 0), (0, 1), (0, 0, 0)``::

    0 root ─┬─ 1 (0,) ─┬─ 3 (0, 0) ─── 5 (0, 0, 0)
            │          └─ 4 (0, 1)
            └─ 2 (1,)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import TreeError

Path = tuple[int, ...]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

ROOT = 0
NO_PARENT = -1
NO_CHILD = -1
_MAX_RANK = 2**15 - 1  # a trace keeps ranks as int16


@dataclass(frozen=True, eq=False)
class Tree:
    """A prefix-closed set of paths in canonical order: by depth, then by path.

    parents: int64 [N] — node that each node extends; ``NO_PARENT`` for the root.
    ranks: int64 [N] — position in the list of the node's head; -1 for the root.

    Two trees are equal when they hold the same paths. Build one with ``from_paths``.
    """

    parents: IntArray  # [N]
    ranks: IntArray  # [N]

    def __post_init__(self) -> None:
        for array in (self.parents, self.ranks):
            array.setflags(write=False)

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> Tree:
        """Return the tree that holds ``paths`` and the root, whatever order they come in.

        Raises:
            TreeError: a path is repeated, lacks its parent, is empty, or has a bad rank.
        """
        ordered = sorted(map(_checked, paths), key=lambda path: (len(path), path))
        node_of: dict[Path, int] = {(): ROOT}
        parents, ranks = [NO_PARENT], [-1]
        for path in ordered:
            if path in node_of:
                raise TreeError(f"path {list(path)} appears twice; every path must be distinct")
            if path[:-1] not in node_of:
                raise TreeError(
                    f"path {list(path)} has no parent: {list(path[:-1])} must be in the tree too"
                )
            node_of[path] = len(parents)
            parents.append(node_of[path[:-1]])
            ranks.append(path[-1])
        return cls(np.array(parents, dtype=np.int64), np.array(ranks, dtype=np.int64))

    @property
    def tree_size(self) -> int:
        """Rows of a verify call: all nodes, the root included."""
        return len(self.parents)

    @cached_property
    def depths(self) -> IntArray:
        """int64 [N]: edges from the root. ``[0, 1, 1, 2, 2, 3]`` for the example."""
        depths = np.zeros(self.tree_size, dtype=np.int64)
        for node in range(1, self.tree_size):
            depths[node] = depths[self.parents[node]] + 1
        return depths

    @property
    def depth(self) -> int:
        """Depth of the deepest node, which is also the number of heads the tree needs."""
        return int(self.depths.max())

    @property
    def num_ranks(self) -> int:
        """Length of the candidate lists the tree needs: its largest rank + 1."""
        return int(self.ranks.max()) + 1

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """All N paths in node order, the root's ``()`` first."""
        paths: list[Path] = [()]
        for node in range(1, self.tree_size):
            paths.append((*paths[self.parents[node]], int(self.ranks[node])))
        return tuple(paths)

    @cached_property
    def ancestor_mask(self) -> BoolArray:
        """bool [N, N]: ``mask[i, j]`` where node j is on the path from the root to node i.

        A node is on its own path. This is what a row of the verify call may see, beside the
        prefix. For the example::

            1 . . . . .
            1 1 . . . .
            1 . 1 . . .
            1 1 . 1 . .
            1 1 . . 1 .
            1 1 . 1 . 1
        """
        mask = np.eye(self.tree_size, dtype=np.bool_)
        for node in range(1, self.tree_size):
            mask[node] |= mask[self.parents[node]]
        return mask

    @cached_property
    def leaves(self) -> IntArray:
        """int64 [leaves]: nodes without children. ``[2, 4, 5]`` for the example."""
        return np.setdiff1d(np.arange(self.tree_size), self.parents)

    @cached_property
    def children(self) -> IntArray:
        """int64 [N, num_ranks]: ``children[n, r]`` is the child of node n at rank r, or -1."""
        children = np.full((self.tree_size, self.num_ranks), NO_CHILD, dtype=np.int64)
        children[self.parents[1:], self.ranks[1:]] = np.arange(1, self.tree_size)
        return children

    @cached_property
    def sibling_indices(self) -> IntArray:
        """int64 [N]: how many siblings come before each node; -1 for the root, as in ``ranks``."""
        indices = np.full(self.tree_size, -1, dtype=np.int64)
        for node in range(1, self.tree_size):
            is_next = self.parents[node] == self.parents[node - 1]  # siblings lie side by side
            indices[node] = indices[node - 1] + 1 if is_next else 0
        return indices

    def check_fits(self, num_heads: int, num_ranks: int) -> None:
        """Raise TreeError unless ``num_heads`` lists of ``num_ranks`` candidates fill the tree."""
        if self.depth > num_heads:
            raise TreeError(f"the tree is {self.depth} deep but there are only {num_heads} heads")
        if self.num_ranks > num_ranks:
            raise TreeError(
                f"the tree uses rank {self.num_ranks - 1}; only ranks below {num_ranks} are known"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tree) and self.paths == other.paths

    def __hash__(self) -> int:
        return hash(self.paths)


def _checked(path: Sequence[Any]) -> Path:
    ranks = tuple(path)
    if not ranks:
        raise TreeError("the root's empty path is implied; do not list it")
    for rank in ranks:
        if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)) or rank < 0:
            raise TreeError(f"path {list(ranks)} holds {rank!r}; ranks are whole numbers from 0")
        if rank > _MAX_RANK:
            raise TreeError(f"path {list(ranks)} holds a rank above {_MAX_RANK}")
    return tuple(int(rank) for rank in ranks)
