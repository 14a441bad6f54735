"""Tree decoding beside plain decoding and transformers' ``generate``, turn by turn.

python -m benchmarks.decode [--preset smollm2-135m] [--prompts 16] [--dtype bfloat16 float32]
"""

from __future__ import annotations

import argparse
import json

from benchmarks.conditions import conditions
from calibration.validation import run_validation
from treeopt.console import show_report
from treeopt.models.backbone import load_backbone
from treeopt.models.heads import load_heads
from treeopt.preset import load_preset

TARGET_PLAIN, TARGET_GENERATE, TARGET_OUTSIDE = 1.3, 1.5, 0.10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--json", help="also write the numbers to this file")
    options = parser.parse_args()
    preset = load_preset(options.preset)
    assert preset.heads is not None
    results = []
    for dtype in options.dtype:
        backbone = load_backbone(dtype=dtype)
        report, dataset = run_validation(
            preset,
            backbone,
            load_heads(preset.heads["id"], backbone),
            limit=options.prompts,
            max_new_tokens=options.new_tokens,
        )
        print(conditions(report.machine, prompts=dataset.name, new_tokens=options.new_tokens))
        show_report(preset, report, as_json=False)
        results.append({**report.as_dict(), "outside_model_share": report.outside_model_share})
    fastest = max(results, key=lambda result: result["tokens_per_s"])
    print(
        f"fastest in {fastest['dtype']}: {fastest['speedup_vs_plain']:.2f}x plain "
        f"(asked: {TARGET_PLAIN}), {fastest['speedup_vs_generate']:.2f}x generate "
        f"(asked: {TARGET_GENERATE}), {fastest['outside_model_share']:.1%} of a step outside "
        f"model calls (allowed: {TARGET_OUTSIDE:.0%})"
    )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
