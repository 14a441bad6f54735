"""The whole story on the default model: calibrate, profile, build, validate."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from calibration.collect import collect
from calibration.data import read_dataset, shipped_prompts
from calibration.profile import profile
from calibration.validation import contradiction, measured_section, run_validation
from treeopt.build import LADDER_SIZE, Request, preset_from_trace
from treeopt.draw import write_picture
from treeopt.models.backbone import Backbone
from treeopt.models.heads import MedusaHeads
from treeopt.preset import Preset
from treeopt.report import DecodeReport

Progress = Callable[[str, int | None], AbstractContextManager[Callable[[int, int], None]]]

NUM_PROMPTS, NUM_TOKENS, BATCH_SIZE = 160, 128, 64
CONTEXT, ROUNDS = 256, 10
NUM_HELD_OUT = 8


@dataclass(frozen=True)
class Demo:
    """What the demo leaves: the preset, validated, and the report."""

    preset: Preset
    report: DecodeReport


def run_demo(
    backbone: Backbone,
    heads: MedusaHeads,
    out: Path,
    progress: Progress,
    on_warning: Callable[[str], None],
) -> Demo:
    """Run all stages and write calibration, costs, preset and picture into ``out``."""
    dataset = read_dataset(shipped_prompts(), NUM_PROMPTS)
    with progress("1/3 calibrating", len(dataset.prompts)) as advance:
        trace = collect(
            backbone,
            heads,
            dataset,
            max_new_tokens=NUM_TOKENS,
            batch_size=BATCH_SIZE,
            on_progress=advance,
            on_warning=on_warning,
        )
    trace.save(out / "calibration.safetensors")
    with progress("2/3 profiling", None) as advance:
        cost = profile(
            backbone,
            heads,
            contexts=[CONTEXT],
            rounds=ROUNDS,
            on_step=lambda: advance(1, 0),
            on_warning=on_warning,
        )
    cost.save(out / "cost.json")
    preset = preset_from_trace(
        trace,
        out / "calibration.safetensors",
        Request(LADDER_SIZE),
        name="demo",
        command="treeopt demo",
        cost=cost,
        on_warning=on_warning,
    )
    with progress("3/3 validating", NUM_HELD_OUT) as advance:
        report, held_out = run_validation(
            preset,
            backbone,
            heads,
            limit=NUM_HELD_OUT,
            max_new_tokens=NUM_TOKENS,
            on_prompt=lambda: advance(1, 0),
        )
    if found := contradiction(preset, report, held_out, NUM_TOKENS):
        on_warning(found.text)
    preset = preset.with_measured(measured_section(report, held_out))
    preset.save(out / "preset.yaml")
    write_picture(out / "tree.svg", preset.tree, preset.node_probs, preset.name)
    return Demo(preset, report)
