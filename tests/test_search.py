"""Search against enumeration of every tree, and against trees and numbers others published."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeopt.acceptance import (
    AcceptanceModel,
    IndependentAcceptance,
    JointAcceptance,
    rates_from_table,
)
from treeopt.errors import TreeError
from treeopt.search import Ladder, grow, grow_contiguous
from treeopt.trace import MISSED, RankTrace
from treeopt.tree import Tree

Make = Callable[..., RankTrace]
TreePath = tuple[int, ...]

DATA = Path(__file__).parent / "data"

# Rates of 3 heads and 3 ranks. Weights of whole numbers make zeros and ties common, and rows that
# do not fall with the rank.
WEIGHTS = st.lists(st.integers(0, 4), min_size=4, max_size=4).filter(sum)
RATES = st.lists(
    WEIGHTS.map(lambda weights: [w / sum(weights) for w in weights[:3]]), min_size=1, max_size=3
)

# From hmarkc/parallel-prompt-decoding (PPD) at 2ba3a1c, Apache-2.0,
# prompt/inference/dynamic_sparse_trees_3_vicuna_7b.py: the rates its trees were sorted by.
PPD_7B = np.array(
    [
        [0.48335, 0.14342, 0.0736, 0.0454, 0.03087, 0.02155, 0.01658, 0.01323, 0.00932, 0.00845],
        [0.26256, 0.14561, 0.08114, 0.0576, 0.04283, 0.0323, 0.0257, 0.02152, 0.01903, 0.0155],
        [0.16413, 0.11756, 0.08092, 0.05784, 0.04586, 0.03672, 0.03128, 0.02317, 0.02372, 0.01789],
    ]
)


def published(name: str) -> Any:
    return json.loads((DATA / name).read_text())


def digest(paths: tuple[TreePath, ...]) -> str:
    compact = json.dumps([list(path) for path in paths], separators=(",", ":"))
    return hashlib.sha256(compact.encode()).hexdigest()[:16]


# The oracle: every prefix-closed set of at most 6 paths below the root.


@cache
def all_trees(heads: int, ranks: int, size: int) -> frozenset[frozenset[TreePath]]:
    """Return every prefix-closed set of ``size`` paths below the root."""
    if size == 0:
        return frozenset([frozenset()])
    smaller = all_trees(heads, ranks, size - 1)
    return frozenset(tree | {path} for tree in smaller for path in _growth(tree, heads, ranks))


def _growth(tree: frozenset[TreePath], heads: int, ranks: int) -> Iterator[TreePath]:
    for parent in ((), *tree):
        if len(parent) < heads:
            for rank in range(ranks):
                if (*parent, rank) not in tree:
                    yield (*parent, rank)


@cache
def all_paths(heads: int, ranks: int) -> list[TreePath]:
    return [p for depth in range(1, heads + 1) for p in product(range(ranks), repeat=depth)]


@cache
def membership(heads: int, ranks: int, size: int) -> np.ndarray:
    """Return float64 [trees, paths]: 1 where the tree holds the path."""
    paths = all_paths(heads, ranks)
    trees = all_trees(heads, ranks, size)
    return np.array([[float(path in tree) for path in paths] for tree in trees])


def best_by_enumeration(model: AcceptanceModel, heads: int, ranks: int, size: int) -> float:
    probs = np.array([model.path_prob(path) for path in all_paths(heads, ranks)])
    return float((membership(heads, ranks, size) @ probs).max())


def check_ladder(
    model: AcceptanceModel, max_depth: int | None = None, max_ranks: int | None = None
) -> None:
    """Every slice of the ladder is worth as much as the best tree of its size."""
    heads, ranks = max_depth or model.num_heads, max_ranks or model.num_ranks
    largest = min(6, len(all_paths(heads, ranks)))
    ladder = grow(model, largest + 1, max_depth, max_ranks)
    expected = ladder.expected_acceptance_lengths()
    for size in range(largest + 1):
        value = expected[min(size, ladder.max_tree_size - 1)]
        best = 1 + best_by_enumeration(model, heads, ranks, size)
        assert value == pytest.approx(best, abs=1e-12)
    check_invariants(model, ladder)


def check_invariants(model: AcceptanceModel, ladder: Ladder) -> None:
    assert len(set(ladder.paths)) == len(ladder.paths) == len(ladder.probs)
    seen: set[TreePath] = {()}
    for path, prob in zip(ladder.paths, ladder.probs, strict=True):
        assert path[:-1] in seen
        assert prob == model.path_prob(path) > 0
        seen.add(path)
    assert (np.diff(ladder.probs) <= 0).all()


@given(RATES)
def test_independent_ladder_is_optimal_at_every_size(rates: list[list[float]]) -> None:
    check_ladder(IndependentAcceptance(np.array(rates)))


DOCUMENTS = st.lists(
    st.lists(st.lists(st.integers(MISSED, 2), min_size=3, max_size=3), min_size=4, max_size=12),
    min_size=1,
    max_size=2,
)


@given(documents=DOCUMENTS, back_off=st.sampled_from([0.0, 2.0, 30.0]))
def test_joint_ladder_is_optimal_at_every_size(
    make_trace: Make, documents: list[Any], back_off: float
) -> None:
    check_ladder(JointAcceptance(make_trace(documents, 3), back_off))


@given(RATES, st.integers(1, 3), st.integers(1, 3))
def test_limits_are_optimal_too(rates: list[list[float]], depth: int, ranks: int) -> None:
    model = IndependentAcceptance(np.array(rates))
    depth = min(depth, model.num_heads)
    check_ladder(model, depth, ranks)
    ladder = grow(model, 100, depth, ranks)
    assert all(len(path) <= depth and max(path) < ranks for path in ladder.paths)


@given(RATES)
def test_whole_ladder_is_every_possible_path_in_order(rates: list[list[float]]) -> None:
    """By probability, ties by length, then by ranks; impossible paths are left out."""
    model = IndependentAcceptance(np.array(rates))
    paths = all_paths(len(rates), 3)
    prob = {path: model.path_prob(path) for path in paths}
    possible = [path for path in paths if prob[path] > 0]
    ordered = sorted(possible, key=lambda path: (-prob[path], len(path), path))
    ladder = grow(model, 1000)
    assert list(ladder.paths) == ordered
    assert ladder.max_tree_size == len(ordered) + 1


def test_oracle_knows_how_many_trees_there_are() -> None:
    # Trees of n nodes below a root in which every node may have 2 children: 2, 5, 14 (Catalan).
    assert [len(all_trees(9, 2, size)) for size in (1, 2, 3)] == [2, 5, 14]
    assert len(all_trees(1, 3, 2)) == 3


# Shape.


def test_siblings_need_not_be_contiguous() -> None:
    # Medusa's search reaches rank 2 only through rank 1 and cannot find this tree.
    ladder = grow(IndependentAcceptance(np.array([[0.5, 0.01, 0.3]])), 3)
    assert ladder.paths == ((0,), (2,))
    assert ladder.expected_acceptance_lengths().tolist() == [1.0, 1.5, 1.8]


def test_slices_are_trees() -> None:
    ladder = grow(IndependentAcceptance(PPD_7B), 64)
    for size in (1, 2, 33, 64):
        assert ladder.tree(size) == Tree.from_paths(ladder.paths[: size - 1])
        assert ladder.tree(size).tree_size == size


def test_a_smaller_budget_gives_a_slice() -> None:
    whole, part = (grow(IndependentAcceptance(PPD_7B), size) for size in (100, 20))
    assert part.paths == whole.paths[:19]
    assert np.array_equal(part.probs, whole.probs[:19])


def test_ladder_ends_when_paths_run_out() -> None:
    ladder = grow(IndependentAcceptance(np.array([[0.5, 0.2], [0.5, 0.0]])), 64)
    assert ladder.paths == ((0,), (0, 0), (1,), (1, 0))
    assert ladder.max_tree_size == 5
    with pytest.raises(TreeError, match="tree_size 6 is not between 1 and 5"):
        ladder.tree(6)


def test_heads_that_are_never_right_give_the_root_alone() -> None:
    ladder = grow(IndependentAcceptance(np.zeros((3, 4))), 64)
    assert ladder.paths == ()
    assert ladder.expected_acceptance_lengths().tolist() == [1.0]
    assert ladder.tree(1).tree_size == 1


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"tree_size": 0}, "a budget of 0 is too small; the root alone needs 1"),
        ({"tree_size": -5}, "a budget of -5 is too small"),
        ({"tree_size": 8, "max_depth": 0}, "depth 0 is not between 1 and the 3 heads"),
        ({"tree_size": 8, "max_depth": 4}, "depth 4 is not between 1 and the 3 heads"),
        ({"tree_size": 8, "max_ranks": 0}, "0 ranks is not between 1 and the 10 known"),
        ({"tree_size": 8, "max_ranks": 11}, "11 ranks is not between 1 and the 10 known"),
    ],
)
def test_refused_limits(limits: dict[str, int], message: str) -> None:
    with pytest.raises(TreeError, match=message):
        grow(IndependentAcceptance(PPD_7B), **limits)


@pytest.mark.parametrize("size", [0, -1, 4])
def test_refused_slices(size: int) -> None:
    ladder = grow(IndependentAcceptance(PPD_7B), 3)
    with pytest.raises(TreeError, match=f"tree_size {size} is not between 1 and 3"):
        ladder.tree(size)


# Published numbers.


def medusa_7b_ladder(tree_size: int) -> Ladder:
    rows = published("medusa_figures.json")["cumulative_top_1_to_5"]["7b"]
    return grow(
        IndependentAcceptance(rates_from_table({"heads": rows, "kind": "cumulative"})), tree_size
    )


def test_medusa_7b_accuracies_give_the_released_tree() -> None:
    released = published("medusa_choices.json")["choices"]["mc_sim_7b_63"]["paths"]
    known = tuple(tuple(path) for path in released if max(path) < 5)
    ladder = medusa_7b_ladder(39)
    assert len(known) == 38
    assert ladder.paths == known
    assert digest(ladder.paths) == "1491890bbaa63a59"
    assert ladder.expected_acceptance_lengths()[-1] == pytest.approx(2.34001, abs=5e-6)
    # The next one is not in the released tree, which spends its rows on ranks from 5 on.
    assert list(medusa_7b_ladder(40).paths[-1]) not in released


@pytest.mark.parametrize(
    ("nodes", "accepted"), [(16, 1.19851), (32, 1.37280), (64, 1.52007), (132, 1.64276)]
)
def test_ppd_expected_lengths(nodes: int, accepted: float) -> None:
    lengths = grow(IndependentAcceptance(PPD_7B), nodes + 1).expected_acceptance_lengths()
    assert lengths[-1] - 1 == pytest.approx(accepted, abs=5e-6)


@pytest.mark.parametrize(
    ("nodes", "depth", "sha256"),
    [
        (33, 2, "84b42fa8dc8da959"),  # limit 105, state 2
        (34, 3, "b37e7c2b81b0c2e5"),  # limit 105, state 3
        (132, 3, "491e2c2dea602d2a"),  # limit 500, state 3
    ],
)
def test_ppd_trees_in_order(nodes: int, depth: int, sha256: str) -> None:
    assert digest(grow(IndependentAcceptance(PPD_7B), nodes + 1, depth).paths) == sha256


# MasterGodzilla/Speculative_decoding_OT (SpecHub) at 7d592b7, no licence: numbers only.
# Sequoia/eagle_accept_vector.pt holds the rates .67 and .13 of every depth, from which
# Sequoia's dynamic programme made EAGLE/biSeq{4,8,16,32}.pt. The rates fall, so its rule that a
# child needs the sibling before it costs nothing.


SPECHUB_EAGLE = np.array([0.67, 0.13])


@pytest.mark.parametrize(
    ("size", "expected"), [(4, 2.419663), (8, 2.976646), (16, 3.466229), (32, 3.865254)]
)
def test_spechub_expected_lengths(size: int, expected: float) -> None:
    model = IndependentAcceptance.positional(SPECHUB_EAGLE, 31)  # more than 32 nodes can use
    for search in (grow, grow_contiguous):
        lengths = search(model, size).expected_acceptance_lengths()
        assert lengths[-1] == pytest.approx(expected, abs=1.5e-6)


@pytest.mark.parametrize("search", [grow, grow_contiguous])
def test_spechub_level_sizes(search: Callable[..., Ladder]) -> None:
    tree = search(IndependentAcceptance.positional(SPECHUB_EAGLE, 31), 32).tree(32)
    assert np.bincount(tree.depths).tolist() == [1, 2, 3, 4, 5, 6, 7, 1, 1, 1, 1]


def test_spechub_tree_of_16() -> None:
    """The children of every node, as EAGLE/biSeq16.pt lists them."""
    tree = grow_contiguous(IndependentAcceptance.positional(SPECHUB_EAGLE, 31), 16).tree(16)
    successors = [np.flatnonzero(tree.parents == node).tolist() for node in range(16)]
    assert successors == [
        [1, 2], [3, 4], [5], [6, 7], [8], [9], [10], [], [], [11], [12], [], [13], [14], [15], []
    ]  # fmt: skip


# Sequoia/hub_accept_rates/{model}-7b-chat-{T1,T06}-P1-cnn.pt: rates of both siblings. What was
# measured with the trees of 4, 8, 16 and 32 nodes made from them is the tokens per large model step
# of the runs on CNN in Sequoia/tests/biseq_hub_log.txt (the log of 8 nodes, 160m, T1 is cut off).
SPECHUB_RUNS = {
    "68m T1": ([0.424809, 0.166023], {4: 1.80568, 8: 2.06669, 16: 2.28425, 32: 2.34445}),
    "68m T.6": ([0.4842, 0.1379], {4: 1.84977, 8: 2.15422, 16: 2.28394, 32: 2.43532}),
    "160m T1": ([0.512958, 0.166032], {4: 1.92114, 16: 2.51493, 32: 2.75402}),
    "160m T.6": ([0.563159, 0.135093], {4: 2.00917, 8: 2.37762, 16: 2.61497, 32: 2.90529}),
}
SPECHUB_EXPECTED = {"68m T1": 2.30166, "68m T.6": 2.47076, "160m T1": 2.76417, "160m T.6": 2.93605}


@pytest.mark.parametrize("run", SPECHUB_RUNS)
def test_positional_rates_predict_measured_tokens_per_step(run: str) -> None:
    rates, measured = SPECHUB_RUNS[run]
    model = IndependentAcceptance.positional(np.array(rates), 31)
    for size, tokens_per_step in measured.items():
        predicted = grow_contiguous(model, size).expected_acceptance_lengths()[-1]
        assert predicted == pytest.approx(tokens_per_step, rel=0.07)
    assert predicted == pytest.approx(SPECHUB_EXPECTED[run], abs=2e-5)  # of 32 nodes, the last


SEQUOIA = published("sequoia_demo.json")
SEQUOIA_CELLS = [
    (int(size), levels, length)
    for size, row in SEQUOIA["expected_length"].items()
    for levels, length in enumerate(row)
    if length is not None and levels > 1
]


@pytest.mark.parametrize(("size", "levels", "length"), SEQUOIA_CELLS)
def test_sequoia_expected_lengths(size: int, levels: int, length: float) -> None:
    """Sequoia's optimum has no gaps among siblings; without that rule no tree is worse.

    Where the best tree of all has no gaps either, the two are equal, to the four digits printed.
    """
    vector = np.array(SEQUOIA["acceptance_rate_vector"][1:-1])
    ladder = grow(IndependentAcceptance(np.tile(vector, (levels - 1, 1))), size)
    value = ladder.expected_acceptance_lengths()[-1]
    paths = set(ladder.paths)
    has_gaps = any(path[-1] > 0 and (*path[:-1], path[-1] - 1) not in paths for path in paths)
    assert value >= length - 6e-5
    assert has_gaps or value == pytest.approx(length, abs=6e-5)


def test_sequoia_cells_without_gaps_are_many() -> None:
    vector = np.array(SEQUOIA["acceptance_rate_vector"][1:-1])
    equal = 0
    for size, levels, length in SEQUOIA_CELLS:
        ladder = grow(IndependentAcceptance(np.tile(vector, (levels - 1, 1))), size)
        equal += abs(ladder.expected_acceptance_lengths()[-1] - length) < 6e-5
    assert (equal, len(SEQUOIA_CELLS)) == (58, 79)


# No gaps among siblings.


@cache
def without_gaps(heads: int, ranks: int, size: int) -> np.ndarray:
    """Return the rows of ``membership`` of trees in which every child has the sibling before it."""
    return np.array(
        [
            row
            for row, tree in zip(
                membership(heads, ranks, size), all_trees(heads, ranks, size), strict=True
            )
            if all(p[-1] == 0 or (*p[:-1], p[-1] - 1) in tree for p in tree)
        ]
    )


@given(RATES)
def test_contiguous_tree_is_optimal_among_all_without_gaps(rates: list[list[float]]) -> None:
    model = IndependentAcceptance(np.array(rates))
    paths = all_paths(len(rates), 3)
    probs = np.array([model.path_prob(path) for path in paths])
    best = 0.0
    for size in range(min(6, len(paths)) + 1):
        ladder = grow_contiguous(model, size + 1)
        best = max(best, float((without_gaps(len(rates), 3, size) @ probs).max()))
        assert ladder.expected_acceptance_lengths()[-1] == pytest.approx(1 + best, abs=1e-12)
        assert ladder.max_tree_size <= size + 1
        check_no_gaps(model, ladder)


def check_no_gaps(model: AcceptanceModel, ladder: Ladder) -> None:
    """Every slice is a tree without gaps, and the ladder knows its paths' probabilities."""
    seen: set[TreePath] = {()}
    for path, prob in zip(ladder.paths, ladder.probs, strict=True):
        assert path[:-1] in seen
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in seen
        assert prob == pytest.approx(model.path_prob(path), abs=1e-15)
        seen.add(path)
    assert len(seen) == ladder.max_tree_size


@given(RATES, st.integers(1, 3), st.integers(1, 3))
def test_contiguous_limits(rates: list[list[float]], depth: int, ranks: int) -> None:
    model = IndependentAcceptance(np.array(rates))
    depth = min(depth, model.num_heads)
    within = IndependentAcceptance(model.rates[:depth, :ranks])
    limited = grow_contiguous(model, 7, depth, ranks)
    assert all(len(path) <= depth and max(path) < ranks for path in limited.paths)
    assert limited.paths == grow_contiguous(within, 7).paths


@given(st.lists(WEIGHTS, min_size=1, max_size=5), st.integers(1, 40))
def test_contiguous_equals_best_first_where_rates_fall(weights: list[Any], size: int) -> None:
    rates = np.array([sorted(row, reverse=True) for row in weights]) / 20
    model = IndependentAcceptance(rates)
    free, contiguous = grow(model, size), grow_contiguous(model, size)
    assert contiguous.probs.sum() == pytest.approx(free.probs.sum(), abs=1e-12)


def test_a_worthless_sibling_is_taken_for_the_one_behind_it() -> None:
    model = IndependentAcceptance(np.array([[0.5, 0.0, 0.3], [0.2, 0.0, 0.0]]))
    assert grow_contiguous(model, 3).paths == ((0,), (0, 0))
    assert grow_contiguous(model, 4).paths == ((0,), (1,), (2,))
    assert grow_contiguous(model, 5).paths == ((0,), (0, 0), (1,), (2,))
    assert grow_contiguous(model, 99).max_tree_size == 6  # nothing is spent on what is never right


@pytest.mark.parametrize(("size", "levels", "length"), SEQUOIA_CELLS)
def test_sequoia_optimum_without_gaps(size: int, levels: int, length: float) -> None:
    vector = np.array(SEQUOIA["acceptance_rate_vector"][1:-1])
    ladder = grow_contiguous(IndependentAcceptance.positional(vector, levels - 1), size)
    assert ladder.expected_acceptance_lengths()[-1] == pytest.approx(length, abs=6e-5)


def test_settled_depths_change_nothing() -> None:
    """Depths that add nothing are not searched again; where depths differ a little, all are."""
    vector = np.array(SEQUOIA["acceptance_rate_vector"][1:-1])
    alike = IndependentAcceptance.positional(vector, 63)
    unlike = IndependentAcceptance(alike.rates * (1 - 1e-12 * np.arange(63)[:, None]))
    for size in (8, 64):
        lengths = [
            grow_contiguous(model, size).expected_acceptance_lengths()[-1]
            for model in (alike, unlike)
        ]
        assert lengths[0] == pytest.approx(lengths[1], abs=1e-9)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"tree_size": 0}, "a budget of 0 is too small; the root alone needs 1"),
        ({"tree_size": 8, "max_depth": 4}, "depth 4 is not between 1 and the 3 heads"),
        ({"tree_size": 8, "max_ranks": 0}, "0 ranks is not between 1 and the 10 known"),
    ],
)
def test_contiguous_refuses_the_same_limits(limits: dict[str, int], message: str) -> None:
    with pytest.raises(TreeError, match=message):
        grow_contiguous(IndependentAcceptance(PPD_7B), **limits)


def test_contiguous_without_any_node() -> None:
    for model, size in (
        (IndependentAcceptance(PPD_7B), 1),
        (IndependentAcceptance(np.zeros((2, 3))), 9),
    ):
        ladder = grow_contiguous(model, size)
        assert (ladder.paths, ladder.max_tree_size) == ((), 1)
        assert ladder.expected_acceptance_lengths().tolist() == [1.0]
