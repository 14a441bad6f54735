"""Replay against a walk taken step by step, and the intervals around it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeopt.errors import TraceError, TreeError
from treeopt.replay import (
    Interval,
    Replay,
    accepted_at,
    bootstrap,
    difference,
    intervals,
    replay,
    step_starts,
)
from treeopt.trace import MISSED, RankTrace, concatenate
from treeopt.tree import Tree

Make = Callable[..., RankTrace]
TreePath = tuple[int, ...]

HEADS, RANKS = 3, 3
ROW = st.lists(st.integers(MISSED, RANKS - 1), min_size=HEADS, max_size=HEADS)
DOCUMENTS = st.lists(st.lists(ROW, min_size=1, max_size=12), min_size=1, max_size=4).filter(
    lambda documents: max(map(len, documents)) > 1
)
PATHS = st.sets(
    st.lists(st.integers(0, RANKS - 1), min_size=1, max_size=HEADS).map(tuple), max_size=6
).map(lambda paths: {path[:end] for path in paths for end in range(1, len(path) + 1)})

CHAIN = Tree.from_paths([(0,), (0, 0), (0, 0, 0)])
STAR = Tree.from_paths([(0,), (1,), (2,)])
ROOT_ONLY = Tree.from_paths([])
PERFECT = [[0] * HEADS] * 10


def walk(rows: list[list[int]], paths: set[TreePath]) -> list[int]:
    """Return the draft tokens accepted in each step of decoding one document."""
    accepted, position = [], 0
    while position < len(rows) - 1:
        path: TreePath = ()
        while position + len(path) + 1 < len(rows) and len(path) < HEADS:
            longer = (*path, rows[position][len(path)])
            if longer not in paths:
                break
            path = longer
        accepted.append(len(path))
        position += len(path) + 1
    return accepted


@given(documents=DOCUMENTS, paths=PATHS)
def test_replay_is_the_walk(
    make_trace: Make, documents: list[list[list[int]]], paths: set[TreePath]
) -> None:
    result = replay(make_trace(documents, RANKS), Tree.from_paths(paths))
    walked = [walk(rows, paths) for rows in documents]
    assert result.steps.tolist() == [len(steps) for steps in walked]
    assert result.num_accepted.tolist() == [accepted for steps in walked for accepted in steps]
    assert result.tokens.tolist() == [len(rows) - 1 for rows in documents]
    tokens = sum(len(rows) - 1 for rows in documents)
    assert result.acceptance_length == tokens / sum(map(len, walked))
    # A step emits what it accepts and one token of the backbone's own, which the end may cut off.
    for rows, steps in zip(documents, walked, strict=True):
        assert sum(steps) + len(steps) - (len(rows) - 1) in (0, 1)


@given(documents=DOCUMENTS, paths=PATHS, more=PATHS)
def test_a_larger_tree_never_accepts_less_anywhere(
    make_trace: Make, documents: list[Any], paths: set[TreePath], more: set[TreePath]
) -> None:
    trace = make_trace(documents, RANKS)
    small = accepted_at(trace, Tree.from_paths(paths))
    large = accepted_at(trace, Tree.from_paths(paths | more))
    assert (large >= small).all()


@given(documents=DOCUMENTS, paths=PATHS)
def test_nothing_is_accepted_past_the_end(
    make_trace: Make, documents: list[Any], paths: set[TreePath]
) -> None:
    trace = make_trace(documents, RANKS)
    accepted = accepted_at(trace, Tree.from_paths(paths))
    assert (accepted <= trace.num_scored).all()
    starts = step_starts(trace, accepted)
    assert not starts[trace.doc_start[1:] - 1].any()


@given(documents=st.lists(st.lists(ROW, min_size=2, max_size=6), min_size=2, max_size=5))
def test_shards_do_not_matter(make_trace: Make, documents: list[Any]) -> None:
    trace = make_trace(documents, RANKS)
    whole = replay(trace, CHAIN)
    shards = [trace.documents([index]) for index in range(len(documents))]
    joined = replay(concatenate(shards), CHAIN)
    for name in ("tokens", "steps", "num_accepted"):
        assert np.array_equal(getattr(joined, name), getattr(whole, name))
        parts = np.concatenate([getattr(replay(shard, CHAIN), name) for shard in shards])
        assert np.array_equal(parts, getattr(whole, name))


def test_chunks_do_not_matter(make_trace: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    trace = make_trace(rng.integers(MISSED, RANKS, (3, 40, HEADS)).tolist(), RANKS)
    whole = accepted_at(trace, CHAIN)
    assert whole.any()
    monkeypatch.setattr(importlib.import_module("treeopt.replay"), "_CHUNK", 7)
    assert np.array_equal(accepted_at(trace, CHAIN), whole)


# Shapes by hand.


@pytest.mark.parametrize(
    ("tree", "accepted"),
    [
        (CHAIN, [3, 3, 1]),  # 9 tokens: 4 + 4 + 1; the end cuts off the last step
        (Tree.from_paths([(0,), (0, 0)]), [2, 2, 2]),
        (STAR, [1, 1, 1, 1, 1]),
        (ROOT_ONLY, [0] * 9),
        (Tree.from_paths([(1,), (1, 0)]), [0] * 9),
    ],
    ids=["chain", "short chain", "star", "root only", "wrong rank"],
)
def test_perfect_heads(make_trace: Make, tree: Tree, accepted: list[int]) -> None:
    result = replay(make_trace([PERFECT], RANKS), tree)
    assert result.num_accepted.tolist() == accepted
    assert result.acceptance_length == 9 / len(accepted)


def test_example_tree_by_hand(make_trace: Make, tree: Tree) -> None:
    rows = [
        [0, 1, 2],  # (0, 1) is a leaf: two accepted, on to position 3
        [0, 0, 0],
        [0, 0, 0],
        [1, 0, 0],  # (1,) is a leaf: one accepted, on to 5
        [0, 0, 0],
        [2, 0, 0],  # rank 2 is not in the tree: none accepted, on to 6
        [0, 0, 0],  # (0, 0, 0), on to 10
        [0, 0, 0],
        [0, 0, 0],
        [0, 0, 0],
        [0, 0, 0],  # only two heads can score here: two accepted, at the end
        [0, 0, 0],
        [0, 0, 0],
    ]
    assert replay(make_trace([rows], RANKS), tree).num_accepted.tolist() == [2, 1, 0, 3, 2]


def test_documents_of_one_token_need_no_step(make_trace: Make) -> None:
    trace = make_trace([[[0] * HEADS], PERFECT, [[0] * HEADS]], RANKS)
    result = replay(trace, CHAIN)
    assert result.tokens.tolist() == [0, 9, 0]
    assert result.steps.tolist() == [0, 3, 0]
    assert result.acceptance_length == 3.0
    assert result.interval().value == 3.0


def test_documents_without_a_step_never_shorten_the_interval(make_trace: Make) -> None:
    trace = make_trace([PERFECT, *[[[0] * HEADS]] * 4], RANKS)
    result = replay(trace, CHAIN)
    assert result.interval().low == 1.0  # of resamples that leave the one long document out
    assert difference(replay(trace, ROOT_ONLY), result) == Interval(2.0, 0.0, 2.0)


def test_nothing_to_replay(make_trace: Make) -> None:
    with pytest.raises(TraceError, match="no document has more than one token"):
        replay(make_trace([[[0] * HEADS]] * 3, RANKS), CHAIN)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)], "4 deep but there are only 3 heads"),
        ([(RANKS,)], "uses rank 3; only ranks below 3 are known"),
    ],
)
def test_tree_that_the_trace_cannot_judge(
    make_trace: Make, paths: list[TreePath], message: str
) -> None:
    with pytest.raises(TreeError, match=message):
        replay(make_trace([PERFECT], RANKS), Tree.from_paths(paths))


# Published counts.


@pytest.mark.parametrize(
    ("backbone", "length", "low", "high"),
    [("7b", 2.565, 2.49, 2.64), ("13b", 2.639, 2.56, 2.71), ("33b", 2.514, 2.44, 2.59)],
)
def test_mt_bench_lengths_and_intervals(
    data: Path, backbone: str, length: float, low: float, high: float
) -> None:
    # FasterDecoding/Medusa at e2a5d20c, llm_judge/data/mt_bench/model_answer, Apache-2.0: tokens
    # and steps of 80 questions; the intervals were bootstrapped over questions elsewhere.
    figures = json.loads((data / "medusa_figures.json").read_text())
    tokens, steps = np.array(figures["mt_bench_tokens_and_steps"][backbone]).T
    interval = Replay(tokens, steps, np.zeros(0, dtype=np.int64)).interval()
    assert interval.value == pytest.approx(length, abs=5e-4)
    assert interval.low == pytest.approx(low, abs=0.011)
    assert interval.high == pytest.approx(high, abs=0.011)


# Intervals.


@pytest.fixture(scope="module")
def long_trace(make_trace: Make) -> RankTrace:
    rng = np.random.default_rng(1)
    lengths = rng.integers(2, 60, 30)
    return make_trace([rng.integers(MISSED, 2, (n, HEADS)).tolist() for n in lengths], RANKS)


def test_interval_contains_the_value_and_is_repeatable(long_trace: RankTrace) -> None:
    result = replay(long_trace, CHAIN)
    interval = result.interval()
    assert interval.low < interval.value < interval.high
    assert interval.value == result.acceptance_length
    assert replay(long_trace, CHAIN).interval() == interval


def test_interval_of_one_document_has_no_width(make_trace: Make) -> None:
    assert replay(make_trace([PERFECT], RANKS), CHAIN).interval() == Interval(3.0, 3.0, 3.0)


def test_interval_is_the_central_95_percent() -> None:
    # The mean of 400 numbers of variance 1 lies within 1.96 / 20 of its own mean.
    numbers = np.random.default_rng(2).normal(size=400)
    numbers = (numbers - numbers.mean()) / numbers.std()
    interval = bootstrap(lambda documents: float(numbers[documents].mean()), 400)
    assert interval.value == pytest.approx(0, abs=1e-12)
    assert interval.low == pytest.approx(-0.098, abs=0.006)
    assert interval.high == pytest.approx(0.098, abs=0.006)


def test_seed_is_part_of_the_interval() -> None:
    numbers = np.random.default_rng(3).normal(size=50)
    first, second = (
        bootstrap(lambda documents: float(numbers[documents].mean()), 50, seed) for seed in (0, 1)
    )
    assert first.value == second.value
    assert first != second


def test_intervals_of_many_replays_are_those_of_each(long_trace: RankTrace) -> None:
    replays = [replay(long_trace, tree) for tree in (CHAIN, STAR, ROOT_ONLY)]
    for one, found in zip(replays, intervals(replays), strict=True):
        expected = bootstrap(one._length_of, len(one.tokens))
        for name in ("value", "low", "high"):
            assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-12)


def test_difference_with_itself_is_nothing(long_trace: RankTrace) -> None:
    result = replay(long_trace, CHAIN)
    assert difference(result, result) == Interval(0.0, 0.0, 0.0)


def test_difference_is_paired(long_trace: RankTrace) -> None:
    """The difference of two trees on the same text is known better than either length."""
    small, large = replay(long_trace, Tree.from_paths([(0,)])), replay(long_trace, CHAIN)
    gain, loss = difference(small, large), difference(large, small)
    assert gain.value == pytest.approx(large.acceptance_length - small.acceptance_length)
    assert gain.low > 0
    assert (loss.value, loss.low, loss.high) == pytest.approx((-gain.value, -gain.high, -gain.low))
    alone = large.interval()
    assert gain.high - gain.low < alone.high - alone.low
