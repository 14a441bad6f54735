"""Validate a preset on prompts: read them, decode, and keep the result as a preset's section."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from calibration.data import Dataset, held_out_prompts, read_dataset
from treeopt.decoder.plain import room_for
from treeopt.decoder.tree import TreeDecoder
from treeopt.decoder.validate import explain_mismatch, validate
from treeopt.models.backbone import Backbone
from treeopt.models.heads import MedusaHeads, compile_models
from treeopt.preset import Preset, Section
from treeopt.provenance import library_versions, now
from treeopt.report import DecodeReport


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
            backbone, heads, (preset.tree_size,), preset.tree.depth, longest, on_compile
        )
    decoder = TreeDecoder(backbone, heads, preset.tree)
    report = validate(
        backbone, decoder, prompts, max_new_tokens=max_new_tokens, on_prompt=on_prompt
    )
    if on_mismatch and report.mismatches:
        first = min(report.mismatches, key=lambda m: (m.is_near_tie, m.document))
        on_mismatch(explain_mismatch(decoder, prompts[first.document], first))
    return report, dataset


def measured_section(report: DecodeReport, dataset: Dataset) -> Section:
    """Return the report as an entry of a preset's ``measured``."""
    section: dict[str, Any] = {**report.as_dict(), "data": dataset.name}
    return {**section, **library_versions(), "created": now()}
