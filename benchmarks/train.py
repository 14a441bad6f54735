"""How busy head training keeps the machine: its rate over that of the bare matrix products.

python -m benchmarks.train [--positions 8192] [--rounds 5]

The products are those that no way of training can leave out: per head and position the blocks
forwards and twice backwards, the logits, and their gradient's way back. States are random, which
changes no time. Peak memory is the process's own.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from statistics import median

import torch

from benchmarks.conditions import conditions
from treeopt.formats.heads import SHARED
from treeopt.models.backbone import load_backbone
from treeopt.models.heads import MedusaHeads
from treeopt.training.loop import Plan, fit
from treeopt.training.losses import ROWS
from treeopt.training.medusa1 import HeadsTask
from treeopt.training.states import States

TARGET = 0.7


class Unscored(HeadsTask):
    """Head training without the scores that end an epoch."""

    def score(self):  # type: ignore[no-untyped-def]
        from treeopt.training.loop import Score

        return Score([], [], None)


def seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--positions", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--num-blocks", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    backbone = load_backbone(dtype=options.dtype)
    size, positions = backbone.hidden_size, options.positions
    states = States(
        torch.randn(positions, size).to(backbone.dtype),
        torch.randint(backbone.vocab_size, (positions, options.num_heads)),
    )
    heads = MedusaHeads(options.num_heads, options.num_blocks, backbone, SHARED)
    weight, block = backbone.lm_head.weight, torch.randn(size, size)

    def train() -> None:
        task = Unscored(heads, states, states, 1e-3)
        for _ in fit(task, Plan(1, options.batch_size)):
            pass

    def products() -> None:
        for rows in states.hidden.split(options.batch_size):
            inputs = rows.float()
            for _ in range(options.num_heads):
                for _ in range(options.num_blocks):
                    inputs @ block, inputs @ block, inputs.T @ inputs
                for part in rows.split(ROWS):
                    (part @ weight.T) @ weight

    times = [(seconds(train), seconds(products)) for _ in range(options.rounds + 1)][1:]
    trained, bare = (median(column) for column in zip(*times, strict=True))
    shares = sorted(b / t for t, b in times)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    shape = {key: vars(options)[key] for key in ("num_heads", "num_blocks", "batch_size")}
    print(conditions(backbone.machine(), positions=positions, rounds=options.rounds, **shape))
    print()
    print("| | positions/s |")
    print("| --- | --- |")
    print(f"| head training | {positions / trained:.0f} |")
    print(f"| its matrix products alone | {positions / bare:.0f} |")
    print()
    print(
        f"share {median(shares):.2f} [{shares[0]:.2f}, {shares[-1]:.2f}] "
        f"(at least {TARGET}); peak memory {peak:.1f} GB"
    )


if __name__ == "__main__":
    main()
