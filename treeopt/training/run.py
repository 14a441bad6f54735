"""Train heads from files of answers to a checkpoint file."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from treeopt.errors import DataError
from treeopt.models.backbone import Backbone
from treeopt.models.heads import SHARED, MedusaHeads
from treeopt.training.distill import Distilled, read_distilled
from treeopt.training.train import compute_states, concatenate, train


def train_heads(
    backbone: Backbone,
    files: Sequence[Path],
    out: Path,
    *,
    num_heads: int,
    num_blocks: int,
    epochs: int,
    learning_rate: float,
    batch_size: int,
    held_out: float,
    seed: int,
    on_message: Callable[[str], None] = lambda message: None,
) -> None:
    """Train new heads on the answers in ``files``; write ``out`` after every epoch.

    Args:
        held_out: share of the answers that is kept for scoring.
        on_message: gets one line per stage and epoch.

    Raises:
        DataError: the answers are another backbone's, or too few.
    """
    rows = _read(backbone, files)
    random.Random(seed).shuffle(rows)
    cut = max(1, round(held_out * len(rows)))
    if len(rows) <= cut:
        raise DataError(f"{len(rows)} answers are too few to train on and hold some out")
    on_message(f"computing states of {sum(len(row.answer) for row in rows)} answer tokens")
    scored = concatenate(list(compute_states(backbone, rows[:cut], num_heads)))
    learned = concatenate(list(compute_states(backbone, rows[cut:], num_heads)))
    heads = MedusaHeads(num_heads, num_blocks, backbone, SHARED)
    for epoch in train(
        heads,
        learned,
        scored,
        epochs=epochs,
        learning_rate=learning_rate,
        batch_size=batch_size,
        seed=seed,
    ):
        shown = "  ".join(f"{a:.3f}/{b:.3f}" for a, b in zip(epoch.top1, epoch.top5, strict=True))
        on_message(f"epoch {epoch.number}: loss {epoch.loss:.4f}, top-1/top-5 {shown}")
        heads.save(
            out,
            backbone=backbone.id,
            backbone_sha256=backbone.sha256,
            answers=str(len(rows) - cut),
            tokens=str(len(learned.targets)),
            epoch=str(epoch.number),
            seed=str(seed),
        )


def _read(backbone: Backbone, files: Sequence[Path]) -> list[Distilled]:
    rows: list[Distilled] = []
    for file in files:
        conditions, found = read_distilled(file)
        if conditions["backbone_sha256"] != backbone.sha256:
            raise DataError(f"{file} holds the answers of {conditions['backbone']}, not these")
        rows += found
    return rows
