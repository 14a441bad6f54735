"""Dynamic trees against brute force, and their chance maps against what they were drawn from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from treeopt.dynamic import ChanceMap, DynamicTree, _isotonic, fit_maps
from treeopt.errors import TableError, TraceError, TreeError
from treeopt.replay import accepted_at, difference, replay
from treeopt.trace import MISSED, RankTrace
from treeopt.tree import Path, Tree

Make = Callable[..., RankTrace]

# root ─┬─ 1 (0,) ─┬─ 4 (0, 0) ─── 7 (0, 0, 0)
#       │          └─ 5 (0, 1)
#       ├─ 2 (1,) ─── 6 (1, 0)
#       └─ 3 (2,)
UNIVERSE = Tree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
AS_SAID = tuple(ChanceMap(head, 0, (0.001, 1.0), (0.001, 1.0)) for head in (1, 2, 3))
CURVED = (
    ChanceMap(1, 0, (0.01, 0.5), (0.05, 0.4)),
    ChanceMap(1, 1, (0.1, 0.3, 0.5), (0.1, 0.1, 0.9)),
    ChanceMap(2, 0, (0.2,), (0.3,)),
    ChanceMap(3, 0, (0.001, 1.0), (0.5, 1.0)),
)
PROBS = st.lists(
    st.lists(st.lists(st.floats(0, 1, width=16), min_size=3, max_size=3), min_size=3, max_size=3),
    min_size=1,
    max_size=4,
).map(lambda rows: np.array(rows, dtype=np.float16))


def chance(maps: tuple[ChanceMap, ...], head: int, rank: int, prob: float) -> float:
    """Return the chance of one guess, read from the knots."""
    serving = [m for m in maps if m.head == head and m.first_rank <= rank][-1]
    logs = np.log([serving.probs, serving.chances])
    return float(np.exp(np.interp(np.log(max(prob, 2**-24)), *logs)))


def weight(maps: tuple[ChanceMap, ...], path: Path, probs: NDArray[np.float16]) -> float:
    """Return the chance of a path, factor by factor; ``probs`` is one position's."""
    factors = [chance(maps, k + 1, rank, float(probs[k, rank])) for k, rank in enumerate(path)]
    return float(np.prod(factors))


def trees_of(tree_size: int) -> list[tuple[int, ...]]:
    """Return the nodes of every tree of a size within the universe."""
    below = combinations(range(1, UNIVERSE.tree_size), tree_size - 1)
    return [(0, *nodes) for nodes in below if {UNIVERSE.parents[n] for n in nodes} <= {0, *nodes}]


# Choosing


@pytest.mark.parametrize("maps", [AS_SAID, CURVED], ids=["as said", "curved"])
@given(probs=PROBS)
def test_weights_are_the_products_along_the_paths(maps: Any, probs: NDArray[np.float16]) -> None:
    weights = DynamicTree(UNIVERSE, 4, maps).weights(probs)
    expected = [[weight(maps, path, position) for path in UNIVERSE.paths] for position in probs]
    np.testing.assert_allclose(weights, expected, rtol=1e-5)


@pytest.mark.parametrize("maps", [AS_SAID, CURVED], ids=["as said", "curved"])
@given(probs=PROBS, tree_size=st.integers(1, UNIVERSE.tree_size))
def test_no_tree_of_its_size_weighs_more(
    maps: Any, probs: NDArray[np.float16], tree_size: int
) -> None:
    tree = DynamicTree(UNIVERSE, tree_size, maps)
    weights = tree.weights(probs).astype(np.float64)
    for chosen, weighed in zip(tree.chosen(probs), weights, strict=True):
        nodes = tuple(chosen.nonzero()[0].tolist())
        allowed = trees_of(tree_size)
        assert nodes in allowed
        assert weighed[list(nodes)].sum() >= max(weighed[list(other)].sum() for other in allowed)


def test_example_by_hand() -> None:
    probs = np.zeros((3, 3, 3), dtype=np.float16)
    probs[0] = [[0.9, 0.05, 0.01], [0.9, 0.05, 0], [0.9, 0, 0]]  # sure of one path: a chain
    probs[1] = [[0.3, 0.3, 0.3], [0.1, 0.1, 0], [0.1, 0, 0]]  # sure of nothing: a star
    probs[2] = [[0.5, 0.4, 0], [0.5, 0.1, 0], [0.5, 0, 0]]  # (0,), (1,) and (0, 0)
    tree = DynamicTree(UNIVERSE, 4, AS_SAID)
    assert [row.nonzero()[0].tolist() for row in tree.chosen(probs)] == [
        [0, 1, 4, 7],
        [0, 1, 2, 3],
        [0, 1, 2, 4],
    ]


def test_equal_weights_go_to_parents_and_small_paths() -> None:
    sure = tuple(ChanceMap(head, 0, (0.5,), (1.0,)) for head in (1, 2, 3))
    tree = DynamicTree(UNIVERSE, 6, sure)
    assert tree.chosen(np.ones((1, 3, 3), dtype=np.float16))[0].nonzero()[0].tolist() == [
        0, 1, 2, 3, 4, 5,
    ]  # fmt: skip


@pytest.mark.parametrize("value", [np.nan, -np.nan, -1, 7, np.inf])
def test_what_is_no_probability_still_gives_a_tree(value: float) -> None:
    tree = DynamicTree(UNIVERSE, 4, CURVED)
    chosen = tree.chosen(np.full((1, 3, 3), value, dtype=np.float16))
    assert tuple(chosen[0].nonzero()[0].tolist()) in trees_of(4)


def test_maps_may_cover_more_than_the_universe_uses() -> None:
    chain = Tree.from_paths([(0,), (0, 0)])
    probs = np.full((2, 3, 3), 0.25, dtype=np.float16)
    few, more = (DynamicTree(chain, 2, maps).weights(probs) for maps in (AS_SAID[:2], AS_SAID))
    assert np.array_equal(few, more)
    assert few.tolist() == [[1.0, 0.25, 0.0625]] * 2


# Maps


def test_a_map_is_linear_in_logarithms_and_flat_beyond_its_knots() -> None:
    table = ChanceMap(1, 0, (0.0625, 0.25), (0.01, 0.64)).table()
    at = {float(p): float(table[p.view(np.int16)]) for p in np.array([0, 0.03, 0.0625, 0.125, 0.25,
          0.5, 1], dtype=np.float16)}  # fmt: skip
    assert list(at.values()) == pytest.approx([0.01, 0.01, 0.01, 0.08, 0.64, 0.64, 0.64])
    assert (np.diff(table) >= 0).all()


@given(
    pairs=st.lists(
        st.tuples(st.floats(0, 1), st.integers(1, 9)), min_size=1, max_size=9
    )
)  # fmt: skip
def test_isotonic_is_the_min_max_of_means(pairs: list[tuple[float, int]]) -> None:
    """Robertson, Wright and Dykstra 1988, section 1.4: the max over starts of the min over ends."""
    values, counts = (np.array(column) for column in zip(*pairs, strict=True))

    def mean(start: int, end: int) -> float:
        return float(np.average(values[start:end], weights=counts[start:end]))

    size = len(pairs)
    expected = [
        max(min(mean(a, b) for b in range(i + 1, size + 1)) for a in range(i + 1))
        for i in range(size)
    ]
    assert _isotonic(values, counts) == pytest.approx(expected)


def drawn_trace(
    make_trace: Make, truth: Callable[[Any], Any], num_documents: int = 40, seed: int = 0
) -> RankTrace:
    """Return a trace of two heads whose guess of rank 0 is right by chance ``truth(prob)``."""
    rng = np.random.default_rng(seed)
    trace = make_trace(np.full((num_documents, 200, 2), MISSED).tolist(), 4)
    probs = trace.probs.copy()
    probs[:, :, 0] = rng.uniform(0.05, 1, probs.shape[:2])
    probs[:, :, 1:] *= (1 - probs[:, :, :1]) / probs[:, :, 1:].sum(-1, keepdims=True)
    ranks = np.where(rng.uniform(size=probs.shape[:2]) < truth(probs[:, :, 0]), 0, MISSED)
    ranks[np.arange(2) >= trace.num_scored[:, None]] = MISSED
    return replace(trace, probs=probs, ranks=ranks.astype(np.int16))


@pytest.mark.parametrize(
    "truth", [lambda p: p, lambda p: p / 2, lambda p: p**3], ids=["honest", "boastful", "curved"]
)
def test_fitted_maps_find_the_truth(make_trace: Make, truth: Callable[[Any], Any]) -> None:
    maps = fit_maps(drawn_trace(make_trace, truth))
    assert [(m.head, m.first_rank) for m in maps] == [(k, r) for k in (1, 2) for r in range(4)]
    for head in (1, 2):
        for prob in (0.2, 0.5, 0.8):
            assert chance(maps, head, 0, prob) == pytest.approx(truth(prob), abs=0.05)
        assert max(chance(maps, head, 1, prob) for prob in (0.01, 0.2, 1.0)) < 0.002


def test_ranks_beyond_the_fourth_share_maps(make_trace: Make) -> None:
    trace = make_trace([[[rank, 0] for rank in range(20)] * 3], 20)
    firsts = [m.first_rank for m in fit_maps(trace) if m.head == 1]
    assert firsts == [0, 1, 2, 3, 4, 6, 8, 12, 16]


def test_no_chance_is_0_or_1_after_few_trials(make_trace: Make) -> None:
    maps = fit_maps(make_trace([[[0, 1]] * 6], 2))
    assert all(0 < chance < 1 for m in maps for chance in m.chances)
    assert chance(maps, 1, 0, 0.5) > 0.7 > 0.3 > chance(maps, 1, 1, 0.5)


def test_heads_that_give_no_probability_at_all_still_have_maps(make_trace: Make) -> None:
    trace = make_trace([[[0, 1]] * 40], 2)
    least = np.array([0, 1, 2], dtype=np.int16).view(np.float16)  # 0 and the two halves above it
    probs = np.resize(least, trace.probs.shape)
    maps = fit_maps(replace(trace, probs=probs))
    assert all(0 < prob < 1e-6 for m in maps for prob in m.probs)
    nothing = fit_maps(replace(trace, probs=np.zeros_like(probs)))
    assert chance(nothing, 1, 0, 0.0) > 0.7
    tree = Tree.from_paths([(0,), (1,), (0, 1)])
    assert replay(replace(trace, probs=probs), DynamicTree(tree, 3, maps)).acceptance_length > 2.5


def test_a_head_that_was_never_scored_has_no_map(make_trace: Make) -> None:
    with pytest.raises(TraceError, match="no document is long enough to score head 3"):
        fit_maps(make_trace([[[0, 0, 0]] * 3], 2))


# Replay


RANKS = 3
ROW = st.lists(st.integers(MISSED, RANKS - 1), min_size=3, max_size=3)
DOCUMENTS = st.lists(st.lists(ROW, min_size=2, max_size=12), min_size=1, max_size=4)


@given(documents=DOCUMENTS, tree_size=st.integers(1, UNIVERSE.tree_size), seed=st.integers(0, 99))
def test_replay_is_the_walk(
    make_trace: Make, documents: list[list[list[int]]], tree_size: int, seed: int
) -> None:
    trace = make_trace(documents, RANKS)
    probs = np.random.default_rng(seed).uniform(0, 1, trace.probs.shape).astype(np.float16)
    trace = replace(trace, probs=probs)
    tree = DynamicTree(UNIVERSE, tree_size, CURVED)
    accepted = []
    for start, end in zip(trace.doc_start[:-1], trace.doc_start[1:], strict=True):
        position = start
        while position < end - 1:
            chosen = tree.chosen(trace.probs[position][None])[0]
            paths = {path for node, path in enumerate(UNIVERSE.paths) if chosen[node]}
            path: Path = ()
            while len(path) < 3 and (*path, int(trace.ranks[position, len(path)])) in paths:
                path = (*path, int(trace.ranks[position, len(path)]))
            accepted.append(len(path))
            position += len(path) + 1
    assert replay(trace, tree).num_accepted.tolist() == accepted


def test_a_choice_of_everything_is_the_static_tree(make_trace: Make) -> None:
    ranks = np.random.default_rng(0).integers(MISSED, RANKS, (5, 60, 3))
    trace = make_trace(ranks.tolist(), RANKS)
    everything = DynamicTree(UNIVERSE, UNIVERSE.tree_size, CURVED)
    assert np.array_equal(accepted_at(trace, everything), accepted_at(trace, UNIVERSE))


def test_heads_that_know_when_they_are_right_make_dynamic_trees_longer(make_trace: Make) -> None:
    """Of two guesses one is right, and the head's probability says which."""
    rng = np.random.default_rng(3)
    ranks = rng.integers(0, 2, (20, 100, 2))
    trace = make_trace(ranks.tolist(), 4)
    right = trace.ranks[..., None] == np.arange(4)
    trace = replace(trace, probs=np.where(right, 0.4, 0.2).astype(np.float16))
    universe = Tree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)])
    static = replay(trace, Tree.from_paths([(0,), (0, 0)]))
    dynamic = replay(trace, DynamicTree(universe, 3, fit_maps(trace)))
    assert dynamic.acceptance_length > 2.9
    assert difference(static, dynamic).low > 1


def test_trace_with_too_few_heads(make_trace: Make) -> None:
    with pytest.raises(TreeError, match="3 deep but there are only 2 heads"):
        replay(make_trace([[[0, 0]] * 5], RANKS), DynamicTree(UNIVERSE, 4, AS_SAID))


# Bad input


@pytest.mark.parametrize(
    ("probs", "chances", "message"),
    [
        ((), (), "0 probs and 0 chances"),
        ((0.1, 0.2), (0.1,), "2 probs and 1 chances; every knot needs both"),
        ((0.0, 0.2), (0.1, 0.2), "holds 0.0; knots are above 0, at most 1"),
        ((0.1, 0.2), (0.1, 1.2), "holds 1.2"),
        ((0.1, float("nan")), (0.1, 0.2), "holds nan"),
        ((0.2, 0.2), (0.1, 0.2), "probs must rise"),
        ((0.1, 0.2), (0.2, 0.1), "chances must not fall"),
    ],
)
def test_maps_that_cannot_be(probs: Any, chances: Any, message: str) -> None:
    with pytest.raises(TableError, match=f"the map of head 2, rank 4.* {message}"):
        ChanceMap(2, 4, probs, chances)


@pytest.mark.parametrize(
    ("tree_size", "maps", "message"),
    [
        (0, AS_SAID, "tree_size 0 is not between 1 and the 8 nodes"),
        (9, AS_SAID, "tree_size 9 is not between 1 and the 8 nodes"),
        (4, AS_SAID[:2], "no map of head 3, rank 0"),
        (4, CURVED[1:], "no map of head 1, rank 0"),
        (4, (*AS_SAID[1:], AS_SAID[0]), "ordered by head and first_rank"),
        (4, (AS_SAID[0], *AS_SAID), "each once"),
    ],
)
def test_trees_that_cannot_be(tree_size: int, maps: Any, message: str) -> None:
    with pytest.raises(TableError, match=message):
        DynamicTree(UNIVERSE, tree_size, maps)
