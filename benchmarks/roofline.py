"""How far modelled step times are from measured ones on this machine.

treeopt profile --out cost.json && python -m benchmarks.roofline --cost cost.json

The peak figures of this machine are measured first, in the dtype of the cost file: arithmetic by a
large matrix product, memory by one row times the LM head, the floor by the smallest linear layer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch.nn import functional

from benchmarks.conditions import conditions
from treeopt.cost import StepCost
from treeopt.models.backbone import load_backbone
from treeopt.roofline import Device, ModelShape, model_cost

_LARGE = 1024


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Return the shortest time of ``work``: a peak is what the machine can do at its best."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def this_device(weight: torch.Tensor) -> Device:
    """Return the peak figures of this machine in the dtype of ``weight`` [V, d]."""
    square = torch.randn(_LARGE, _LARGE).to(weight)
    row, tiny = torch.randn(1, weight.shape[1]).to(weight), torch.randn(8, 8).to(weight)
    with torch.inference_mode():
        product = seconds(lambda: square @ square, 20)
        read = seconds(lambda: functional.linear(row, weight), 20)
        start = seconds(lambda: functional.linear(tiny[:1], tiny), 200)
    return Device(
        "this machine",
        tflops=2 * _LARGE**3 / product / 1e12,
        gb_per_s=weight.numel() * weight.element_size() / read / 1e9,
        tile_rows=1,
        launch_us=start * 1e6,
    )


def shape_of(config: object, name: str, num_heads: int, num_blocks: int) -> ModelShape:
    sizes = {
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_attention_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "vocab_size": "vocab_size",
    }
    found = {ours: getattr(config, theirs) for ours, theirs in sizes.items()}
    return ModelShape(name, **found, num_heads=num_heads, num_blocks=num_blocks, own_lm_heads=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cost", type=Path, required=True)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--num-blocks", type=int, default=3)
    options = parser.parse_args()
    measured = StepCost.load(options.cost)
    backbone = load_backbone(dtype=measured.machine["dtype"])
    measured.check_matches({"backbone_sha256": backbone.sha256})
    device = this_device(backbone.lm_head.weight)
    shape = shape_of(backbone.model.config, backbone.id, options.num_heads, options.num_blocks)
    print(conditions(backbone.machine()))
    print(
        f"\n{device.tflops:.2f} TFLOP/s, {device.gb_per_s:.1f} GB/s, "
        f"{device.launch_us:.1f} us for the smallest kernel\n"
    )
    print("| batch | context | tree size | measured ms | modelled ms | measured / modelled |")
    print("| --- | --- | --- | --- | --- | --- |")
    ratios = []
    for batch, context in measured.situations():
        sizes = measured.sizes(batch, context)
        modelled = model_cost(device, shape, sizes=sizes, contexts=[context], batches=[batch])
        for size in sizes:
            ours, theirs = (cost.step_ms(size, batch, context) for cost in (modelled, measured))
            ratios.append(theirs / ours)
            print(
                f"| {batch} | {context} | {size} | {theirs:.1f} | {ours:.1f} | {ratios[-1]:.2f} |"
            )
    print(f"\nmeasured / modelled: median {median(ratios):.2f}, to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
