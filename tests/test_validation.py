"""When a measured acceptance length contradicts the predicted one, and when that is a failure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from calibration.data import Dataset, held_out_prompts, read_dataset, shipped_prompts
from calibration.validation import contradiction
from treeopt.preset import Preset
from treeopt.report import DecodedPrompt, DecodeReport

PREDICTED = {
    "acceptance_length": 2.0,
    "low": 1.9,
    "high": 2.1,
    "method": "replay",
    "held_out": True,
}
PROMPTS, OTHERS = Dataset("a.jsonl", "a" * 64, ()), Dataset("b.jsonl", "b" * 64, ())


def preset(sha256: str = PROMPTS.sha256, **changes: Any) -> Preset:
    calibration = {
        "sha256": "c" * 64,
        "data": "a.jsonl",
        "documents": 20,
        "positions": 2000,
        "num_ranks": 4,
        "data_sha256": sha256,
        "max_new_tokens": 64,
    }
    known = Preset("p", ((0,), (1,)), 3, calibration=calibration, predicted=PREDICTED)
    return replace(known, **changes)


def report(*lengths: float) -> DecodeReport:
    """Return a report of prompts that took 10 steps each and emitted so many tokens per step."""
    prompts = [
        DecodedPrompt(round(10 * length), 10, 10, (1,) * 10, 1.0, 1.0, 1.0, 0.1, {})
        for length in lengths
    ]
    return DecodeReport(3, tuple(prompts), (), {})


LOW, HIGH, NEAR = report(*[1.2, 1.4] * 4), report(*[2.8, 3.0] * 4), report(*[1.5, 2.0] * 4)


@pytest.mark.parametrize("measured", [NEAR, report(*[2.0] * 8), report(*[1.2] * 4)])
def test_intervals_that_meet_are_no_contradiction(measured: DecodeReport) -> None:
    """The last one has too few prompts to say anything."""
    assert contradiction(preset(), measured, PROMPTS, 64) is None


@pytest.mark.parametrize(
    ("built", "measured", "data", "new_tokens", "why", "fails"),
    [
        (preset(), LOW, PROMPTS, 64, "on the same prompts", True),
        # The tree was built from these prompts, so it may do better on them.
        (preset(), HIGH, PROMPTS, 64, "on the same prompts", False),
        (preset(), LOW, OTHERS, 64, "of other prompts", False),
        (preset(), LOW, PROMPTS, 32, "of answers of another length", False),
        (preset(calibration=None), LOW, PROMPTS, 64, "of answers of another length", False),
    ],
)
def test_only_text_that_was_predicted_makes_it_a_failure(
    built: Preset, measured: DecodeReport, data: Dataset, new_tokens: int, why: str, fails: bool
) -> None:
    found = contradiction(built, measured, data, new_tokens)
    assert found is not None
    assert found.fails is fails
    assert found.text.endswith(f", predicted 2.000 [1.900, 2.100] {why}")
    value = measured.acceptance_length
    assert f"measured acceptance length {value.value:.3f} [{value.low:.3f}, " in found.text


@pytest.mark.parametrize("measured", [LOW, HIGH])
def test_the_held_out_prompts_are_of_the_kind_of_the_shipped_ones(measured: DecodeReport) -> None:
    built = preset(read_dataset(shipped_prompts()).sha256)
    found = contradiction(built, measured, read_dataset(held_out_prompts(), 8), 64)
    assert found is not None
    assert found.fails
    assert "of prompts of the same kind" in found.text


@pytest.mark.parametrize(
    "changes",
    [
        {"predicted": None},
        {"predicted": {"acceptance_length": 2.0, "method": "independence", "held_out": False}},
        {"decoding": {"rule": "sampling", "temperature": 1.0}},
    ],
)
def test_what_was_not_predicted_cannot_be_contradicted(changes: dict[str, Any]) -> None:
    assert contradiction(preset(**changes), LOW, PROMPTS, 64) is None
