"""Validate a preset on prompts: read them, decode, and keep the result as a preset's section."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from calibration.data import Dataset, held_out_prompts, read_dataset, shipped_prompts
from treeopt.decoder.plain import room_for
from treeopt.decoder.tree import TreeDecoder
from treeopt.decoder.validate import explain_mismatch, validate
from treeopt.models.backbone import Backbone
from treeopt.models.heads import MedusaHeads, compile_models
from treeopt.preset import Preset, Section
from treeopt.provenance import library_versions, now
from treeopt.report import DecodeReport

MIN_PROMPTS = 5  # below, an interval over prompts means little


def run_validation(
    preset: Preset,
    backbone: Backbone,
    heads: MedusaHeads,
    *,
    data: Path | None = None,
    limit: int,
    max_new_tokens: int,
    on_prompt: Callable[[], None] = lambda: None,
    on_mismatch: Callable[[str], None] | None = None,
    compiles: bool = False,
    on_compile: Callable[[int], None] = lambda size: None,
) -> tuple[DecodeReport, Dataset]:
    """Return what decoding the first ``limit`` prompts measured, and the prompts.

    Args:
        data: a prompt file; by default the held-out prompts that come with treeopt.
        on_mismatch: called with an explanation of the first difference from plain decoding.
        compiles: compile plain and tree steps for this machine first, outside all timings.
        on_compile: called with each number of rows that has to be compiled now.
    """
    dataset = read_dataset(data or held_out_prompts(), limit)
    prompts = [backbone.encode(prompt.messages) for prompt in dataset.prompts]
    for prompt in prompts:
        room_for(backbone, prompt, max_new_tokens)
    if compiles:
        longest = max(map(len, prompts)) + max_new_tokens + preset.tree_size
        backbone, heads = compile_models(
            backbone, heads, (preset.tree_size,), preset.draft_tree.depth, longest, on_compile
        )
    decoder = TreeDecoder(backbone, heads, preset.draft_tree)
    report = validate(
        backbone, decoder, prompts, max_new_tokens=max_new_tokens, on_prompt=on_prompt
    )
    if on_mismatch and report.mismatches:
        first = min(report.mismatches, key=lambda m: (m.is_near_tie, m.document))
        on_mismatch(explain_mismatch(decoder, prompts[first.document], first))
    return report, dataset


class Contradiction(NamedTuple):
    """How a measured acceptance length contradicts the predicted one.

    fails: whether the text was such that it should not.
    """

    text: str
    fails: bool


def contradiction(
    preset: Preset, report: DecodeReport, dataset: Dataset, max_new_tokens: int
) -> Contradiction | None:
    """Return how the measured acceptance length contradicts the prediction, None if it does not.

    It does when it lies outside the prediction's interval, widened by its own: when the two do not
    meet. A prediction under another rule than the greedy one, or without an interval, says nothing
    here, and neither do fewer than ``MIN_PROMPTS`` prompts.

    The prediction is of text like the calibration's, with answers as long. Of other text, a
    contradiction may be the text's doing; on the calibration's own prompts a tree does better than
    predicted, because it was built from them.
    """
    predicted, measured = preset.predicted or {}, report.acceptance_length
    is_known = {"low", "high"} <= predicted.keys() and preset.decoding["rule"] == "greedy"
    if not is_known or len(report.prompts) < MIN_PROMPTS:
        return None
    if measured.low <= predicted["high"] and predicted["low"] <= measured.high:
        return None
    known = preset.calibration or {}
    text = (
        f"measured acceptance length {measured.value:.3f} [{measured.low:.3f}, "
        f"{measured.high:.3f}], predicted {predicted['acceptance_length']:.3f} "
        f"[{predicted['low']:.3f}, {predicted['high']:.3f}]"
    )
    if known.get("max_new_tokens") != max_new_tokens:
        return Contradiction(f"{text} of answers of another length", False)
    if known.get("data_sha256") == dataset.sha256:
        return Contradiction(f"{text} on the same prompts", measured.high < predicted["low"])
    alike = {read_dataset(file).sha256 for file in (shipped_prompts(), held_out_prompts())}
    if {known.get("data_sha256"), dataset.sha256} == alike:
        return Contradiction(f"{text} of prompts of the same kind", True)
    return Contradiction(f"{text} of other prompts", False)


def measured_section(report: DecodeReport, dataset: Dataset) -> Section:
    """Return the report as an entry of a preset's ``measured``."""
    section: dict[str, Any] = {**report.as_dict(), "data": dataset.name}
    return {**section, **library_versions(), "created": now()}
