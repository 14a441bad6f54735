"""Train heads, and if asked their backbone, from files of answers to files of weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from treeopt.errors import DataError
from treeopt.models.backbone import Backbone
from treeopt.models.heads import MedusaHeads
from treeopt.training.distill import Distilled, read_distilled
from treeopt.training.loop import Epoch, Plan, Score, fit
from treeopt.training.medusa1 import HeadsTask
from treeopt.training.medusa2 import Answers, JointTask
from treeopt.training.states import compute_states, states_digest


@dataclass(frozen=True)
class Tuning:
    """Train the backbone too (Medusa-2).

    directory: where the tuned backbone goes.
    learning_rate: of its adapter.
    """

    directory: Path
    learning_rate: float


def train_heads(
    backbone: Backbone,
    files: Sequence[Path],
    out: Path,
    *,
    heads: MedusaHeads,
    plan: Plan,
    learning_rate: float,
    held_out: float,
    max_tokens: int | None = None,
    forward_tokens: int = 1024,
    tuning: Tuning | None = None,
    on_message: Callable[[str], None] = lambda message: None,
) -> None:
    """Train ``heads`` on the answers in ``files``; ``out`` keeps those of the best epoch.

    Stopped and repeated, it goes on from the checkpoint and the states beside ``out``.

    Args:
        heads: new ones, or trained ones to go on from.
        plan: its ``batch_size`` counts answer tokens, or whole answers with ``tuning``.
        held_out: share of the answers that is kept for scoring.
        max_tokens: train on at most about this many answer tokens; each takes the hidden size
            times the size of the backbone's dtype on disk while training runs.
        forward_tokens: tokens of one forward call of the backbone, padding included.
        on_message: gets one line per stage and epoch, in every process.

    Raises:
        DataError: the answers are another backbone's, too few, too short or too long; see also
            ``fit``.
    """
    rows = _read(backbone, files)
    random.Random(plan.seed).shuffle(rows)
    cut = max(1, round(held_out * len(rows)))
    if len(rows) <= cut:
        raise DataError(f"{len(rows)} answers are too few to train on and hold some out")
    rows = rows[:cut] + _leading(rows[cut:], max_tokens)
    on_message(f"computing states of {sum(len(row.answer) for row in rows)} answer tokens")
    file = out.with_name(f"{out.name}.states-{states_digest(backbone, rows)[:12]}")
    states = compute_states(backbone, rows, heads.num_heads, file, plan.processes, forward_tokens)
    scored, learned = states.split(sum(len(row.answer) for row in rows[:cut]))
    task: HeadsTask | JointTask
    if tuning:
        task = JointTask(
            backbone,
            heads,
            Answers(rows[cut:], learned),
            Answers(rows[:cut], scored),
            heads_rate=learning_rate,
            backbone_rate=tuning.learning_rate,
            forward_tokens=forward_tokens,
            seed=plan.seed,
        )
    else:
        task = HeadsTask(heads, learned, scored, learning_rate)
    plan = replace(plan, checkpoint=out.with_name(out.name + ".checkpoint"))
    if plan.checkpoint and plan.checkpoint.exists():
        on_message(f"going on from {plan.checkpoint}")
    adapter = out.with_name(out.name + ".adapter")
    for epoch in fit(task, plan):
        on_message(_described(epoch))
        if not epoch.best:
            continue
        if isinstance(task, JointTask):
            task.save_adapter(adapter)
        heads.save(
            out,
            backbone=str(tuning.directory) if tuning else backbone.id,
            trained_on_sha256=backbone.sha256,
            answers=str(len(rows) - cut),
            tokens=str(len(learned.targets)),
            epoch=str(epoch.number),
            seed=str(plan.seed),
        )
    if not plan.processes.is_main:
        return
    if isinstance(task, JointTask) and tuning:
        drift = task.merge(adapter, tuning.directory)
        on_message(f"{tuning.directory} is lossy with respect to {backbone.id}: {_drift(drift)}")
    file.unlink()


def _described(epoch: Epoch) -> str:
    """Return what an epoch did, as one line."""
    score = epoch.score
    shown = "  ".join(f"{a:.3f}/{b:.3f}" for a, b in zip(score.top1, score.top5, strict=True))
    text = f"epoch {epoch.number}: loss {epoch.loss:.4f}, top-1/top-5 {shown}"
    if score.acceptance_length is not None:
        text += f", acceptance length {score.acceptance_length:.3f}"
    if score.kl is not None:
        text += f", {_drift(score)}"
    return text if epoch.best else f"{text}; an earlier epoch was better"


def _drift(score: Score) -> str:
    return f"KL {score.kl:.4f} nats, {score.agreement:.1%} of its tokens the same"


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
