"""From a trace to a preset: held-out prediction, choice of size, the same bytes twice."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from treeopt.acceptance import JointAcceptance
from treeopt.build import (
    LADDER_SIZE,
    Request,
    SizePoint,
    best_size,
    held_out_replays,
    predict,
    preset_from_rates,
    preset_from_trace,
    size_curve,
    with_best_sizes,
)
from treeopt.cost import StepCost, StepTime
from treeopt.errors import CostError, PresetError, TraceError, TreeError
from treeopt.files import sha256_of_file
from treeopt.preset import Preset, parse_preset
from treeopt.replay import accepted_at, replay
from treeopt.search import Ladder, grow
from treeopt.trace import MISSED, RankTrace
from treeopt.tree import Tree

Make = Callable[..., RankTrace]

HEADS, RANKS = 3, 4
CHAIN = Tree.from_paths([(0,), (0, 0), (0, 0, 0)])
RATES = np.array([[0.6, 0.2, 0.1], [0.4, 0.2, 0.05], [0.3, 0.1, 0.05]])


@pytest.fixture(scope="module")
def trace(make_trace: Make) -> RankTrace:
    """Twelve documents of heads that are right in runs, most often with rank 0."""
    rng = np.random.default_rng(0)
    documents = []
    for length in rng.integers(20, 60, 12):
        ranks = rng.choice([0, 1, 2, 3, MISSED], (length, HEADS), p=[0.5, 0.15, 0.08, 0.02, 0.25])
        ranks[rng.random(length) < 0.3] = MISSED
        documents.append(ranks.tolist())
    return make_trace(documents, RANKS)


@pytest.fixture
def file(tmp_path: Path, trace: RankTrace) -> Path:
    trace.save(tmp_path / "calibration.safetensors")
    return tmp_path / "calibration.safetensors"


@pytest.fixture
def preset(trace: RankTrace, file: Path) -> Preset:
    return preset_from_trace(trace, file, Request(24), name="mine", command="treeopt build")


def costs(times: dict[int, float], **machine: object) -> StepCost:
    rows = [StepTime(1, 256, size, ms, ms, ms, 5) for size, ms in times.items()]
    return StepCost(tuple(rows), {"backbone": "tiny", "backbone_sha256": "b" * 64, **machine})


# Held-out replay.


def lengths(trace: RankTrace) -> list[int]:
    return np.diff(trace.doc_start).tolist()


def ladder(depth: int) -> Ladder:
    """A chain of rank 0."""
    return Ladder(tuple((0,) * d for d in range(1, depth + 1)), np.ones(depth))


def test_no_tree_is_judged_by_a_document_that_made_it(make_trace: Make) -> None:
    # Documents are told apart by their length; everything is right at rank 0.
    trace = make_trace([[[0] * 5] * (7 + index) for index in range(11)])
    seen: list[set[int]] = []

    def ladder_of(part: RankTrace) -> Ladder:
        seen.append(set(lengths(part)))
        return ladder(len(seen))  # so the steps tell which ladder a document met

    (held_out,) = held_out_replays(trace, ladder_of, [6])
    for index, length in enumerate(lengths(trace)):
        fold = index % 5  # dealt in turn: neighbours, maybe of one category, are parted
        depth = fold + 1
        assert held_out.steps[index] == math.ceil((length - 1) / (depth + 1))
        assert [length in training for training in seen] == [f != fold for f in range(5)]


def test_held_out_replay_with_one_tree_is_the_replay(trace: RankTrace) -> None:
    held_out = held_out_replays(trace, lambda part: ladder(3), [1, 4])
    for found, tree in zip(held_out, (Tree.from_paths([]), CHAIN), strict=True):
        whole = replay(trace, tree)
        assert np.array_equal(found.tokens, whole.tokens)
        assert np.array_equal(found.steps, whole.steps)
        assert np.array_equal(found.num_accepted, whole.num_accepted)


def test_a_fold_of_single_tokens_is_no_obstacle(make_trace: Make) -> None:
    trace = make_trace([[[0] * 3] * (1 if index % 5 == 0 else 9) for index in range(10)])
    (held_out,) = held_out_replays(trace, lambda part: ladder(3), [4])
    assert held_out.steps.tolist() == [0, 2, 2, 2, 2] * 2


def test_too_few_documents(trace: RankTrace) -> None:
    few = trace.documents(range(4))
    with pytest.raises(TraceError, match="4 documents are too few to hold some out; 5 are needed"):
        held_out_replays(few, lambda part: ladder(3), [4])
    (enough,) = held_out_replays(trace.documents(range(5)), lambda part: ladder(3), [4])
    assert enough.tokens.shape == (5,)


def test_prediction_is_not_in_sample(make_trace: Make) -> None:
    """Documents that share nothing: a tree fits those it saw and none that it did not."""
    trace = make_trace([[[rank] * HEADS] * 12 for rank in range(5)], num_ranks=5)
    tree = grow(JointAcceptance(trace), 6).tree(6)
    assert replay(trace, tree).acceptance_length > 1.5
    predicted = predict(trace, Request(6))
    assert (predicted.value, predicted.low, predicted.high) == (1.0, 1.0, 1.0)


def test_predict_grows_each_tree_under_the_request(
    trace: RankTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees: list[Tree] = []

    def spy(part: RankTrace, tree: Tree) -> object:
        trees.append(tree)
        return accepted_at(part, tree)

    monkeypatch.setattr(importlib.import_module("treeopt.build"), "accepted_at", spy)
    predict(trace, Request(7, "independent", max_depth=2, max_ranks=2))
    assert [tree.tree_size for tree in trees] == [7] * 5  # all 6 paths there are, and the root
    predict(trace, Request(5, "joint", max_depth=1))
    assert [(tree.tree_size, tree.depth) for tree in trees[5:]] == [(5, 1)] * 5


# The best size.


def point(tree_size: int, acceptance_length: float, step_ms: float) -> SizePoint:
    return SizePoint(tree_size, acceptance_length, step_ms)


def test_tokens_per_s() -> None:
    assert point(8, 2.5, 50.0).tokens_per_s == pytest.approx(50.0)


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
    assert best_size(curve, plain_ms=10.0).tree_size == tree_size


def test_no_speculation_costs_a_plain_step() -> None:
    assert best_size([point(4, 2.0, 30.0)], plain_ms=10.0) == point(1, 1.0, 10.0)


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
    best = best_size(curve, plain_ms=37.5)  # no plain step is given; it is no faster than this
    assert best == point(3 * 4, 200 / 82, 41.7)
    assert 1000 * 200 / best.tokens_per_s == pytest.approx(3423, abs=5)  # ms for 200 tokens
    dear = curve[6]
    assert 1000 * 200 / dear.tokens_per_s == pytest.approx(6766, abs=5)
    assert dear.acceptance_length == best.acceptance_length
    # The longest acceptance of all is not worth it either.
    assert max(curve, key=lambda p: p.acceptance_length).acceptance_length > best.acceptance_length


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
    best = best_size(curve, plain_ms)
    assert best.tree_size == choice["budget"]
    assert best.step_ms == choice["depth"] * config["draft_time"] + 10
    assert 1000 / best.tokens_per_s == pytest.approx(choice["time_per_token"], abs=2e-4)
    assert plain_ms * best.tokens_per_s / 1000 == pytest.approx(choice["speedup"], abs=2e-4)


# Presets.


def test_preset_from_trace_says_where_it_comes_from(
    trace: RankTrace, file: Path, preset: Preset
) -> None:
    ladder = grow(JointAcceptance(trace), LADDER_SIZE)
    assert preset.ladder == ladder.paths
    assert preset.path_probs == tuple(round(prob, 6) for prob in ladder.probs)
    assert preset.tree_size == 24
    assert preset.tree == ladder.tree(24)
    assert preset.backbone == {"id": "tiny", "sha256": "b" * 64}
    assert preset.heads == {
        "id": "tiny-heads",
        "sha256": "c" * 64,
        "num_heads": HEADS,
        "layout": "shared_lm_head",
    }
    assert preset.decoding == {"rule": "greedy"}
    assert preset.calibration == {
        "sha256": sha256_of_file(file),
        "data": "prompts.jsonl",
        "documents": 12,
        "positions": trace.num_positions,
        "num_ranks": RANKS,
        "template_sha256": "e" * 64,
    }
    assert preset.provenance is not None
    assert preset.provenance["command"] == "treeopt build"
    assert (preset.imported, preset.measured, preset.sizes) == (None, (), ())


def test_prediction_is_the_held_out_interval(trace: RankTrace, preset: Preset) -> None:
    interval = predict(trace, Request(24))
    assert preset.predicted == {
        "acceptance_length": round(interval.value, 4),
        "low": round(interval.low, 4),
        "high": round(interval.high, 4),
        "method": "replay",
        "held_out": True,
    }
    assert 1 < interval.low < interval.value < interval.high < 1 + HEADS


def test_preset_passes_its_own_schema(preset: Preset) -> None:
    assert parse_preset(preset.to_yaml(), "mine.yaml") == preset


def test_same_inputs_give_the_same_text(
    tmp_path: Path, trace: RankTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for number, created in enumerate(("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z")):
        monkeypatch.setattr(importlib.import_module("treeopt.build"), "now", lambda c=created: c)
        file = tmp_path / f"{number}.safetensors"
        trace.documents(range(trace.num_documents)).save(file)
        made = preset_from_trace(file=file, trace=RankTrace.load(file), request=Request(16),
                                 name="mine", command="treeopt build")  # fmt: skip
        texts.append(made.to_yaml())
        assert created in texts[-1]
    first, second = texts
    assert first != second
    assert first.replace("2026-01-01", "2026-01-02") == second


def test_limits_of_the_request(trace: RankTrace, file: Path) -> None:
    request = Request(1000, "independent", max_depth=2, max_ranks=3)
    made = preset_from_trace(trace, file, request, name="mine", command="x")
    assert made.tree_size == len(made.ladder) + 1 == 1 + 3 + 9  # all there is
    assert made.tree.depth == 2
    assert made.tree.num_ranks == 3


@pytest.mark.parametrize("tree_size", [0, -1])
def test_budget_without_a_root(trace: RankTrace, file: Path, tree_size: int) -> None:
    with pytest.raises(TreeError, match=f"tree_size {tree_size} is not between 1 and"):
        preset_from_trace(trace, file, Request(tree_size), name="mine", command="x")
    with pytest.raises(PresetError, match=f"tree_size is {tree_size}; the ladder allows 1 to"):
        preset_from_rates(RATES, Request(tree_size), name="mine", command="x")


def test_preset_from_rates() -> None:
    made = preset_from_rates(RATES, Request(6), name="table", command="treeopt build")
    assert made.ladder[:5] == ((0,), (0, 0), (1,), (0, 1), (2,))
    assert made.path_probs is not None
    assert made.path_probs[:5] == (0.6, 0.24, 0.2, 0.12, 0.1)
    assert len(made.ladder) == 3 + 9 + 27
    assert made.tree_size == 6
    assert made.predicted == {
        "acceptance_length": 2.26,
        "method": "independence",
        "held_out": False,
    }
    assert (made.backbone, made.heads, made.calibration) == (None, None, None)
    assert parse_preset(made.to_yaml(), "mine.yaml") == made


def test_preset_from_rates_ends_with_its_paths() -> None:
    made = preset_from_rates(np.array([[0.5, 0.0]]), Request(64), name="a", command="x")
    assert (made.ladder, made.tree_size) == (((0,),), 2)
    assert made.predicted is not None
    assert made.predicted["acceptance_length"] == 1.5


# The size under a cost.


def test_size_curve_is_replay_over_measured_time(trace: RankTrace, preset: Preset) -> None:
    cost = costs({0: 10.0, 1: 10.5, 8: 11.0, 24: 12.0, 100_000: 99.0})
    curve = size_curve(trace, preset, Request(24), cost, (1, 256))
    assert [p.tree_size for p in curve] == [1, 8, 24]  # the ladder has no tree of 100000
    for p in curve:
        assert p.acceptance_length == predict(trace, Request(p.tree_size)).value  # held out
        assert p.step_ms == cost.step_ms(p.tree_size, 1, 256)
    assert [p.acceptance_length for p in curve] == sorted(p.acceptance_length for p in curve)


def test_with_best_sizes_fills_the_cut_table(trace: RankTrace, preset: Preset) -> None:
    rows = [
        StepTime(1, 256, size, ms, ms, ms, 5)
        for size, ms in {0: 10, 4: 10.1, 8: 30, 40: 10.3}.items()
    ] + [
        StepTime(4, 256, size, ms, ms, ms, 5)
        for size, ms in {0: 10, 4: 10.1, 8: 30, 40: 60}.items()
    ]
    cost = StepCost(tuple(rows), {"backbone": "tiny", "backbone_sha256": "b" * 64})
    cut = with_best_sizes(preset, trace, cost, Request(24))
    assert cut.sizes == (
        {"batch": 1, "context": 256, "tree_size": 40},
        {"batch": 4, "context": 256, "tree_size": 4},
    )
    assert cut.tree_size == 40
    assert cut.ladder == preset.ladder
    interval = predict(trace, Request(40))
    assert cut.predicted is not None
    assert cut.predicted["acceptance_length"] == round(interval.value, 4)
    assert parse_preset(cut.to_yaml(), "mine.yaml") == cut
    assert preset.sizes == ()


def test_sizes_for_a_modelled_machine_say_so(trace: RankTrace, preset: Preset) -> None:
    rows = tuple(
        StepTime(1, 256, size, ms, ms, ms, 0) for size, ms in {0: 10, 4: 10.1, 8: 30}.items()
    )
    cost = StepCost(rows, {"device": "h100"}, measured=False)  # of any weights
    cut = with_best_sizes(preset, trace, cost, Request(24))
    assert cut.sizes == ({"batch": 1, "context": 256, "tree_size": 4, "modelled": "h100"},)
    assert parse_preset(cut.to_yaml(), "mine.yaml") == cut


def test_no_speculation_may_win(trace: RankTrace, preset: Preset) -> None:
    cut = with_best_sizes(preset, trace, costs({0: 10.0, 8: 99.0, 40: 200.0}), Request(24))
    assert cut.tree_size == 1
    assert cut.predicted is not None
    assert cut.predicted["acceptance_length"] == 1.0


def test_cost_of_another_backbone(trace: RankTrace, preset: Preset) -> None:
    other = costs({0: 10.0, 8: 11.0}, backbone="large", backbone_sha256="f" * 64)
    message = "measured with backbone large, the calibration with tiny"
    with pytest.raises(CostError, match=message):
        with_best_sizes(preset, trace, other, Request(24))


def test_a_trace_that_names_no_models(trace: RankTrace, file: Path) -> None:
    anonymous = dataclasses.replace(trace, provenance={"backbone": "tiny"})
    with pytest.raises(TraceError, match="does not say its decoding, backbone_sha256, heads"):
        preset_from_trace(anonymous, file, Request(4), name="a", command="x")
