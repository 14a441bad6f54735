"""From a trace to a preset: held-out prediction, choice of size, the same bytes twice."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from treeopt.acceptance import JointAcceptance
from treeopt.build import (
    LADDER_SIZE,
    Request,
    held_out_replays,
    predict,
    preset_from_rates,
    preset_from_trace,
    size_curve,
    with_best_sizes,
)
from treeopt.cost import StepCost, StepTime
from treeopt.dynamic import DynamicTree, fit_maps
from treeopt.errors import CostError, PresetError, TraceError
from treeopt.files import sha256_of_file
from treeopt.preset import Preset, parse_preset
from treeopt.replay import Interval, accepted_at, replay
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
        "data_sha256": "d" * 64,
        "max_new_tokens": 64,
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
    with pytest.raises(PresetError, match=f"tree_size is {tree_size}; the ladder allows 1 to"):
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


def test_a_dynamic_preset_promises_what_its_trees_replay(trace: RankTrace, file: Path) -> None:
    right = trace.ranks[..., None] == np.arange(RANKS)  # heads that know when they are right
    knowing = dataclasses.replace(trace, probs=np.where(right, 0.6, 0.2).astype(np.float16))
    fixed, chosen = (
        preset_from_trace(knowing, file, Request(6, dynamic=dynamic), name="mine", command="x")
        for dynamic in (False, True)
    )
    assert (chosen.tree, chosen.ladder) == (fixed.tree, fixed.ladder)
    lengths = [(p.predicted or {})["acceptance_length"] for p in (fixed, chosen)]
    assert chosen.dynamic is not None
    assert chosen.dynamic["gain"] == pytest.approx(lengths[1] - lengths[0], abs=2e-4)
    assert 0.1 < chosen.dynamic["gain_low"] < chosen.dynamic["gain"] < chosen.dynamic["gain_high"]
    # In sample the maps know no less.
    assert replay(knowing, chosen.draft_tree).acceptance_length >= lengths[1] - 0.05
    assert parse_preset(chosen.to_yaml(), "mine.yaml") == chosen


def test_a_dynamic_tree_has_more_to_choose_from_than_it_holds(
    trace: RankTrace, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("treeopt.build"), "LADDER_SIZE", 10)
    sizes = [
        len(preset_from_trace(trace, file, request, name="mine", command="x").ladder) + 1
        for request in (Request(30), Request(30, dynamic=True))
    ]
    assert sizes == [30, 60]


def test_no_map_is_judged_by_a_document_that_made_it(make_trace: Make, file: Path) -> None:
    """Document 4's heads say the opposite of the others', so their maps mislead it."""
    rng = np.random.default_rng(5)
    trace = make_trace([rng.integers(0, 2, (60, 1)).tolist() for _ in range(5)], 2)
    sure = np.where(trace.ranks == np.arange(2), 0.6, 0.4)
    last = np.arange(trace.num_positions)[:, None] >= trace.doc_start[4]
    probs = np.where(last, 1 - sure, sure).astype(np.float16)[:, None]
    trace = dataclasses.replace(trace, probs=probs)
    universe, accepted = Tree.from_paths([(0,), (1,)]), []
    for held_out in range(5):
        others = trace.documents([document for document in range(5) if document != held_out])
        tree = DynamicTree(universe, 2, fit_maps(others))
        accepted.append(replay(trace.documents([held_out]), tree))
    made = preset_from_trace(trace, file, Request(2, dynamic=True), name="mine", command="x")
    tokens, steps = (sum(int(getattr(r, name).sum()) for r in accepted)
                     for name in ("tokens", "steps"))  # fmt: skip
    assert accepted[4].acceptance_length < 1.1 < 1.9 < accepted[0].acceptance_length
    assert made.predicted
    assert made.predicted["acceptance_length"] == pytest.approx(tokens / steps, abs=1e-4)


def test_sizes_of_dynamic_trees_are_chosen_by_their_own_curve(trace: RankTrace, file: Path) -> None:
    request = Request(24, dynamic=True)
    made = preset_from_trace(trace, file, request, name="mine", command="x")
    cost = costs({0: 10.0, 8: 11.0, 24: 30.0})
    cut = with_best_sizes(made, trace, cost, request)
    assert cut.tree_size == 8
    assert cut.dynamic is not None
    assert cut.predicted is not None
    point = size_curve(trace, request, cost, len(made.ladder) + 1)[1]
    assert point.tree_size == 8
    assert point.acceptance_length == predict(trace, Request(8, dynamic=True))
    assert cut.predicted["acceptance_length"] == round(point.acceptance_length.value, 4)
    assert cut.draft_tree.tree_size == 8


# The size under a cost.


def test_size_curve_is_held_out_replay_and_measured_time(trace: RankTrace) -> None:
    times = {0: 10.0, 1: 10.5, 8: 11.0, 24: 12.0, 100_000: 99.0}
    rows = tuple(StepTime(1, 256, size, ms, 0.9 * ms, 1.2 * ms, 5) for size, ms in times.items())
    cost = StepCost(rows, {})
    curve = size_curve(trace, Request(24), cost, max_tree_size=60)
    # Plain decoding, the measured sizes, and the largest tree there is at the next one's price.
    assert [p.tree_size for p in curve] == [1, 8, 24, 60]
    assert [p.step_ms.value for p in curve] == [10.0, 11.0, 12.0, 99.0]
    for p in curve:
        assert (p.batch, p.context) == (1, 256)
        assert p.acceptance_length == predict(trace, Request(p.tree_size))  # held out
        assert p.step_ms.low == pytest.approx(0.9 * p.step_ms.value)
        assert p.step_ms.high == pytest.approx(1.2 * p.step_ms.value)
    assert curve[0].acceptance_length == Interval(1.0, 1.0, 1.0)
    lengths = [p.acceptance_length.value for p in curve]
    assert lengths == sorted(lengths)


def test_with_best_sizes_fills_the_cut_table(trace: RankTrace, preset: Preset) -> None:
    rows = [
        StepTime(1, 256, size, ms, ms, ms, 5)
        for size, ms in {0: 10, 4: 10.1, 8: 30, 40: 10.3}.items()
    ] + [
        StepTime(4, 256, size, ms, ms, ms, 5)
        for size, ms in {0: 10, 4: 10.1, 8: 30, 40: 60}.items()
    ]
    machine = {"backbone": "tiny", "backbone_sha256": "b" * 64, "device": "cpu x", "threads": 2}
    cost = StepCost(tuple(rows), {**machine, "dtype": "float32", "compiled_rows": [4]})
    cut = with_best_sizes(preset, trace, cost, Request(24))
    assert cut.sizes == (
        {"batch": 1, "context": 256, "tree_size": 40},
        {"batch": 4, "context": 256, "tree_size": 4},
    )
    assert cut.tree_size == 40
    assert [(p.batch, p.tree_size) for p in cut.curve] == [
        (batch, size) for batch in (1, 4) for size in (1, 4, 8, 40)
    ]
    assert cut.ladder == preset.ladder
    interval = predict(trace, Request(40))
    assert cut.predicted is not None
    assert cut.predicted["acceptance_length"] == round(interval.value, 4)
    assert cut.cost == {
        "device": "cpu x",
        "dtype": "float32",
        "threads": 2,
        "compiled": True,
        "measured": True,
    }
    again = parse_preset(cut.to_yaml(), "mine.yaml")
    assert again.to_yaml() == cut.to_yaml()
    assert again.sizes == cut.sizes
    for ours, theirs in zip(cut.curve, again.curve, strict=True):  # to the places that are kept
        assert theirs.tokens_per_s.value == pytest.approx(ours.tokens_per_s.value, rel=1e-4)
    assert (preset.sizes, preset.curve, preset.cost) == ((), (), None)


def test_preset_from_trace_takes_the_costs_too(trace: RankTrace, file: Path) -> None:
    cost = costs({0: 10.0, 4: 10.1, 8: 30.0})
    options = {"name": "mine", "command": "x"}
    whole = preset_from_trace(trace, file, Request(128), **options, cost=cost)
    apart = preset_from_trace(trace, file, Request(128), **options)
    cut = with_best_sizes(apart, trace, cost, Request(128))
    assert dataclasses.replace(whole, provenance=None) == dataclasses.replace(cut, provenance=None)
    assert whole.tree_size == 4


def test_sizes_for_a_modelled_machine_say_so(trace: RankTrace, preset: Preset) -> None:
    rows = tuple(
        StepTime(1, 256, size, ms, ms, ms, 0) for size, ms in {0: 10, 4: 10.1, 8: 30}.items()
    )
    machine = {"device": "h100", "dtype": "16-bit", "backbone": "large"}
    cost = StepCost(rows, machine, measured=False)  # of any weights
    cut = with_best_sizes(preset, trace, cost, Request(24))
    assert cut.sizes == ({"batch": 1, "context": 256, "tree_size": 4, "modelled": "h100"},)
    assert cut.describe_cost() == "h100, 16-bit, modelled, not measured"
    assert parse_preset(cut.to_yaml(), "mine.yaml").cost == cut.cost


def test_no_speculation_may_win(trace: RankTrace, preset: Preset) -> None:
    cut = with_best_sizes(preset, trace, costs({0: 10.0, 8: 99.0, 40: 200.0}), Request(24))
    assert cut.tree_size == 1
    assert cut.predicted is not None
    assert cut.predicted["acceptance_length"] == 1.0


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (
            {"backbone": "large", "backbone_sha256": "f" * 64},
            r"with backbone large \(sha256 f{8}\), the calibration with tiny \(sha256 b{8}\)",
        ),
        (
            {"heads": "others", "heads_sha256": "a" * 64},
            r"heads others \(sha256 a{8}\), the calibration with tiny-heads \(sha256 c{8}\)",
        ),
        ({"dtype": "bfloat16"}, "with dtype bfloat16, the calibration with float32"),
    ],
)
def test_cost_of_something_else(
    trace: RankTrace, preset: Preset, machine: dict[str, str], message: str
) -> None:
    other = costs({0: 10.0, 4: 10.5, 8: 11.0}, **machine)
    with pytest.raises(CostError, match=message):
        with_best_sizes(preset, trace, other, Request(24))


def test_a_single_measured_size_is_no_choice(trace: RankTrace, preset: Preset) -> None:
    message = "batch 1, context 256: 8 is the only tree size measured; a choice takes two"
    with pytest.raises(CostError, match=message):
        with_best_sizes(preset, trace, costs({0: 10.0, 8: 11.0}), Request(24))


@pytest.mark.parametrize("last", [10.0, 8.0])
def test_flat_and_falling_costs_are_doubted(trace: RankTrace, preset: Preset, last: float) -> None:
    said: list[str] = []
    flat = costs({0: 10.0, 4: 10.0, 40: last})
    with_best_sizes(preset, trace, flat, Request(24), said.append)
    assert said[0] == (
        f"batch 1, context 256: a step of 40 rows took {last} ms, of 4 10.0 ms; where more rows "
        "cost nothing, the choice of size is the noise's: measure again, with larger --sizes too"
    )
    assert (
        said[1] == "batch 1, context 256: 40 rows are best, the most measured; more may be better"
    )
    rising: list[str] = []
    with_best_sizes(preset, trace, costs({0: 10.0, 4: 10.1, 40: 30.0}), Request(24), rising.append)
    assert rising == []


def test_a_trace_too_small_for_its_tree_says_how_many_positions_it_takes(
    trace: RankTrace, file: Path
) -> None:
    said: list[str] = []

    def build(tree_size: int) -> Preset:
        said.clear()
        return preset_from_trace(
            trace, file, Request(tree_size), name="m", command="x", on_warning=said.append
        )

    build(3)
    assert said == []
    preset = build(60)
    assert preset.path_probs is not None
    least = preset.path_probs[58]
    assert trace.num_positions * least < 10
    (message,) = said
    assert message.startswith(f"{trace.num_positions} calibrated positions are few for 60 rows")
    needed = math.ceil(10 / least)
    assert f"about {needed} are needed for 10 times" in message
    assert needed > trace.num_positions


def test_heads_that_are_never_right_leave_the_root_alone(make_trace: Make, tmp_path: Path) -> None:
    trace = make_trace([[[MISSED] * HEADS] * 12 for _ in range(6)])
    trace.save(tmp_path / "t.safetensors")
    cost = costs({0: 10.0, 4: 10.1, 40: 30.0})
    for given in (None, cost):
        made = preset_from_trace(
            trace, tmp_path / "t.safetensors", Request(24), name="m", command="x", cost=given
        )
        assert (made.ladder, made.tree_size) == ((), 1)
        assert made.predicted is not None
        assert made.predicted["acceptance_length"] == 1.0
        assert parse_preset(made.to_yaml(), "m.yaml").to_yaml() == made.to_yaml()


def test_a_head_that_is_never_right_is_not_used(make_trace: Make, tmp_path: Path) -> None:
    trace = make_trace([[[0, MISSED, 0], [1, MISSED, 0]] * 8 for _ in range(6)])
    trace.save(tmp_path / "t.safetensors")
    made = preset_from_trace(trace, tmp_path / "t.safetensors", Request(24), name="m", command="x")
    assert set(made.ladder) == {(0,), (1,)}


def test_a_trace_that_names_no_models(trace: RankTrace, file: Path) -> None:
    anonymous = dataclasses.replace(trace, provenance={"backbone": "tiny"})
    with pytest.raises(TraceError, match="does not say its decoding, backbone_sha256, heads"):
        preset_from_trace(anonymous, file, Request(4), name="a", command="x")
