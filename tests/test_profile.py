"""Measured step costs: every situation, in turns, each step where it should be, edges found."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import CONTEXT, VOCAB, random_heads, shared_backbone, tiny_backbone
from torch import Tensor

from calibration.profile import (
    COARSE,
    RESOLUTION,
    both_sides_of_edges,
    doubts,
    median_interval,
    profile,
    profile_tree,
    take_turns,
)
from treeopt.cost import StepCost, StepTime
from treeopt.decoder.tree import TreeDecoder
from treeopt.errors import CostError
from treeopt.models.backbone import Backbone

SIZES, CONTEXTS = (1, 2, 6), (16, 40)


def measured(**options: Any) -> tuple[StepCost, int]:
    calls: list[None] = []
    settings = {"sizes": SIZES, "contexts": CONTEXTS, "rounds": 3, **options}
    backbone = settings.pop("backbone", shared_backbone())
    cost = profile(
        backbone, random_heads(backbone, 3), on_step=lambda: calls.append(None), **settings
    )
    return cost, len(calls)


def test_every_situation_is_measured_plain_first():
    cost, calls = measured()
    assert [(t.batch, t.context, t.tree_size) for t in cost.times] == [
        (1, context, size) for context in CONTEXTS for size in (0, *SIZES)
    ]
    assert all(0 < t.low_ms <= t.step_ms <= t.high_ms for t in cost.times)
    assert {t.repeats for t in cost.times} == {3}
    assert calls == 2 * 4 * (1 + 3)  # each step warms up once
    assert cost.measured
    assert cost.machine["backbone_sha256"] == shared_backbone().sha256
    assert cost.machine["heads"] == "new"
    assert cost.machine["dtype"] == "float32"
    assert cost.machine["threads"] >= 1


def test_batches_are_measured_too_and_cost_more_rows():
    cost, calls = measured(batches=(1, 3), contexts=(16,))
    assert [(t.batch, t.context, t.tree_size) for t in cost.times] == [
        (batch, 16, size) for batch in (1, 3) for size in (0, *SIZES)
    ]
    assert calls == 2 * 4 * (1 + 3)
    assert cost.situations() == [(1, 16), (3, 16)]


def test_sizes_take_turns_at_the_same_place(monkeypatch):
    seen: list[tuple[int, int]] = []
    forward = Backbone.forward

    def watched(
        self: Backbone, ids: Tensor, cache: Any, where: Any = None, mask: Any = None
    ) -> Any:
        seen.append((cache.length, ids.shape[1]))
        return forward(self, ids, cache, where, mask)

    monkeypatch.setattr(Backbone, "forward", watched)
    measured(contexts=(16,), rounds=2)
    assert seen[:2] == [(0, 16)] * 2  # both sides' prefill
    turns = [sorted(seen[first : first + 4]) for first in range(2, len(seen), 4)]
    # plain, 1, 2 and 6 rows: once to warm up, then two rounds
    assert turns == [[(16, 1), (16, 1), (16, 2), (16, 6)]] * 3


def test_cost_file_round_trip(tmp_path):
    cost, _ = measured(rounds=1)
    cost.save(tmp_path / "cost.json")
    assert StepCost.load(tmp_path / "cost.json") == cost


def test_contexts_without_room_for_the_largest_tree_are_refused():
    measured(contexts=(CONTEXT - 6,), rounds=1)
    with pytest.raises(CostError, match=f"^context {CONTEXT - 5} and a tree of 6 exceed the"):
        measured(contexts=(16, CONTEXT - 5))
    with pytest.raises(CostError, match="exceed the backbone's 30"):
        measured(backbone=tiny_backbone("mistral", sliding_window=30))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 12, VOCAB])
@pytest.mark.parametrize("num_heads", [1, 3, 5])
def test_profile_trees_have_the_size_asked_for_and_use_every_head(size, num_heads):
    tree = profile_tree(size, num_heads)
    assert tree.tree_size == size
    assert tree.depth == min(num_heads, size - 1)
    TreeDecoder(shared_backbone(), random_heads(shared_backbone(), num_heads), tree)


# Edges of the staircase, found with steps that only pretend to take time.


def noisy(time_ms: Callable[[int], float], spread: float) -> Callable[[int], float]:
    rng = random.Random(0)
    return lambda size: time_ms(size) * rng.gauss(1, spread)


def tiles_of_16(size: int) -> float:
    """A staircase of tiles with a cliff behind 40 rows."""
    return 10 + 2 * math.ceil(size / 16) + (8 if size > 40 else 0)


@pytest.mark.parametrize("spread", [0.0, 0.01])
def test_both_sides_of_every_edge_are_found(spread: float) -> None:
    sizes = both_sides_of_edges(noisy(tiles_of_16, spread), COARSE)
    assert {16, 17, 32, 33, 40, 41, 48, 49} <= sizes
    assert set(COARSE) <= sizes
    # Bisection: on each of the five flats few sizes but those that led to an edge.
    assert len(sizes) < 25


def test_a_flat_curve_needs_no_more_sizes() -> None:
    assert both_sides_of_edges(noisy(lambda size: 10.0, 0.02), COARSE) == set(COARSE)


def test_times_may_fall_at_an_edge() -> None:
    sizes = both_sides_of_edges(lambda size: 12.0 if size % 2 else 10.0, (1, 2, 8, 9))
    assert sizes == {1, 2, 8, 9}
    sizes = both_sides_of_edges(lambda size: 12.0 if size < 6 else 10.0, (1, 8))
    assert {5, 6} <= sizes


@given(steps=st.lists(st.floats(0, 0.5), min_size=64, max_size=64))
def test_neighbours_are_adjacent_or_flat(steps: list[float]) -> None:
    """On any rising curve nothing unmeasured is dearer or cheaper than its neighbours by much."""
    curve = np.cumprod(1 + np.array([0.0, *steps])).tolist()
    sizes = sorted(both_sides_of_edges(curve.__getitem__, COARSE))
    for low, high in itertools.pairwise(sizes):
        assert high - low == 1 or curve[high] <= (1 + RESOLUTION) * curve[low]


def test_the_default_sizes_are_searched_for() -> None:
    backbone = tiny_backbone(max_position_embeddings=256)
    cost, _ = measured(backbone=backbone, sizes=None, contexts=(16,), rounds=1)
    assert set(COARSE) <= set(cost.sizes(1, 16))
    with pytest.raises(CostError, match="a tree of 64 exceed the backbone's"):
        measured(backbone=backbone, sizes=None, contexts=(200,))


def test_turns_are_taken_in_another_order_each_round() -> None:
    seen: list[int] = []

    def timed(size: int) -> float:
        seen.append(size)
        return float(len(seen))

    values = take_turns(timed, {4, 0, 2, 1}, 8)
    assert list(values) == [0, 1, 2, 4]
    assert seen[:4] == [0, 1, 2, 4]
    turns = [tuple(seen[first : first + 4]) for first in range(4, len(seen), 4)]
    assert {tuple(sorted(turn)) for turn in turns} == {(0, 1, 2, 4)}
    assert len(set(turns)) > 4
    assert values[0] == [float(i + 1) for i, size in enumerate(seen) if size == 0 and i >= 4]


# Medians and their doubts.


@pytest.mark.parametrize(
    ("count", "bounds"),
    # From tables of the sign test: 95 % bounds are the k-th smallest and largest of n values.
    [(6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (12, (3, 10)), (15, (4, 12)), (25, (8, 18))],
)
def test_median_interval_is_that_of_the_sign_test(count: int, bounds: tuple[int, int]) -> None:
    assert median_interval(random.Random(0).sample(range(1, count + 1), count)) == bounds


def test_few_values_bound_the_median_by_their_extremes() -> None:
    assert median_interval([3.0]) == (3.0, 3.0)
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)


def test_median_interval_holds_the_median_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    draws = np.sort(rng.exponential(size=(4000, 15)), axis=1)  # of median ln 2, and lopsided
    bounds = [median_interval(row) for row in draws.tolist()]
    share = np.mean([low <= math.log(2) <= high for low, high in bounds])
    assert 0.95 <= share <= 0.975


def time_of(step_ms: float, half_width: float) -> StepTime:
    return StepTime(1, 16, 4, step_ms, step_ms - half_width, step_ms + half_width, 9)


def test_a_quiet_machine_raises_no_doubt() -> None:
    assert doubts([10.0, 10.2, 9.9, 10.1, 10.0, 10.3], [time_of(10, 0.2), time_of(20, 0.4)]) == []


def test_a_noisy_machine_is_said() -> None:
    steady = [10.0] * 6
    (drift,) = doubts([10.0, 10.0, 10.5, 11.0, 12.0, 12.0], [time_of(10, 0.1)])
    assert drift == (
        "the machine's speed drifts: a plain step took 10.0 ms at first, 12.0 ms at last"
    )
    (wide,) = doubts(steady, [time_of(10, 0.1), time_of(10, 1.0), time_of(10, 2.0)])
    assert wide.startswith("the machine is noisy: medians are known to 10% only")
    assert doubts(steady, [time_of(10, 0.1), time_of(10, 0.1), time_of(10, 5.0)]) == []


def test_doubts_name_the_situation(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("calibration.profile.doubts", lambda plain, times: [f"{len(times)} times"])
    measured(rounds=1, on_warning=said.append)
    assert said == [f"batch 1, context {context}: 4 times" for context in CONTEXTS]
