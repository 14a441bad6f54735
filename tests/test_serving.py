"""Admission against every possible cut, and simulated serving against walks taken by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeopt.cost import StepCost, StepTime
from treeopt.errors import CostError, DataError, PresetError, TableError, TraceError, TreeError
from treeopt.preset import Preset
from treeopt.replay import replay
from treeopt.serving import CallCost, Served, Workload, admit, simulate
from treeopt.trace import RankTrace
from treeopt.tree import Tree

Make = Callable[..., RankTrace]

HEADS, RANKS = 2, 3
LADDER = ((0,), (0, 0), (1,), (1, 0))
PRESET = Preset("p", LADDER, 3, path_probs=(0.6, 0.4, 0.2, 0.1))
PERFECT = [[0] * HEADS] * 7


def cost_of(
    times: dict[int, dict[int, float]], plain_ms: float = 10.0, context: int = 256
) -> StepCost:
    """Return a cost from ``{batch: {tree_size: ms}}``; a plain step always takes ``plain_ms``."""
    rows = [
        StepTime(batch, context, size, ms, ms, ms, 9)
        for batch, sizes in times.items()
        for size, ms in {0: plain_ms, **sizes}.items()
    ]
    return StepCost(tuple(rows), {"device": "cpu"})


# Admission.

FALLING = st.lists(st.floats(0, 1), max_size=4).map(lambda row: sorted(row, reverse=True))
STAIRS = st.dictionaries(st.integers(1, 12), st.floats(0.5, 30), min_size=1, max_size=5)


@given(weights=st.lists(FALLING, min_size=1, max_size=3), stairs=STAIRS)
def test_no_other_cuts_emit_more_per_second(
    weights: list[list[float]], stairs: dict[int, float]
) -> None:
    base = len(weights)
    edges = sorted(stairs.items())
    cost = CallCost(
        base, 2.0, tuple(base + more for more, _ in edges), tuple(ms for _, ms in edges)
    )
    best = 0.0
    for nodes in itertools.product(*(range(len(row) + 1) for row in weights)):
        if base + sum(nodes) <= cost.rows[-1]:
            tokens = base + sum(sum(row[:n]) for row, n in zip(weights, nodes, strict=True))
            best = max(best, tokens / cost.ms_of(base + sum(nodes)))
    admission = admit(weights, cost)
    assert admission.tokens_per_ms == pytest.approx(best)
    # What is said of the cuts is so.
    expected = base + sum(sum(row[: n - 1]) for row, n in zip(weights, admission.cuts, strict=True))
    assert admission.tokens == pytest.approx(expected)
    assert admission.step_ms == cost.ms_of(sum(admission.cuts))


@given(weights=st.lists(FALLING, min_size=1, max_size=3), stairs=STAIRS)
def test_all_requests_draft_down_to_one_probability(
    weights: list[list[float]], stairs: dict[int, float]
) -> None:
    edges = sorted(stairs.items())
    base = len(weights)
    cost = CallCost(base, 2.0, tuple(base + n for n, _ in edges), tuple(ms for _, ms in edges))
    cuts = admit(weights, cost).cuts
    inside = [w for row, cut in zip(weights, cuts, strict=True) for w in row[: cut - 1]]
    outside = [w for row, cut in zip(weights, cuts, strict=True) for w in row[cut - 1 :]]
    assert min(inside, default=1.0) >= max(outside, default=0.0)


def test_worked_example() -> None:
    # Two requests: one sure of its guesses, one not. 2 rows 10 ms, 4 rows 11 ms, 6 rows 16 ms.
    cost = CallCost(2, 10.0, (4, 6), (11.0, 16.0))
    admission = admit([[0.9, 0.8, 0.7], [0.3, 0.1]], cost)
    # Without drafts 0.2 tokens/ms; 4 rows 3.7 / 11 = 0.336; 6 rows 4.7 / 16 = 0.294.
    assert admission.cuts == (3, 1)
    assert admission.tokens == pytest.approx(3.7)
    assert admission.step_ms == 11.0
    # At that price 5 ms are worth 1.68 tokens, and two more nodes bring 1.0.
    assert 5 * admission.tokens_per_ms > 0.7 + 0.3


def test_the_best_edge_may_lie_behind_a_worse_one() -> None:
    # A dear first step, then rows that are nearly free: a local search would stop at no drafts.
    cost = CallCost(1, 10.0, (2, 3, 4, 5), (19.0, 19.5, 20.0, 20.5))
    assert 1.6 / 19.0 < 1 / 10.0
    assert admit([[0.6, 0.55, 0.5, 0.45]], cost).cuts == (5,)


def test_a_curve_that_falls_is_taken_as_it_is() -> None:
    cost = CallCost(1, 10.0, (2, 3), (14.0, 12.0))
    assert admit([[0.5, 0.1]], cost).cuts == (3,)
    # One node alone would cost 14 ms, so it is not drafted.
    assert admit([[0.3]], cost).cuts == (1,)


def test_no_node_pays_where_time_follows_the_rows() -> None:
    cost = CallCost(4, 4.0, tuple(range(5, 40)), tuple(map(float, range(5, 40))))
    assert admit([[0.99, 0.98, 0.97]] * 4, cost).cuts == (1, 1, 1, 1)


def test_more_requests_get_smaller_trees_where_rows_are_shared() -> None:
    """Rows are free up to 16 together: each of B requests gets 16 / B of them."""
    ladder = [0.8 * 0.9**place for place in range(15)]
    for batch in (1, 2, 4, 8):
        cost = CallCost(batch, 10.0, (16, 32, 64), (10.5, 21.0, 42.0))
        assert admit([ladder] * batch, cost).cuts == (16 // batch,) * batch


def test_of_equals_the_fewest_rows() -> None:
    cost = CallCost(1, 10.0, (2, 3), (15.0, 15.0))
    assert admit([[0.5, 0.0]], cost).cuts == (1,)  # 1.5 / 15 is 1 / 10


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([[0.2, 0.3], [0.1]], "the weights of request 0 rise from 0.2 to 0.3 at place 1"),
        ([[0.2], [1.5]], "request 1 has the weight 1.5"),
        ([[math.nan], [0.1]], "request 0 has the weight nan"),
    ],
)
def test_weights_that_are_no_ladder(weights: list[list[float]], message: str) -> None:
    with pytest.raises(TableError, match=message):
        admit(weights, CallCost(2, 10.0, (4, 8), (11.0, 12.0)))


def test_cost_of_another_batch() -> None:
    with pytest.raises(CostError, match="of a call for 2 requests, not 1"):
        admit([[0.5]], CallCost(2, 10.0, (4, 8), (11.0, 12.0)))


# The curve.


def test_the_curve_counts_rows_of_all_requests() -> None:
    cost = cost_of({1: {1: 10.5, 4: 11.0, 8: 13.0}, 4: {1: 12.0, 4: 14.0, 8: 20.0}})
    assert CallCost.of(cost, 1, 256) == CallCost(1, 10.0, (4, 8), (11.0, 13.0))
    curve = CallCost.of(cost, 3, 256)  # read from batch 4
    assert curve == CallCost(3, 10.0, (16, 32), (14.0, 20.0))
    assert [curve.ms_of(rows) for rows in (3, 4, 16, 17, 32)] == [10.0, 14.0, 14.0, 20.0, 20.0]


@pytest.mark.parametrize(
    ("num_requests", "context", "message"),
    [
        (5, 256, "a batch of 5 was not measured at context 256; the largest is 4 .*--batch 1,5"),
        (4, 512, r"context 512 was not measured; measured: \[256\]"),
        (2, 256, r"batch 2, context 256 was measured with the tree sizes \[8\] only"),
    ],
)
def test_what_a_curve_cannot_be_read_from(num_requests: int, context: int, message: str) -> None:
    cost = cost_of({1: {4: 11.0, 8: 13.0}, 2: {1: 10.5, 8: 14.0}, 4: {4: 14.0, 8: 20.0}})
    with pytest.raises(CostError, match=message):
        CallCost.of(cost, num_requests, context)


def test_a_call_larger_than_measured() -> None:
    with pytest.raises(CostError, match="no call of 9 rows for 2 requests was measured; .* has 8"):
        CallCost(2, 10.0, (4, 8), (11.0, 12.0)).ms_of(9)


# Serving.

FLAT = cost_of({1: {2: 11.0, 3: 12.0, 5: 13.0}, 2: {2: 14.0, 3: 15.0, 5: 30.0}})


def served(trace: RankTrace, workload: Workload, max_batch: int, **changes: Any) -> list[Served]:
    options = {"preset": PRESET, "cost": FLAT, "context": 256, **changes}
    return simulate(trace, workload=workload, max_batch=max_batch, **options)


def at(arrivals: list[float]) -> Workload:
    """Return requests for the first document."""
    return Workload(np.zeros(len(arrivals), dtype=np.int64), np.array(arrivals))


def test_one_request_by_hand(make_trace: Make) -> None:
    none, fixed, admitted = served(make_trace([PERFECT], RANKS), at([5.0]), 1)
    # 6 tokens after the first: six plain steps; or two steps of three tokens.
    assert none.latency_s == pytest.approx([0.060])
    assert fixed.latency_s == pytest.approx([0.024])
    # At batch 1, 2 / 12 is more than 1.6 / 11, 2.3 / 13 more still: all of the ladder.
    assert admitted.latency_s == pytest.approx([0.026])
    assert admitted.num_rows.tolist() == [5, 5]
    assert [side.tokens for side in (none, fixed, admitted)] == [6, 6, 6]
    assert [side.acceptance_length for side in (none, fixed, admitted)] == [1.0, 3.0, 3.0]
    assert fixed.as_dict()["simulated_tokens_per_s"] == 250.0


def test_a_queue_is_first_come_first_served(make_trace: Make) -> None:
    none, *_ = served(make_trace([PERFECT], RANKS), at([0.0, 0.001, 0.002, 1.0]), 1)
    assert none.latency_s == pytest.approx([0.060, 0.119, 0.178, 0.060])
    assert none.elapsed_s == pytest.approx(1.060)  # idle until the last one arrives


def test_a_request_joins_between_steps_and_leaves_alone(make_trace: Make) -> None:
    none, fixed, _ = served(make_trace([PERFECT], RANKS), at([0.0, 0.015]), 2)
    # It comes during the second step and joins the third; the first leaves after its sixth.
    assert none.num_running.tolist() == [1, 1, 2, 2, 2, 2, 1, 1]
    assert none.latency_s == pytest.approx([0.060, 0.065])
    assert fixed.num_running.tolist() == [1, 1, 1, 1]  # the first is gone before it joins


def test_admission_drafts_less_when_more_are_running(make_trace: Make) -> None:
    *_, admitted = served(make_trace([PERFECT], RANKS), at([0.0, 0.0, 0.0]), 2)
    # At batch 2, 3 rows each: 4 / 15 is more than 4.6 / 30. Alone again: 5 rows.
    assert dict(zip(admitted.num_running.tolist(), admitted.num_rows.tolist(), strict=True)) == {
        2: 6,
        1: 5,
    }


@pytest.fixture(scope="module")
def text(make_trace: Make) -> RankTrace:
    rng = np.random.default_rng(0)
    return make_trace([rng.integers(-1, 2, (n, HEADS)).tolist() for n in (1, 9, 30, 2, 17)], RANKS)


@pytest.mark.parametrize("max_batch", [1, 2])
def test_a_fixed_tree_accepts_what_replay_says(text: RankTrace, max_batch: int) -> None:
    workload = Workload.poisson(text, 20.0, 60, seed=3)
    walked = replay(text.documents(workload.documents), Tree.from_paths(LADDER[:2]))
    none, fixed, admitted = served(text, workload, max_batch)
    assert fixed.acceptance_length == walked.acceptance_length > 1
    assert fixed.num_running.sum() == walked.steps.sum()
    assert none.acceptance_length == 1.0
    for side in (none, fixed, admitted):
        assert side.tokens == walked.tokens.sum()
        assert side.num_running.max() <= max_batch
        assert (side.latency_s > 0).all()


def test_under_load_admission_beats_what_it_was_given_to_choose_from(text: RankTrace) -> None:
    """Rows that cost their time at batch 2: the preset's tree of 5 loses to none at all."""
    steep = cost_of({1: {2: 10.1, 5: 10.2}, 2: {2: 19.0, 5: 60.0}})
    workload = Workload.poisson(text, 1000.0, 80, seed=0)
    preset = replace(PRESET, tree_size=5)
    none, fixed, admitted = served(text, workload, 2, cost=steep, preset=preset)
    assert fixed.acceptance_length > admitted.acceptance_length  # which is never the goal
    assert fixed.elapsed_s > none.elapsed_s >= admitted.elapsed_s


def test_a_seed_fixes_the_workload(text: RankTrace) -> None:
    first, again, other = (Workload.poisson(text, 5.0, 400, seed) for seed in (1, 1, 2))
    assert np.array_equal(first.arrival_s, again.arrival_s)
    assert np.array_equal(first.documents, again.documents)
    assert not np.array_equal(first.documents, other.documents)
    assert set(first.documents) == {1, 2, 3, 4}  # the answer of one token needs no step
    # 400 gaps of 0.2 s, give or take four standard errors.
    assert first.arrival_s[-1] == pytest.approx(80, abs=16)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_rates_that_are_none(text: RankTrace, rate: float) -> None:
    with pytest.raises(DataError, match="is not above 0 and finite"):
        Workload.poisson(text, rate, 5, 0)


def test_requests_that_are_none(text: RankTrace, make_trace: Make) -> None:
    with pytest.raises(DataError, match="0 requests are too few"):
        Workload.poisson(text, 1.0, 0, 0)
    with pytest.raises(TraceError, match="there is nothing to serve"):
        Workload.poisson(make_trace([[[0] * HEADS]], RANKS), 1.0, 5, 0)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"max_batch": 0}, DataError, "a batch of at most 0 serves nobody"),
        ({"max_batch": 3}, CostError, "a batch of 3 was not measured"),
        ({"context": 1024}, CostError, "context 1024 was not measured"),
        ({"preset": replace(PRESET, path_probs=None)}, PresetError, "p has no tree.path_probs"),
        (
            {"preset": replace(PRESET, path_probs=(0.6, 0.4, 0.2, 0.3))},
            TableError,
            "rise from 0.2 to 0.3",
        ),
        (
            {"preset": Preset("p", ((3,), (3, 0)), 2, path_probs=(0.9, 0.8))},
            TreeError,
            "uses rank 3",
        ),
        (
            {"cost": cost_of({1: {2: 11.0, 3: 12.0}}), "preset": replace(PRESET, tree_size=4)},
            CostError,
            "no call of 4 rows for 1 requests was measured; the largest has 3",
        ),
    ],
)
def test_what_cannot_be_simulated(
    text: RankTrace, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    options = {"max_batch": 1, **changes}
    with pytest.raises(error, match=message):
        served(text, Workload.poisson(text, 5.0, 9, 0), **options)
