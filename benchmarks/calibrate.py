"""What calibration costs beside generating the same answers, turn by turn in one process.

python -m benchmarks.calibrate [--prompts 64] [--rounds 3]
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch

from benchmarks.conditions import conditions
from calibration.collect import collect
from calibration.data import Dataset, read_dataset, shipped_prompts
from treeopt.decoder.plain import answer_batch, like_length
from treeopt.models.backbone import Backbone, load_backbone
from treeopt.models.heads import load_heads

TARGET = 1.25


def transformers_generate(backbone: Backbone, prompts: list[list[int]], new_tokens: int) -> None:
    """Greedy answers by transformers' own ``generate``, one batch, padded on the left."""
    longest = max(map(len, prompts))
    pad = min(backbone.eos_ids)
    tokens = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    backbone.model.generate(
        tokens,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=pad,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--heads", default="smollm2-135m")
    options = parser.parse_args()
    backbone = load_backbone()
    heads = load_heads(options.heads, backbone)
    dataset = read_dataset(shipped_prompts(), options.prompts)
    encoded = [backbone.encode(prompt.messages) for prompt in dataset.prompts]
    batches = [[encoded[i] for i in rows] for rows in like_length(encoded, options.batch_size)]

    def generate() -> None:
        for batch in batches:
            transformers_generate(backbone, batch, options.new_tokens)

    def answer() -> None:
        for batch in batches:
            for _ in answer_batch(backbone, batch, options.new_tokens):
                pass

    def calibrate(data: Dataset = dataset) -> None:
        collect(
            backbone, heads, data, max_new_tokens=options.new_tokens, batch_size=options.batch_size
        )

    times: dict[str, list[float]] = {"generate": [], "answer": [], "calibrate": []}
    for _ in range(options.rounds):
        for name, call in (("generate", generate), ("answer", answer), ("calibrate", calibrate)):
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    print(conditions(backbone.machine(), **vars(options)))
    for name, values in times.items():
        pairs = [value / base for value, base in zip(values, times["generate"], strict=True)]
        print(
            f"{name:<10} {median(values):7.1f} s   {median(pairs):.2f}x transformers generate "
            f"[{min(pairs):.2f}, {max(pairs):.2f}]"
        )
    print(f"allowed for calibrate: {TARGET}x")


if __name__ == "__main__":
    main()
