"""Train heads from files of answers to a checkpoint file."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

from treeopt.errors import DataError
from treeopt.models.backbone import Backbone
from treeopt.models.heads import MedusaHeads
from treeopt.training.distill import Distilled, read_distilled
from treeopt.training.train import compute_states, concatenate, train


def train_heads(
    backbone: Backbone,
    files: Sequence[Path],
    out: Path,
    *,
    heads: MedusaHeads,
    epochs: int,
    learning_rate: float,
    batch_size: int,
    held_out: float,
    seed: int,
    max_tokens: int | None = None,
    on_message: Callable[[str], None] = lambda message: None,
) -> None:
    """Train ``heads`` on the answers in ``files``; ``out`` keeps those of the best epoch.

    Stopped and repeated, it goes on from the checkpoint beside ``out``.

    Args:
        heads: new ones, or trained ones to go on from.
        held_out: share of the answers that is kept for scoring.
        max_tokens: train on at most about this many answer tokens; each takes the hidden size
            times the size of the backbone's dtype in memory.
        on_message: gets one line per stage and epoch.

    Raises:
        DataError: the answers are another backbone's, too few, too short or too long; see also
            ``train``.
    """
    rows = _read(backbone, files)
    random.Random(seed).shuffle(rows)
    cut = max(1, round(held_out * len(rows)))
    if len(rows) <= cut:
        raise DataError(f"{len(rows)} answers are too few to train on and hold some out")
    rows = rows[:cut] + _leading(rows[cut:], max_tokens)
    on_message(f"computing states of {sum(len(row.answer) for row in rows)} answer tokens")
    scored = concatenate(list(compute_states(backbone, rows[:cut], heads.num_heads)))
    learned = concatenate(list(compute_states(backbone, rows[cut:], heads.num_heads)))
    checkpoint = out.with_name(out.name + ".checkpoint")
    if checkpoint.exists():
        on_message(f"going on from {checkpoint}")
    for epoch in train(
        heads,
        learned,
        scored,
        epochs=epochs,
        learning_rate=learning_rate,
        batch_size=batch_size,
        seed=seed,
        checkpoint=checkpoint,
    ):
        shown = "  ".join(f"{a:.3f}/{b:.3f}" for a, b in zip(epoch.top1, epoch.top5, strict=True))
        length = epoch.acceptance_length
        on_message(
            f"epoch {epoch.number}: loss {epoch.loss:.4f}, top-1/top-5 {shown}"
            + (f", acceptance length {length:.3f}" if length is not None else "")
            + ("" if epoch.best else "; an earlier epoch was better")
        )
        if not epoch.best:
            continue
        heads.save(
            out,
            backbone=backbone.id,
            backbone_sha256=backbone.sha256,
            answers=str(len(rows) - cut),
            tokens=str(len(learned.targets)),
            epoch=str(epoch.number),
            seed=str(seed),
        )


def _leading(rows: list[Distilled], max_tokens: int | None) -> list[Distilled]:
    """Return the first rows with at most ``max_tokens`` answer tokens together, at least one."""
    if max_tokens is None:
        return rows
    ends = accumulate(len(row.answer) for row in rows)
    return rows[: max(1, sum(end <= max_tokens for end in ends))]


def _read(backbone: Backbone, files: Sequence[Path]) -> list[Distilled]:
    rows: list[Distilled] = []
    for file in files:
        conditions, found = read_distilled(file)
        if conditions["backbone_sha256"] != backbone.sha256:
            raise DataError(f"{file} holds the answers of {conditions['backbone']}, not these")
        for number, row in enumerate(found, 1):
            if (length := len(row.prompt) + len(row.answer)) > backbone.context_length:
                raise DataError(
                    f"{file}: answer {number} and its prompt have {length} tokens; the context "
                    f"holds {backbone.context_length}"
                )
        rows += found
    return rows
