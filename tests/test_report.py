"""Ratios of a validation, worked out by hand from two prompts, and its verdict on equality."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from treeopt.report import DecodedPrompt, DecodeReport, Mismatch

MACHINE = {"device": "cpu", "dtype": "float32", "threads": 2, "torch": "2.6.0"}

# Tree: 12 tokens in 2 s and 4 steps; plain: 12 in 4 s; generate: 10 in 5 s.
FIRST = DecodedPrompt(
    num_tokens=12,
    num_plain=12,
    num_generate=10,
    num_accepted=(3, 2, 0, 3),
    tree_s=2.0,
    plain_s=4.0,
    generate_s=5.0,
    prefill_s=0.5,
    phase_s={"draft": 0.25, "verify": 1.25, "accept": 0.25},
)
# Tree: 6 tokens in 3 s and 4 steps; plain: 6 in 3 s; generate: 8 in 2 s.
SECOND = DecodedPrompt(
    num_tokens=6,
    num_plain=6,
    num_generate=8,
    num_accepted=(1, 0, 1, 0),
    tree_s=3.0,
    plain_s=3.0,
    generate_s=2.0,
    prefill_s=0.5,
    phase_s={"draft": 0.5, "verify": 2.0, "accept": 0.25},
)
REPORT = DecodeReport(8, (FIRST, SECOND), (), MACHINE)
NEAR = Mismatch(document=0, position=7, expected=5, got=9, gap=1e-7, is_near_tie=True)
WRONG = Mismatch(document=1, position=3, expected=4, got=2, gap=1.5, is_near_tie=False)
LATER = replace(WRONG, document=2, position=1)


def test_counts() -> None:
    assert REPORT.acceptance_length.value == (12 + 6) / (4 + 4)
    assert REPORT.num_accepted_mean == (8 + 2) / 8


def test_rates_are_medians_over_prompts() -> None:
    assert REPORT.tokens_per_s == (6.0 + 2.0) / 2
    assert REPORT.plain_tokens_per_s == (3.0 + 2.0) / 2
    assert REPORT.generate_tokens_per_s == (2.0 + 4.0) / 2


def test_ratios_are_taken_pair_by_pair() -> None:
    assert REPORT.speedup_vs_plain.value == (6 / 3 + 2 / 2) / 2
    assert REPORT.speedup_vs_generate.value == (6 / 2 + 2 / 4) / 2
    # A tree step takes 2 / 4 and 3 / 4 s, a plain step 4 / 12 and 3 / 6 s.
    assert REPORT.overhead.value == pytest.approx((0.5 / (4 / 12) + 0.75 / (3 / 6)) / 2)
    # Of one prompt: speedup = acceptance length / overhead.
    alone = DecodeReport(8, (FIRST,), (), MACHINE)
    product = alone.speedup_vs_plain.value * alone.overhead.value
    assert product == pytest.approx(alone.acceptance_length.value)


def test_median_is_not_a_mean() -> None:
    slow = replace(SECOND, tree_s=600.0)
    report = DecodeReport(8, (FIRST, FIRST, slow), (), MACHINE)
    assert report.speedup_vs_plain.value == 2.0
    assert report.tokens_per_s == 6.0


@pytest.mark.parametrize(
    "name", ["acceptance_length", "speedup_vs_plain", "speedup_vs_generate", "overhead"]
)
def test_intervals_span_the_prompts(name: str) -> None:
    interval = getattr(REPORT, name)
    ends = [getattr(DecodeReport(8, (p,), (), MACHINE), name).value for p in (FIRST, SECOND)]
    # Of two prompts a quarter of the resamples holds only one of them.
    assert (interval.low, interval.high) == pytest.approx((min(ends), max(ends)))
    assert getattr(REPORT, name) == interval
    alone = getattr(DecodeReport(8, (FIRST,), (), MACHINE), name)
    assert alone.low == alone.value == alone.high


def test_time_outside_the_model() -> None:
    assert REPORT.outside_model_share == pytest.approx(1 - (0.25 + 1.25 + 0.5 + 2.0) / (2 + 3))


@pytest.mark.parametrize(
    ("mismatches", "equal", "first", "near_ties"),
    [
        ((), True, None, 0),
        ((NEAR,), True, None, 1),
        ((NEAR, replace(NEAR, document=1)), True, None, 2),
        ((WRONG,), False, WRONG, 0),
        ((NEAR, WRONG, LATER), False, WRONG, 1),
    ],
    ids=["equal", "one near tie", "two near ties", "mismatch", "mismatch behind a near tie"],
)
def test_equality(
    mismatches: tuple[Mismatch, ...], equal: bool, first: Mismatch | None, near_ties: int
) -> None:
    report = replace(REPORT, mismatches=mismatches)
    assert report.equal is equal
    value = report.as_dict()
    assert value["equal"] is equal
    assert value["near_ties"] == near_ties
    assert value["first_mismatch"] == (vars(first) if first else None)


def test_as_dict() -> None:
    value = replace(REPORT, mismatches=(WRONG,)).as_dict()
    intervals = {
        f"{name}{bound}"
        for name in ("overhead", "speedup_vs_plain", "speedup_vs_generate")
        for bound in ("", "_low", "_high")
    }
    assert {key: value[key] for key in value.keys() - intervals} == {
        "tree_size": 8,
        "acceptance_length": 2.25,
        "num_accepted_mean": 1.25,
        "tokens_per_s": 4.0,
        "plain_tokens_per_s": 2.5,
        "generate_tokens_per_s": 3.0,
        "equal": False,
        "first_mismatch": {
            "document": 1,
            "position": 3,
            "expected": 4,
            "got": 2,
            "gap": 1.5,
            "is_near_tie": False,
            "expected_text": "",
            "got_text": "",
        },
        "near_ties": 0,
        "documents": 2,
        "tokens": 18,
        "device": "cpu",
        "dtype": "float32",
        "threads": 2,
    }
    assert (value["overhead_low"], value["overhead"], value["overhead_high"]) == (1.5, 1.5, 1.5)
    assert (value["speedup_vs_plain_low"], value["speedup_vs_plain_high"]) == (1.0, 2.0)
    assert json.loads(json.dumps(value)) == value


@pytest.mark.parametrize(
    ("backbone", "tokens", "steps", "length"),
    [("7b", 43754, 17058, 2.565), ("13b", 44180, 16743, 2.6387), ("33b", 54413, 21647, 2.5137)],
)
def test_mt_bench_acceptance_lengths(
    data: Path, backbone: str, tokens: int, steps: int, length: float
) -> None:
    # FasterDecoding/Medusa at e2a5d20c, llm_judge/data/mt_bench/model_answer, Apache-2.0: tokens
    # and steps of 80 questions.
    rows = json.loads((data / "medusa_figures.json").read_text())["mt_bench_tokens_and_steps"]
    prompts = tuple(
        replace(FIRST, num_tokens=num_tokens, num_accepted=(0,) * num_steps)
        for num_tokens, num_steps in rows[backbone]
    )
    assert sum(prompt.num_tokens for prompt in prompts) == tokens
    report = DecodeReport(64, prompts, (), MACHINE)
    assert report.acceptance_length.value == tokens / steps
    assert report.as_dict()["acceptance_length"] == pytest.approx(length, abs=6e-5)


def test_context_is_halfway_through_the_answers() -> None:
    first, second = replace(FIRST, num_prompt=100), replace(SECOND, num_prompt=50)
    assert replace(REPORT, prompts=(first, second)).context == (106 + 53) / 2
