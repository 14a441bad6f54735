"""Acceptance models: hand-counted paths, bounds on any trace, and tables that are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeopt.acceptance import (
    BACK_OFF,
    BACK_OFFS,
    MODELS,
    IndependentAcceptance,
    JointAcceptance,
    RankedChildren,
    check_rates,
    rates_from_table,
    rates_of,
)
from treeopt.errors import TableError, TraceError, TreeError
from treeopt.trace import MISSED, RankTrace

Make = Callable[..., RankTrace]

HEADS, RANKS = 3, 3
ROW = st.lists(st.integers(MISSED, RANKS - 1), min_size=HEADS, max_size=HEADS)
DOCUMENTS = st.lists(st.lists(ROW, min_size=1, max_size=12), min_size=1, max_size=3).filter(
    lambda documents: max(map(len, documents)) > HEADS
)
ALL_PATHS = [path for depth in range(HEADS + 1) for path in product(range(RANKS), repeat=depth)]

# Two heads, one document of 7 tokens: head 1 is scored at positions 0 to 5, head 2 at 0 to 4.
# Head 1: 0 0 0 1 miss 0. Head 2: 0 1 miss 0 0.
SMALL = [[[0, 0], [0, 1], [0, -1], [1, 0], [-1, 0], [0, -1], [-1, -1]]]


# Children in order.


def test_children_are_ranked_by_probability_then_by_rank() -> None:
    children = RankedChildren.of(np.array([0.1, 0.0, 0.4, 0.1, 0.4]))
    assert children == RankedChildren([2, 4, 0, 3], [0.4, 0.4, 0.1, 0.1])


# Independent heads.


def test_independent_is_a_product() -> None:
    rates = np.array([[0.5, 0.01, 0.3], [0.4, 0.2, 0.0]])
    model = IndependentAcceptance(rates)
    assert (model.num_heads, model.num_ranks) == (2, 3)
    assert model.path_prob(()) == 1.0
    for first, second in product(range(3), repeat=2):
        assert model.path_prob((first,)) == rates[0, first]
        assert model.path_prob((first, second)) == rates[0, first] * rates[1, second]


def test_independent_of_a_trace_is_hits_over_trials(make_trace: Make) -> None:
    trace = make_trace(SMALL, num_ranks=2)
    assert np.array_equal(rates_of(trace), [[4 / 6, 1 / 6], [3 / 5, 1 / 5]])
    assert np.array_equal(IndependentAcceptance.from_trace(trace).rates, rates_of(trace))


def test_unknown_rank_has_no_chance() -> None:
    assert IndependentAcceptance(np.array([[0.5, 0.2]])).path_prob((7,)) == 0.0


# Joint counts.


def test_joint_counts_by_hand(make_trace: Make) -> None:
    model = JointAcceptance(make_trace(SMALL, num_ranks=3), back_off=0.0)
    # All six scored positions count at depth 1.
    assert [model.path_prob((rank,)) for rank in range(3)] == [4 / 6, 1 / 6, 0.0]
    # Rank 0 was right at positions 0, 1, 2 and 5; head 2 can score the first three: 0, 1, miss.
    assert model.ranked_children((0,)) == RankedChildren([0, 1], [1 / 3, 1 / 3])
    # Rank 1 was right at position 3 only, where head 2 was right with rank 0.
    assert model.ranked_children((1,)) == RankedChildren([0], [1.0])
    assert model.path_prob((0, 1)) == pytest.approx(4 / 6 / 3)
    assert model.path_prob((1, 0)) == pytest.approx(1 / 6)


@pytest.mark.parametrize("back_off", [1.0, 30.0, 1e9])
def test_joint_backs_off_to_pooled_rates(make_trace: Make, back_off: float) -> None:
    model = JointAcceptance(make_trace(SMALL, num_ranks=3), back_off)
    # Head 1 was right, and head 2 scored, at positions 0, 1, 2, 3: head 2 has 0, 1, miss, 0 there.
    pooled = {0: 2 / 4, 1: 1 / 4}
    counted = {(0,): (3, {0: 1, 1: 1}), (1,): (1, {0: 1})}
    for path, (trials, hits) in counted.items():
        children = model.ranked_children(path)
        found = dict(zip(children.ranks, children.probs, strict=True))
        assert found == pytest.approx(
            {
                rank: (hits.get(rank, 0) + back_off * rate) / (trials + back_off)
                for rank, rate in pooled.items()
            }
        )
    # Rank 2 of head 1 was never right: only the pooled rates speak.
    assert model.ranked_children((2,)) == RankedChildren([0, 1], [2 / 4, 1 / 4])


def test_paths_beyond_the_heads_are_refused(make_trace: Make) -> None:
    for model in (IndependentAcceptance(np.array([[0.5]])), JointAcceptance(make_trace(SMALL))):
        path = (0,) * (model.num_heads + 1)
        message = f"is {len(path)} deep but there are only {model.num_heads} heads"
        with pytest.raises(TreeError, match=message):
            model.path_prob(path)


def test_unknown_ranks_have_no_chance_in_joint_counts(make_trace: Make) -> None:
    model = JointAcceptance(make_trace(SMALL, num_ranks=3))
    for path in ((3,), (4, 0), (0, 7), (-1, 0)):
        assert model.path_prob(path) == 0.0


def test_back_off_without_folds_is_the_stated_one(make_trace: Make) -> None:
    assert JointAcceptance(make_trace(SMALL)).back_off == BACK_OFF


def twins(make_trace: Make, alike: float) -> RankTrace:
    """Head 2 repeats head 1's rank in a share of places, else it guesses anew."""
    rng = np.random.default_rng(0)
    ranks = rng.integers(0, 3, (20, 30, 2))
    ranks[..., 1] = np.where(rng.random((20, 30)) < alike, ranks[..., 0], ranks[..., 1])
    return make_trace(ranks.tolist(), num_ranks=3)


def test_back_off_is_what_held_out_documents_ask_for(make_trace: Make) -> None:
    # Where the path says all, counts need no help; where it says nothing, pooling is best.
    assert JointAcceptance(twins(make_trace, 0.9)).back_off == BACK_OFFS[0]
    assert JointAcceptance(twins(make_trace, 0.0)).back_off >= BACK_OFFS[-2]


@pytest.mark.parametrize("alike", [0.0, 0.1, 0.3])
def test_back_off_makes_held_out_documents_most_likely(make_trace: Make, alike: float) -> None:
    """The sums over counts against a walk over every held-out position, one by one."""
    trace = twins(make_trace, alike)
    scores = dict.fromkeys(BACK_OFFS, 0.0)
    for back_off, fold in product(BACK_OFFS, range(5)):
        inside = np.arange(trace.num_documents) % 5 == fold
        model = JointAcceptance(trace.documents(np.flatnonzero(~inside)), back_off)
        held_out = trace.documents(np.flatnonzero(inside))
        for row, scored in zip(held_out.ranks.tolist(), held_out.num_scored, strict=True):
            for depth in range(scored):
                children = model.ranked_children(tuple(row[:depth]))
                probs = dict(zip(children.ranks, children.probs, strict=True))
                scores[back_off] += math.log(probs[row[depth]])
    assert JointAcceptance(trace).back_off == max(scores, key=scores.__getitem__)


def test_joint_sees_that_heads_are_right_together(make_trace: Make) -> None:
    # Both heads are right on the same half of the positions: .5, where independence has .25.
    rows = [[0, 0], [MISSED, MISSED]] * 50
    trace = make_trace([rows, [[9, 9]]], num_ranks=2)
    joint = MODELS["joint"](trace).path_prob((0, 0))
    independent = MODELS["independent"](trace).path_prob((0, 0))
    assert independent == pytest.approx(0.25, abs=0.01)
    assert joint == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("name", MODELS)
@given(documents=DOCUMENTS)
def test_bounds_of_any_model(make_trace: Make, name: str, documents: list[Any]) -> None:
    model = MODELS[name](make_trace(documents, RANKS))
    assert model.path_prob(()) == 1.0
    for path in ALL_PATHS:
        prob = model.path_prob(path)
        assert 0.0 <= prob <= 1.0
        if len(path) < HEADS:
            children = [model.path_prob((*path, rank)) for rank in range(RANKS)]
            assert max(children) <= prob
            assert sum(children) <= prob * (1 + 1e-12)
            ranked = model.ranked_children(path)
            assert ranked.probs == sorted(ranked.probs, reverse=True)
            assert len(set(ranked.ranks)) == len(ranked.ranks)


@given(documents=DOCUMENTS)
def test_joint_without_back_off_is_counting(make_trace: Make, documents: list[Any]) -> None:
    """Each conditional probability is a share of positions, counted one by one."""
    model = JointAcceptance(make_trace(documents, RANKS), back_off=0.0)
    for path in ALL_PATHS:
        if len(path) == HEADS:
            continue
        trials, hits = 0, dict.fromkeys(range(RANKS), 0)
        for rows in documents:
            for position in range(len(rows) - 1 - len(path)):
                if tuple(rows[position][: len(path)]) == path:
                    trials += 1
                    rank = rows[position][len(path)]
                    if rank != MISSED:
                        hits[rank] += 1
        if trials:
            children = model.ranked_children(path)
            expected = {rank: count / trials for rank, count in hits.items() if count}
            assert dict(zip(children.ranks, children.probs, strict=True)) == expected


@pytest.mark.parametrize("name", MODELS)
def test_a_head_that_was_never_scored_is_refused(make_trace: Make, name: str) -> None:
    trace = make_trace([[[0, 0, 0]] * 3])
    with pytest.raises(TraceError, match="no document is long enough to score head 3"):
        MODELS[name](trace)


# Tables.


def test_per_rank_table() -> None:
    table = {"heads": [[0.5, 0.01, 0.3], [0.4]], "kind": "per_rank"}
    assert np.array_equal(rates_from_table(table), [[0.5, 0.01, 0.3], [0.4, 0, 0]])


def test_cumulative_table() -> None:
    table = {"heads": [[0.5, 0.75, 0.75], [0.25, 1]], "kind": "cumulative"}
    assert np.array_equal(rates_from_table(table), [[0.5, 0.25, 0], [0.25, 0.75, 0]])


def test_positional_table_is_one_row_for_every_depth() -> None:
    table = {"heads": [[0.5, 0.1, 0.3]], "kind": "positional"}
    assert np.array_equal(rates_from_table(table), [[0.5, 0.1, 0.3]])
    model = IndependentAcceptance.positional(np.array([0.5, 0.1, 0.3]), 4)
    assert (model.num_heads, model.num_ranks) == (4, 3)
    assert model.path_prob((2, 0, 1)) == 0.3 * 0.5 * 0.1


def test_whole_numbers_are_rates_too() -> None:
    assert np.array_equal(rates_from_table({"heads": [[1, 0]], "kind": "per_rank"}), [[1, 0]])


@pytest.mark.parametrize(
    ("heads", "kind", "message"),
    [
        ([[0.5, 0.4, 0.6]], "cumulative", r"head 1 falls at top-2 \(0\.4\); cumulative"),
        ([[0.5], [0.5, 0.1]], "cumulative", "head 2 falls at top-2"),
        ([[-0.1, 0.2]], "cumulative", "head 1 falls at top-1"),
        ([[0.5, 1.2]], "cumulative", "head 1 sums to 1.2"),
        ([[0.5, 0.6, 0.65]], "per_rank", r"sums to 1\.7500.*is this a cumulative table"),
        ([[0.1], [1.5]], "per_rank", r"head 2 holds 1\.5; rates lie between 0 and 1"),
        ([[0.1, -0.5]], "per_rank", r"head 1 holds -0\.5; rates lie between"),
        ([[math.nan]], "per_rank", "head 1 holds nan; rates lie between"),
        ([[0.5, math.nan]], "cumulative", "head 1 holds nan; rates lie between"),
        ([[math.inf]], "per_rank", "head 1 holds inf; rates lie between"),
        ([[0.5, "0.2"]], "per_rank", "head 1 holds something that is not a number"),
        ([[0.5], [True]], "per_rank", "head 2 holds something that is not a number"),
        ([[None]], "per_rank", "head 1 holds something that is not a number"),
        ([[[0.5]]], "per_rank", "head 1 holds something that is not a number"),
        ([], "per_rank", "a list with one non-empty list per head"),
        ([[]], "per_rank", "a list with one non-empty list per head"),
        ([[0.5], []], "per_rank", "a list with one non-empty list per head"),
        ([0.5], "per_rank", "a list with one non-empty list per head"),
        ({"1": [0.5]}, "per_rank", "a list with one non-empty list per head"),
        (None, "per_rank", "a list with one non-empty list per head"),
        ([[0.5]], "top", "kind is 'top'; choose one of per_rank, cumulative, positional"),
        ([[0.5]], None, "kind is None; choose one of per_rank"),
        ([[0.5], [0.5]], "positional", "a positional table has one row, .* not 2"),
        ([[0.5, 0.6]], "positional", "sums to 1.1"),
    ],
)
def test_refused_tables(heads: object, kind: object, message: str) -> None:
    with pytest.raises(TableError, match=f"^rates.json.*{message}"):
        rates_from_table({"heads": heads, "kind": kind}, "rates.json")


@pytest.mark.parametrize(
    ("table", "found"),
    [
        ([[0.5]], "not list"),
        (None, "not NoneType"),
        ({}, r"not \[\]"),
        ({"heads": [[0.5]]}, r"not \['heads'\]"),
        ({"heads": [[0.5]], "kind": "per_rank", "note": 1}, r"not \['heads', 'kind', 'note'\]"),
    ],
)
def test_tables_of_another_shape(table: object, found: str) -> None:
    with pytest.raises(TableError, match=f"must hold exactly the keys heads and kind, {found}"):
        rates_from_table(table)


def test_a_full_row_may_be_off_by_rounding() -> None:
    row = np.full((1, 10), 0.1)
    assert check_rates(row) is row
    with pytest.raises(TableError, match="sums to"):
        check_rates(row + 1e-6)
