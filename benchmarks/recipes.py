"""What pays in head training: one change to a short run at a time, scored on held-out answers.

python -m benchmarks.recipes --data answers.jsonl [--positions 32768] [--only NAME …]

Acceptance lengths are replayed with trees of 64 rows, each on answers that it was not built from.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.conditions import conditions
from treeopt.formats.heads import OWN, SHARED
from treeopt.models.backbone import Backbone, load_backbone
from treeopt.models.heads import MedusaHeads
from treeopt.training import losses
from treeopt.training.distill import Distilled, read_distilled
from treeopt.training.loop import Plan, fit
from treeopt.training.medusa1 import HeadsTask
from treeopt.training.processes import Processes
from treeopt.training.states import NO_TARGET, States, compute_states


@dataclass(frozen=True)
class Recipe:
    """A short run.

    share: of the positions at hand. low_rank: of a learned update to the shared projection.
    decay: head k counts decay^k.
    soft: learn the backbone's whole distribution k places on, not the token that it chose.
    """

    share: float = 1.0
    num_blocks: int = 2
    layout: str = SHARED
    low_rank: int = 0
    learning_rate: float = 3e-3
    decay: float = losses.DECAY
    soft: bool = False


PLAIN = Recipe()
RECIPES = {
    "the default": PLAIN,
    "half the data": replace(PLAIN, share=0.5),
    "a quarter of the data": replace(PLAIN, share=0.25),
    "1 block": replace(PLAIN, num_blocks=1),
    "3 blocks": replace(PLAIN, num_blocks=3),
    "own projections": replace(PLAIN, layout=OWN, learning_rate=1e-3),
    "low-rank update of the projection, rank 16": replace(PLAIN, low_rank=16),
    "learning rate 1e-3": replace(PLAIN, learning_rate=1e-3),
    "learning rate 1e-2": replace(PLAIN, learning_rate=1e-2),
    "all heads count alike": replace(PLAIN, decay=1.0),
    "soft targets": replace(PLAIN, soft=True),
}


class LowRankHeads(MedusaHeads):
    """Heads that add a low-rank update of their own to the shared projection."""

    def __init__(self, num_heads: int, num_blocks: int, backbone: Backbone, rank: int) -> None:
        super().__init__(num_heads, num_blocks, backbone, SHARED)
        outer, inner = backbone.lm_head.weight.shape
        self.down = nn.Parameter(torch.randn(num_heads, rank, inner) / inner**0.5)
        self.up = nn.Parameter(torch.zeros(num_heads, outer, rank))

    def projection_weight(self, head: int) -> Tensor:
        return super().projection_weight(head).float() + self.up[head - 1] @ self.down[head - 1]


class SoftTask(HeadsTask):
    """Head k learns what the backbone's own state k places on says."""

    def backward(self, batch: Tensor, progress: float, processes: Processes) -> float:
        total = 0.0
        for head in range(1, self.heads.num_heads + 1):
            rows = batch[self.learned.targets[batch, head - 1] != NO_TARGET]
            states = self.heads.hidden(head, self.learned.hidden[rows].float())
            teacher = self.learned.hidden[rows + head]
            weight = self.heads.projection_weight(head)
            loss = losses.divergence(states, weight, teacher, teacher.dtype)
            loss = losses.DECAY**head * loss / len(rows)
            loss.backward()
            total += loss.item()
        return total


def states_of(
    backbone: Backbone, files: list[Path], positions: int, num_heads: int
) -> tuple[States, States]:
    """Return shuffled answers' states to learn from and, half as many, to score on."""
    rows = [row for file in files for row in read_distilled(file)[1]]
    random.Random(0).shuffle(rows)
    ends = list(accumulate(len(row.answer) for row in rows))
    held_out = _until(rows, ends, positions // 2)
    kept = _until(rows, ends, positions * 3 // 2)
    states = compute_states(backbone, kept, num_heads)
    scored, learned = states.split(sum(len(row.answer) for row in held_out))
    return learned, scored


def _until(rows: list[Distilled], ends: list[int], positions: int) -> list[Distilled]:
    return rows[: sum(end <= positions for end in ends)]


def run(recipe: Recipe, backbone: Backbone, num_heads: int, learned: States, scored: States) -> str:
    """Train as ``recipe`` says; return a row of the table."""
    if recipe.low_rank:
        heads: MedusaHeads = LowRankHeads(num_heads, recipe.num_blocks, backbone, recipe.low_rank)
    else:
        heads = MedusaHeads(num_heads, recipe.num_blocks, backbone, recipe.layout)
    losses.DECAY = recipe.decay
    part, _ = learned.split(round(recipe.share * len(learned.targets)))
    start = time.perf_counter()
    kind = SoftTask if recipe.soft else HeadsTask
    (epoch,) = fit(kind(heads, part, scored, recipe.learning_rate), Plan(1, 512))
    elapsed = time.perf_counter() - start
    score = epoch.score
    top1, top5 = (" ".join(f"{rate:.3f}"[1:] for rate in row) for row in (score.top1, score.top5))
    return (
        f"{len(part.targets)} | {top1} | {top5} | {score.acceptance_length:.3f} | {elapsed:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, action="append", required=True)
    parser.add_argument("--positions", type=int, default=32768)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES))
    options = parser.parse_args()
    backbone = load_backbone(dtype=options.dtype)
    learned, scored = states_of(backbone, options.data, options.positions, options.num_heads)
    print(conditions(backbone.machine(), scored_positions=len(scored.targets), batch_size=512))
    print()
    print("| recipe | positions | top-1 | top-5 | acceptance length at 64 | time |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in options.only:
        row = run(RECIPES[name], backbone, options.num_heads, learned, scored)
        print(f"| {name} | {row} |", flush=True)


if __name__ == "__main__":
    main()
