"""The best of a curve: global, smallest of those that are as good, no speculation included."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeopt.curve import SizePoint, best_point, by_situation
from treeopt.replay import Interval


def point(
    tree_size: int, acceptance_length: float, step_ms: float, spread: float = 0.0
) -> SizePoint:
    """Return a point whose length and time are each known to ``spread``, relative."""
    length, step = (
        Interval(value, value / (1 + spread), value * (1 + spread))
        for value in (acceptance_length, step_ms)
    )
    return SizePoint(1, 256, tree_size, length, step)


PLAIN = point(1, 1.0, 10.0)


def test_tokens_per_s() -> None:
    assert point(8, 2.5, 50.0).tokens_per_s.value == pytest.approx(50.0)


def test_intervals_of_length_and_time_add_as_squares() -> None:
    speed = point(8, 2.5, 50.0, spread=0.01).tokens_per_s
    assert speed.high / speed.value == pytest.approx(1.01**2**0.5)
    assert speed.value / speed.low == pytest.approx(1.01**2**0.5)
    exact = point(8, 2.5, 50.0).tokens_per_s
    assert (exact.low, exact.high) == (exact.value, exact.value)


def test_interval_of_tokens_per_s_is_that_of_random_lengths_and_times() -> None:
    rng = np.random.default_rng(0)
    lengths, times = rng.normal(2.5, 0.05, 100_000), rng.normal(50.0, 0.5, 100_000)
    low, high = np.quantile(1000 * lengths / times, [0.025, 0.975])
    known = SizePoint(
        1,
        256,
        8,
        Interval(2.5, 2.5 - 1.96 * 0.05, 2.5 + 1.96 * 0.05),
        Interval(50.0, 50.0 - 1.96 * 0.5, 50.0 + 1.96 * 0.5),
    )
    assert known.tokens_per_s.low == pytest.approx(low, rel=0.002)
    assert known.tokens_per_s.high == pytest.approx(high, rel=0.002)


@pytest.mark.parametrize(
    ("curve", "tree_size"),
    [
        # Two hills: a search that stops at the first valley takes 4.
        (
            [point(4, 2.0, 10.0), point(8, 2.1, 20.0), point(16, 2.6, 12.0), point(32, 2.7, 30.0)],
            16,
        ),
        ([point(4, 2.6, 12.0), point(8, 2.1, 20.0), point(16, 2.0, 10.0)], 4),
        # Equals: the smallest, in whatever order they come.
        ([point(8, 2.0, 8.0), point(16, 2.0, 8.0)], 8),
        ([point(16, 4.0, 16.0), point(8, 2.0, 8.0)], 8),
        # No speculation: a flat length on rising times, a dear machine, an equal one, nothing.
        ([point(2, 1.0, 11.0), point(4, 1.0, 12.0)], 1),
        ([point(4, 2.0, 21.0), point(8, 2.4, 30.0)], 1),
        ([point(4, 2.0, 20.0)], 1),
        ([], 1),
        ([point(4, 2.0, 19.9)], 4),
    ],
)
def test_best_size_is_the_global_best(curve: list[SizePoint], tree_size: int) -> None:
    assert best_point([PLAIN, *curve]).tree_size == tree_size


def test_the_smallest_size_within_the_interval_of_the_best_wins() -> None:
    curve = [point(4, 1.95, 13.0), point(8, 2.0, 13.0), point(16, 2.02, 13.0)]
    assert best_point([PLAIN, *curve]).tree_size == 16
    blurred = [point(p.tree_size, p.acceptance_length.value, 13.0, 0.01) for p in curve]
    assert best_point([PLAIN, *blurred]).tree_size == 8  # 1 % below, 1.4 % is the interval
    blurred = [point(p.tree_size, p.acceptance_length.value, 13.0, 0.03) for p in curve]
    assert best_point([PLAIN, *blurred]).tree_size == 4
    # Also against plain decoding: a gain that is not sure is no gain.
    assert best_point([PLAIN, point(4, 1.32, 13.0, 0.03)]).tree_size == 1
    assert best_point([PLAIN, point(4, 1.32, 13.0, 0.005)]).tree_size == 4


@given(
    st.lists(
        st.tuples(st.floats(1, 4), st.floats(5, 50), st.floats(0, 0.1)), min_size=1, max_size=8
    )
)
def test_nothing_is_surely_faster_than_the_best(values: list[tuple[float, float, float]]) -> None:
    points = [PLAIN] + [point(2 + i, *value) for i, value in enumerate(values)]
    best = best_point(points)
    most = max(points, key=lambda p: p.tokens_per_s.value).tokens_per_s
    assert most.low <= best.tokens_per_s.value <= most.value
    for p in points:
        if p.tree_size < best.tree_size:
            assert p.tokens_per_s.value < most.low


def test_rows_round_trip() -> None:
    known = point(8, 2.5, 50.0, spread=0.01)
    row = known.as_row()
    assert (row["acceptance_length"], row["step_high_ms"]) == (2.5, 50.5)
    assert SizePoint.from_row(row).as_row() == row


def test_points_by_situation() -> None:
    other = SizePoint(4, 256, 8, Interval(2, 2, 2), Interval(9, 9, 9))
    assert by_situation([PLAIN, other, point(4, 2.0, 20.0)]) == {
        (1, 256): [PLAIN, point(4, 2.0, 20.0)],
        (4, 256): [other],
    }
    assert by_situation([]) == {}


def test_redrafter_staircase_beats_acceptance() -> None:
    # apple/ml-recurrent-drafter at bd8586b, Apache-2.0,
    # recurrent_drafting/mlx/experiments/m2-ultra: M2 Ultra, fp16, greedy. Beam width, length,
    # ms per step and the steps that 200 tokens took.
    table = [
        (1, 3, 37.5, 110),
        (1, 5, 40.9, 85),
        (2, 4, 40.8, 84),
        (3, 4, 41.7, 82),
        (3, 5, 44.5, 78),
        (4, 3, 39.8, 92),
        (4, 4, 82.5, 82),
        (4, 5, 86.2, 78),
    ]
    curve = [point(width * length, 200 / steps, ms) for width, length, ms, steps in table]
    plain = point(1, 1.0, 37.5)  # no plain step is given; it is no faster than this
    best = best_point([plain, *curve])
    assert best == point(3 * 4, 200 / 82, 41.7)
    assert 1000 * 200 / best.tokens_per_s.value == pytest.approx(3423, abs=5)  # ms for 200 tokens
    dear = curve[6]
    assert 1000 * 200 / dear.tokens_per_s.value == pytest.approx(6766, abs=5)
    assert dear.acceptance_length == best.acceptance_length
    # The longest acceptance of all is not worth it either.
    assert max(p.acceptance_length.value for p in curve) > best.acceptance_length.value


def test_sequoia_choice_of_size(data: Path) -> None:
    # Infini-AI-Lab/Sequoia at 0ff3ff7, demo-config.json: a step takes depth * draft_time +
    # target_time[budget]; its published choice is 4 nodes at 4 levels.
    demo = json.loads((data / "sequoia_demo.json").read_text())
    config, choice = demo["config"], demo["published_choice"]
    curve = [
        point(budget, expected, levels * config["draft_time"] + target)
        for budget, target in zip(config["valid_budget"], config["target_time"], strict=True)
        for levels, expected in enumerate(demo["expected_length"][str(budget)])
        if expected is not None
    ]
    plain_ms = config["target_time"][0]
    best = best_point([point(1, 1.0, plain_ms), *curve])
    assert best.tree_size == choice["budget"]
    assert best.step_ms.value == choice["depth"] * config["draft_time"] + 10
    assert 1000 / best.tokens_per_s.value == pytest.approx(choice["time_per_token"], abs=2e-4)
    assert plain_ms * best.tokens_per_s.value / 1000 == pytest.approx(choice["speedup"], abs=2e-4)
