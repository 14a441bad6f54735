"""Step costs: lookups on a staircase, files, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from treeopt.cost import SCHEMA, StepCost, StepTime
from treeopt.errors import CostError

MACHINE = {"device": "cpu", "dtype": "float32", "threads": 2, "backbone_sha256": "b" * 64}


def row(tree_size: int, step_ms: float, batch: int = 1, context: int = 256) -> StepTime:
    return StepTime(batch, context, tree_size, step_ms, step_ms * 0.9, step_ms * 1.1, 9)


def wide(low_ms: float, high_ms: float) -> StepTime:
    return StepTime(1, 256, 4, 1.0, low_ms, high_ms, 9)


# Rising by stairs, and falling once: 24 rows run faster than 16 here.
ROWS = (
    row(16, 14.0),
    row(0, 10.0),
    row(1, 11.0),
    row(8, 11.5),
    row(24, 13.0),
    row(0, 20.0, context=1024),
    row(8, 22.0, context=1024),
    row(0, 30.0, batch=4),
    row(4, 33.0, batch=4),
)


@pytest.fixture
def cost() -> StepCost:
    return StepCost(ROWS, MACHINE)


@pytest.mark.parametrize(
    ("tree_size", "step_ms"),
    [
        (1, 11.0),
        (2, 11.5),
        (7, 11.5),
        (8, 11.5),
        (9, 14.0),
        (16, 14.0),
        (17, 13.0),
        (24, 13.0),
    ],
)
def test_a_size_costs_what_the_next_measured_one_does(
    cost: StepCost, tree_size: int, step_ms: float
) -> None:
    assert cost.step_ms(tree_size, 1, 256) == step_ms


def test_the_plain_step_is_never_a_tree_step() -> None:
    cost = StepCost((row(0, 10.0), row(4, 12.0)), MACHINE)
    assert cost.step_ms(1, 1, 256) == cost.step_ms(0, 1, 256) == 12.0


def test_situations_and_sizes(cost: StepCost) -> None:
    assert cost.situations() == [(1, 256), (1, 1024), (4, 256)]
    assert cost.sizes(1, 256) == [1, 8, 16, 24]
    assert cost.sizes(4, 256) == [4]
    assert [cost.plain_ms(*situation) for situation in cost.situations()] == [10.0, 20.0, 30.0]


def test_a_larger_size_than_measured_is_refused(cost: StepCost) -> None:
    message = "no step of 25 rows was measured at batch 1, context 256; the largest is 24"
    with pytest.raises(CostError, match=message):
        cost.step_ms(25, 1, 256)


@pytest.mark.parametrize(
    ("context", "nearest"), [(0, 256), (256, 256), (639, 256), (641, 1024), (9999, 1024)]
)
def test_nearest_context(cost: StepCost, context: int, nearest: int) -> None:
    assert cost.nearest(1, context) == (1, nearest)


def test_unknown_batch(cost: StepCost) -> None:
    with pytest.raises(CostError, match=r"batch 2 was not measured; measured: \[1, 4\]"):
        cost.nearest(2, 256)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((), "at least one measured situation"),
        ((row(4, 1.0),), "batch 1, context 256 needs a plain step and one tree size"),
        ((row(0, 1.0),), "needs a plain step and one tree size"),
        ((row(0, 1.0), row(0, 1.1)), r"each once, not the sizes \[0, 0\]"),
        ((row(0, 1.0), row(4, 1.0), row(4, 2.0)), r"each once, not the sizes \[0, 4, 4\]"),
        ((row(0, 1.0), row(-1, 1.0)), "needs a plain step and one tree size"),
        ((row(0, 1.0), row(4, 1.0), row(4, 1.0, batch=2)), "batch 2, context 256 needs a plain"),
        ((row(0, 0.0), row(4, 1.0)), r"step times must be above 0 ms and finite, not 0\.0"),
        ((row(0, 1.0), row(4, -1.0)), r"above 0 ms and finite, not -1\.0"),
        ((row(0, 1.0), row(4, float("nan"))), "finite, not nan"),
        ((row(0, float("inf")), row(4, 1.0)), "finite, not inf"),
        ((row(0, 1.0), wide(0.0, 2.0)), r"step of 1\.0 ms cannot have the interval \[0\.0, 2\.0\]"),
        ((row(0, 1.0), wide(1.1, 2.0)), r"cannot have the interval \[1\.1, 2\.0\]"),
        ((row(0, 1.0), wide(0.5, float("nan"))), r"cannot have the interval \[0\.5, nan\]"),
    ],
)
def test_refused_times(rows: tuple[StepTime, ...], message: str) -> None:
    with pytest.raises(CostError, match=message):
        StepCost(rows, MACHINE)


@pytest.mark.parametrize("measured", [True, False])
def test_round_trip(tmp_path: Path, measured: bool) -> None:
    cost = StepCost(ROWS, MACHINE, measured)
    cost.save(tmp_path / "new" / "cost.json")
    assert StepCost.load(tmp_path / "new" / "cost.json") == cost


VALUE: dict[str, Any] = {
    "schema": SCHEMA,
    "measured": True,
    "machine": MACHINE,
    "times": [asdict(row(0, 10.0)), asdict(row(8, 11.5))],
}


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in VALUE.items() if name != key}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({**VALUE, "schema": "treeopt.cost/2"}, "is not a step-cost file of schema treeopt.cost/1"),
        (without("schema"), "is not a step-cost file"),
        ([VALUE], "is not a step-cost file"),
        (without("times"), "is damaged: 'times'"),
        (without("machine"), "is damaged: 'machine'"),
        (without("measured"), "is damaged: 'measured'"),
        ({**VALUE, "times": None}, "is damaged"),
        ({**VALUE, "times": [1]}, "is damaged"),
        ({**VALUE, "times": [{"batch": 1}]}, "is damaged: .*missing"),
        ({**VALUE, "times": [{**VALUE["times"][0], "x": 1}]}, "is damaged: .*unexpected"),
        ({**VALUE, "times": [VALUE["times"][0], {**VALUE["times"][1], "step_ms": "1"}]}, "damaged"),
        ({**VALUE, "machine": "cpu"}, "is damaged"),
        ({**VALUE, "times": []}, "at least one measured situation"),
    ],
)
def test_files_of_another_shape(tmp_path: Path, value: object, message: str) -> None:
    (tmp_path / "cost.json").write_text(json.dumps(value))
    with pytest.raises(CostError, match=message):
        StepCost.load(tmp_path / "cost.json")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda file: None, "cannot read .*cost.json: No such file"),
        (lambda file: file.write_text("{"), r"cost.json is not valid JSON \(line 1, column 2\)"),
        (lambda file: file.write_bytes(b"\xff"), r"is not UTF-8 text \(byte 0\)"),
        (lambda file: file.write_text("[" * 100_000), "is not usable JSON"),
    ],
)
def test_files_that_are_refused(
    tmp_path: Path, make: Callable[[Path], object], message: str
) -> None:
    make(tmp_path / "cost.json")
    with pytest.raises(CostError, match=message):
        StepCost.load(tmp_path / "cost.json")


def test_what_both_know_must_match(cost: StepCost) -> None:
    cost.check_matches({})
    cost.check_matches({"device": "cpu", "data": "a"})
    cost.check_matches({"heads_sha256": "c" * 64})  # of which the costs say nothing
    for provenance, message in (
        ({"dtype": "bfloat16"}, "measured with dtype float32, the calibration with bfloat16"),
        ({"device": "cuda"}, "measured with device cpu, the calibration with cuda"),
        (
            {"backbone": "other", "backbone_sha256": "f" * 64},
            r"backbone None \(sha256 bbbbbbbb\), the calibration with other \(sha256 ffffffff\)",
        ),
    ):
        with pytest.raises(CostError, match=message):
            cost.check_matches(provenance)
    StepCost(ROWS, MACHINE, measured=False).check_matches({"dtype": "bfloat16"})


def test_a_choice_takes_two_sizes(cost: StepCost) -> None:
    with pytest.raises(CostError, match="batch 1, context 1024: 8 is the only tree size measured"):
        cost.check_choice()
    StepCost(ROWS[:5], MACHINE).check_choice()


def test_doubts_about_a_curve() -> None:
    rising = StepCost((row(0, 10.0), row(4, 11.0), row(24, 14.0)), MACHINE)
    assert rising.doubts(1, 256, best=4) == []
    assert rising.doubts(1, 256, best=24) == [
        "batch 1, context 256: 24 rows are best, the most measured; more may be better"
    ]
    flat = StepCost((row(0, 10.0), row(4, 10.0), row(64, 12.0)), MACHINE)  # known to 10 % only
    (doubt,) = flat.doubts(1, 256, best=4)
    assert "a step of 64 rows took 12.0 ms, of 4 10.0 ms" in doubt
