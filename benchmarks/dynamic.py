"""Dynamic trees beside static ones of the same size: replayed, chosen, and decoded.

python -m benchmarks.dynamic [--calibration calibration.safetensors] [--dtype bfloat16]

Replay holds out documents, paired by document. Decoding takes turns on every prompt: static,
dynamic, plain. Choosing is timed alone, on the heads' own shapes; a step is the whole dynamic one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.conditions import conditions
from calibration.data import held_out_prompts, read_dataset
from treeopt.build import Request, predict, preset_from_trace
from treeopt.decoder.choice import Chooser
from treeopt.decoder.plain import decode_plain
from treeopt.decoder.tree import StepLog, TreeDecoder
from treeopt.decoder.validate import Timed
from treeopt.dynamic import DynamicTree
from treeopt.models.backbone import Backbone, load_backbone
from treeopt.models.candidates import top_candidates
from treeopt.models.heads import MedusaHeads, load_heads
from treeopt.preset import Preset
from treeopt.replay import bootstrap
from treeopt.trace import RankTrace

SIZES = (4, 8, 12, 16, 32, 64)
TARGET_DRAFT, TARGET_SHARE = 0.08, 0.03
ROUNDS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calibration", type=Path, default=Path("calibration.safetensors"))
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--decode-sizes", type=int, nargs="*", default=[4, 16, 64])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    trace = RankTrace.load(options.calibration)
    presets = {size: dynamic_preset(trace, options.calibration, size) for size in options.sizes}
    print(conditions(documents=trace.num_documents, positions=trace.num_positions))
    show_replayed(trace, presets)
    if not options.decode_sizes:
        return
    backbone = load_backbone(dtype=options.dtype)
    heads = load_heads("smollm2-135m", backbone)
    prompts = [
        backbone.encode(prompt.messages)
        for prompt in read_dataset(held_out_prompts(), options.prompts).prompts
    ]
    print(conditions(backbone.machine(), prompts=len(prompts), new_tokens=options.new_tokens))
    print(f"| rows | choosing, ms | a step, ms | share (allowed: {TARGET_SHARE:.0%}) | length "
          "| static length | tokens/s | static | plain | over static | over plain |\n"
          + "| --- " * 11 + "|")  # fmt: skip
    for size in options.decode_sizes:
        print(decoded(backbone, heads, presets[size], prompts, options.new_tokens))


def dynamic_preset(trace: RankTrace, file: Path, tree_size: int) -> Preset:
    request = Request(tree_size, dynamic=True)
    return preset_from_trace(trace, file, request, name="dynamic", command="benchmarks.dynamic")


def show_replayed(trace: RankTrace, presets: dict[int, Preset]) -> None:
    print("| rows | static, replayed | dynamic, replayed | gain | accepted draft tokens |\n"
          + "| --- " * 5 + "|")  # fmt: skip
    for size, preset in presets.items():
        assert preset.predicted is not None
        assert preset.dynamic is not None
        static, length = predict(trace, Request(size)).value, preset.predicted
        gain, low, high = (preset.dynamic[f"gain{bound}"] for bound in ("", "_low", "_high"))
        more = gain / (static - 1)
        print(
            f"| {size} | {static:.3f} | {length['acceptance_length']:.3f} | {gain:+.3f} "
            f"[{low:+.3f}, {high:+.3f}] | {more:+.1%} (asked: {TARGET_DRAFT:+.0%}) |"
        )


def decoded(
    backbone: Backbone,
    heads: MedusaHeads,
    preset: Preset,
    prompts: list[list[int]],
    new_tokens: int,
) -> str:
    """Return a row of the table, from decoding every prompt with each side in turn."""
    static = TreeDecoder(backbone, heads, preset.tree)
    dynamic = TreeDecoder(backbone, heads, preset.draft_tree)
    sides = {"static": static, "dynamic": dynamic, "plain": None}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    logs: dict[str, list[StepLog]] = {name: [] for name in sides}
    for decoder in (static, dynamic):
        list(decoder.decode(prompts[0], 8))  # warm up
    for number, prompt in enumerate(prompts):
        for name in np.roll(list(sides), number):
            logs[name].append(StepLog())
            timed = Timed()
            for tokens in answer(sides[name], backbone, prompt, new_tokens, logs[name][-1]):
                timed.add(tokens)
            rates[name].append((len(timed.tokens) - 1) / timed.decode_s)
    steps = np.array([s for log in logs["dynamic"] for s in log.step_s])
    step_ms, choose_ms = 1000 * float(np.median(steps)), choosing_ms(dynamic, preset)
    speeds = {name: float(np.median(values)) for name, values in rates.items()}
    return (
        f"| {preset.tree_size} | {choose_ms:.2f} | {step_ms:.1f} | {choose_ms / step_ms:.1%} | "
        f"{length(logs['dynamic']):.3f} | {length(logs['static']):.3f} | "
        f"{speeds['dynamic']:.1f} | {speeds['static']:.1f} | {speeds['plain']:.1f} | "
        f"{ratio(rates, 'static')} | {ratio(rates, 'plain')} |"
    )


def answer(
    decoder: TreeDecoder | None,
    backbone: Backbone,
    prompt: list[int],
    new_tokens: int,
    log: StepLog,
) -> Iterator[list[int]]:
    if decoder:
        return decoder.decode(prompt, new_tokens, log)
    cache = backbone.new_cache(len(prompt) + new_tokens)
    return ([token] for token in decode_plain(backbone, cache, prompt, new_tokens))


def length(logs: list[StepLog]) -> float:
    """Return tokens per step; what the last step of an answer emits beyond it counts too."""
    return float(1 + np.mean([count for log in logs for count in log.num_accepted]))


def choosing_ms(decoder: TreeDecoder, preset: Preset) -> float:
    """Return the median time of choosing the rows of one step."""
    assert isinstance(preset.draft_tree, DynamicTree)
    chooser = Chooser(preset.draft_tree, decoder.backbone.device)
    times = []
    with torch.inference_mode():
        states = torch.randn_like(decoder.new_batch(8, 1).states)
        logits = decoder.heads.logits(states, decoder.tree.depth).flatten(0, 1)
        best, _ = top_candidates(logits, decoder.num_candidates)
        for _ in range(ROUNDS):
            start = time.perf_counter()
            chooser.choose(logits, best).nodes.tolist()
            times.append(time.perf_counter() - start)
    return 1000 * float(np.median(times))


def ratio(rates: dict[str, list[float]], other: str) -> str:
    pairs = np.array(rates["dynamic"]) / np.array(rates[other])
    interval = bootstrap(lambda rows: float(np.median(pairs[rows])), len(pairs))
    return f"{interval.value:.3f}x [{interval.low:.3f}, {interval.high:.3f}]"


if __name__ == "__main__":
    main()
