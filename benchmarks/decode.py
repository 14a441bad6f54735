"""Tree decoding beside plain decoding, transformers' ``generate`` and other engines.

python -m benchmarks.decode [--preset smollm2-135m] [--prompts 16] [--dtype bfloat16 float32]

Tree, plain and `generate` take turns on every prompt, then `generate` with prompt lookup; the other
engines follow, each in an environment of its own (`make peers`), on the same prompts.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.conditions import conditions
from benchmarks.peers import NAMES, run_peer
from calibration.data import held_out_prompts, read_dataset
from calibration.validation import run_validation
from treeopt.console import say_compiling, show_report
from treeopt.decoder.validate import time_generate
from treeopt.files import cache_dir
from treeopt.models.backbone import Backbone, load_backbone
from treeopt.models.embedded import GGUF
from treeopt.models.heads import load_heads
from treeopt.preset import load_preset

TARGET_PLAIN, TARGET_GENERATE, TARGET_OUTSIDE = 1.5, 3.0, 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="smollm2-135m")
    parser.add_argument("--tree-size", type=int, help="another cut of the preset's ladder")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", help="also write the numbers to this file")
    options = parser.parse_args()
    results, rows = [], []
    for dtype in options.dtype:
        result, backbone = measured(options, dtype)
        results.append(result)
        rows += [
            (f"treeopt tree, {result['tree_size']} rows", dtype, result["tokens_per_s"]),
            ("treeopt plain", dtype, result["plain_tokens_per_s"]),
            ("transformers generate", dtype, result["generate_tokens_per_s"]),
            ("transformers prompt lookup", dtype, lookup_rate(backbone, options)),
        ]
    rows += peer_rates(backbone, options)
    print("| engine | weights | tokens/s, median over prompts |\n| --- | --- | --- |")
    for row in sorted(rows, key=lambda row: -row[2]):
        print("| {} | {} | {:.1f} |".format(*row))
    fastest = max(results, key=lambda result: result["tokens_per_s"])
    print(
        f"fastest in {fastest['dtype']}: {fastest['speedup_vs_plain']:.2f}x plain "
        f"(asked: {TARGET_PLAIN}), {fastest['speedup_vs_generate']:.2f}x generate "
        f"(asked: {TARGET_GENERATE}), {fastest['outside_model_share']:.1%} of a step outside "
        f"model calls (allowed: {TARGET_OUTSIDE:.0%})"
    )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"treeopt": results, "engines": rows}, file, indent=1)


def measured(options: argparse.Namespace, dtype: str) -> tuple[dict[str, Any], Backbone]:
    preset = load_preset(options.preset)
    assert preset.heads is not None
    if options.tree_size:
        preset = replace(preset, tree_size=options.tree_size, predicted=None)
    backbone = load_backbone(dtype=dtype)
    report, dataset = run_validation(
        preset,
        backbone,
        load_heads(preset.heads["id"], backbone),
        limit=options.prompts,
        max_new_tokens=options.new_tokens,
        compiles=options.compile,
        on_compile=say_compiling,
    )
    print(conditions(report.machine, prompts=dataset.name, new_tokens=options.new_tokens))
    show_report(preset, report, as_json=False)
    return {**report.as_dict(), **report.details()}, backbone


def token_ids(backbone: Backbone, options: argparse.Namespace) -> list[list[int]]:
    dataset = read_dataset(held_out_prompts(), options.prompts)
    return [backbone.encode(prompt.messages) for prompt in dataset.prompts]


def lookup_rate(backbone: Backbone, options: argparse.Namespace) -> float:
    rates = []
    for prompt in token_ids(backbone, options):
        timed = time_generate(backbone, prompt, options.new_tokens, prompt_lookup_num_tokens=4)
        if len(timed.tokens) > 1:
            rates.append((len(timed.tokens) - 1) / timed.decode_s)
    return float(np.median(rates))


def peer_rates(backbone: Backbone, options: argparse.Namespace) -> list[tuple[str, str, float]]:
    request = {
        "model": str(cache_dir() / "models" / GGUF),
        "prompts": token_ids(backbone, options),
        "max_new_tokens": options.new_tokens,
        "threads": torch.get_num_threads(),
    }
    rows = []
    for name in NAMES:
        if result := run_peer(name, request):
            rates = [(a["num_tokens"] - 1) / a["decode_s"] for a in result["answers"]
                     if a["num_tokens"] > 1]  # fmt: skip
            rows.append((result["version"], result["weights"], float(np.median(rates))))
    return rows


if __name__ == "__main__":
    main()
