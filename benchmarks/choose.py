"""Whether the chosen tree size is the best one: the sizes that `profile` finds against every size.

python -m benchmarks.choose --calibration calibration.safetensors [--context 256] [--dtype bfloat16]

Both profiles are measured here, one after the other, with the default model.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks.conditions import conditions
from calibration.profile import COARSE, ROUNDS, profile
from treeopt.build import LADDER_SIZE, Request, preset_from_trace, size_curve
from treeopt.models.backbone import load_backbone
from treeopt.models.heads import load_heads
from treeopt.trace import RankTrace

TARGET_LOSS = 0.03


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--dtype")
    parser.add_argument("--heads", default="smollm2-135m")
    options = parser.parse_args()
    trace = RankTrace.load(options.calibration)
    backbone = load_backbone(dtype=options.dtype)
    heads = load_heads(options.heads, backbone)
    print(conditions(backbone.machine(), **vars(options)))
    costs = {}
    for name, sizes in (("found", None), ("every", range(1, max(COARSE) + 1))):
        start = time.perf_counter()
        costs[name] = profile(
            backbone,
            heads,
            sizes=sizes,
            contexts=[options.context],
            rounds=options.rounds,
            on_warning=print,
        )
        number, took = len(costs[name].sizes(1, options.context)), time.perf_counter() - start
        print(f"{name:<6} {number:3} sizes in {took:6.1f} s")
    request = Request(LADDER_SIZE)
    preset = preset_from_trace(
        trace, options.calibration, request, name="found", command="", cost=costs["found"]
    )
    curve = size_curve(trace, request, costs["every"], len(preset.ladder) + 1)
    best = max(curve, key=lambda point: point.tokens_per_s.value)
    (chosen,) = (point for point in curve if point.tree_size == preset.tree_size)
    loss = 1 - chosen.tokens_per_s.value / best.tokens_per_s.value
    for name, point in (("chosen", chosen), ("best", best)):
        speed = point.tokens_per_s
        print(
            f"{name:<6} {point.tree_size:3} rows, {speed.value:.2f} tokens/s "
            f"[{speed.low:.2f}, {speed.high:.2f}] in the sweep of every size"
        )
    print(f"loss {loss:.1%} of the {TARGET_LOSS:.0%} allowed")


if __name__ == "__main__":
    main()
