"""Trees as arrays: order, masks, refusals, and the lists that Medusa released."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeopt.errors import TreeError
from treeopt.tree import NO_CHILD, NO_PARENT, Tree

EXAMPLE = [(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]
ROOT_ONLY = Tree.from_paths([])

# Published lists with what the published buffer builder makes of them. FasterDecoding/Medusa at
# e2a5d20c, medusa/model/medusa_choices.py, Apache-2.0.
CHOICES = json.loads((Path(__file__).parent / "data/medusa_choices.json").read_text())["choices"]


def picture(rows: str) -> np.ndarray:
    return np.array([[mark == "1" for mark in row.split()] for row in rows.strip().splitlines()])


def closed(paths: set[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Add every missing ancestor below the root."""
    return {path[:end] for path in paths for end in range(1, len(path) + 1)}


PATHS = st.sets(
    st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), min_size=0, max_size=8
).map(closed)


def test_example_arrays(tree: Tree) -> None:
    assert tree.parents.tolist() == [NO_PARENT, 0, 0, 1, 1, 3]
    assert tree.ranks.tolist() == [-1, 0, 1, 0, 1, 0]
    assert tree.depths.tolist() == [0, 1, 1, 2, 2, 3]
    assert tree.leaves.tolist() == [2, 4, 5]
    assert tree.children.tolist() == [[1, 2], [3, 4], [-1, -1], [5, -1], [-1, -1], [-1, -1]]
    assert tree.paths == ((), *EXAMPLE)
    assert (tree.tree_size, tree.depth, tree.num_ranks) == (6, 3, 2)


@pytest.mark.parametrize(
    ("paths", "mask"),
    [
        (
            EXAMPLE,
            """
            1 . . . . .
            1 1 . . . .
            1 . 1 . . .
            1 1 . 1 . .
            1 1 . . 1 .
            1 1 . 1 . 1
            """,
        ),
        ([], "1"),
        (
            [(0,), (0, 0), (0, 0, 0)],
            """
            1 . . .
            1 1 . .
            1 1 1 .
            1 1 1 1
            """,
        ),
        (
            [(0,), (2,), (5,)],
            """
            1 . . .
            1 1 . .
            1 . 1 .
            1 . . 1
            """,
        ),
        (
            [(0,), (1,), (1, 3), (0, 2)],
            """
            1 . . . .
            1 1 . . .
            1 . 1 . .
            1 1 . 1 .
            1 . 1 . 1
            """,
        ),
    ],
    ids=["example", "root only", "chain", "star with gaps", "two branches"],
)
def test_mask_pictures(paths: list[tuple[int, ...]], mask: str) -> None:
    assert np.array_equal(Tree.from_paths(paths).ancestor_mask, picture(mask))


def test_root_only() -> None:
    assert (ROOT_ONLY.tree_size, ROOT_ONLY.depth, ROOT_ONLY.num_ranks) == (1, 0, 0)
    assert ROOT_ONLY.paths == ((),)
    assert ROOT_ONLY.leaves.tolist() == [0]
    assert ROOT_ONLY.children.shape == (1, 0)


@given(PATHS, st.randoms(use_true_random=False))
def test_order_of_input_does_not_matter(paths: set[tuple[int, ...]], random: object) -> None:
    canonical = [(), *sorted(paths, key=lambda path: (len(path), path))]
    shuffled = list(paths)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    shuffled_tree = Tree.from_paths(shuffled)
    assert list(shuffled_tree.paths) == canonical
    assert shuffled_tree == Tree.from_paths(canonical[1:])
    assert hash(shuffled_tree) == hash(Tree.from_paths(canonical[1:]))


@given(PATHS)
def test_arrays_agree_with_paths(paths: set[tuple[int, ...]]) -> None:
    tree = Tree.from_paths(paths)
    node_of = {path: node for node, path in enumerate(tree.paths)}
    assert Tree.from_paths(tree.paths[1:]) == tree
    assert tree.depths.tolist() == [len(path) for path in tree.paths]
    for path, node in node_of.items():
        if path:
            assert tree.parents[node] == node_of[path[:-1]]
            assert tree.parents[node] < node
        for rank in range(tree.num_ranks):
            assert tree.children[node, rank] == node_of.get((*path, rank), NO_CHILD)
    parents = {path[:-1] for path in tree.paths if path}
    assert tree.leaves.tolist() == [n for p, n in node_of.items() if p not in parents]


@given(PATHS)
def test_mask_is_the_transitive_closure_of_parents(paths: set[tuple[int, ...]]) -> None:
    tree = Tree.from_paths(paths)
    size = tree.tree_size
    reach = np.eye(size, dtype=bool)
    for node in range(1, size):
        reach[node, tree.parents[node]] = True
    for middle, start, end in product(range(size), repeat=3):
        reach[start, end] |= reach[start, middle] & reach[middle, end]
    assert np.array_equal(tree.ancestor_mask, reach)


def test_equality_is_of_paths(tree: Tree) -> None:
    assert tree == Tree.from_paths(reversed(EXAMPLE))
    assert tree != Tree.from_paths(EXAMPLE[:-1])
    assert tree != EXAMPLE
    assert len({tree, Tree.from_paths(EXAMPLE), ROOT_ONLY}) == 2


def test_arrays_cannot_be_written(tree: Tree) -> None:
    for array in (tree.parents, tree.ranks):
        with pytest.raises(ValueError, match="read-only"):
            array[1] = 0


def test_numpy_ranks_are_taken_as_whole_numbers() -> None:
    tree = Tree.from_paths(np.array([[0], [2]], dtype=np.int16))
    assert tree.paths == ((), (0,), (2,))
    assert {type(rank) for path in tree.paths for rank in path} == {int}


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([(0,), (1, 0)], r"path \[1, 0\] has no parent: \[1\] must be in the tree too"),
        ([(0, 0)], r"path \[0, 0\] has no parent: \[0\] must be"),
        ([(0,), (1,), (0,)], r"path \[0\] appears twice"),
        ([(0,), ()], "empty path is implied"),
        ([(-1,)], r"path \[-1\] holds -1; ranks are whole numbers from 0"),
        ([(0,), (0, True)], "holds True; ranks are whole numbers"),
        ([(np.True_,)], "ranks are whole numbers"),
        ([(0.0,)], r"holds 0\.0; ranks are whole numbers"),
        ([("0",)], "holds '0'; ranks are whole numbers"),
        ([(None,)], "holds None; ranks are whole numbers"),
        ([([0],)], r"holds \[0\]; ranks are whole numbers"),
        ([(10**30,)], "a rank above 32767"),
    ],
)
def test_refused_paths(paths: list[tuple[object, ...]], message: str) -> None:
    with pytest.raises(TreeError, match=message):
        Tree.from_paths(paths)  # type: ignore[arg-type]


def test_fit(tree: Tree) -> None:
    tree.check_fits(num_heads=3, num_ranks=2)
    ROOT_ONLY.check_fits(num_heads=0, num_ranks=0)
    with pytest.raises(TreeError, match="the tree is 3 deep but there are only 2 heads"):
        tree.check_fits(num_heads=2, num_ranks=2)
    with pytest.raises(TreeError, match="uses rank 1; only ranks below 1 are known"):
        tree.check_fits(num_heads=3, num_ranks=1)


def test_all_nine_lists_are_here() -> None:
    assert len(CHOICES) == 9


@pytest.mark.parametrize("name", CHOICES)
def test_buffers_equal_the_published_ones(name: str) -> None:
    published = CHOICES[name]
    tree = Tree.from_paths(published["paths"])
    mask = [np.flatnonzero(row).tolist() for row in tree.ancestor_mask]
    assert mask == published["mask_visible"]
    assert tree.depths.tolist() == published["position_ids"]
    # Medusa's flat candidate list: the root, then 10 candidates of each head.
    indices = np.where(tree.depths == 0, 0, 1 + 10 * (tree.depths - 1) + tree.ranks)
    assert indices.tolist() == published["tree_indices"]
    retrieved = {tuple(n for n in row if n >= 0) for row in published["retrieve_indices"]}
    assert len(retrieved) == len(published["retrieve_indices"])
    assert {tuple(np.flatnonzero(tree.ancestor_mask[n]).tolist()) for n in tree.leaves} == retrieved
