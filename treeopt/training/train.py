"""Medusa-1: train heads on a frozen backbone's own answers.

Loss: the sum over heads k of 0.8^k times the cross-entropy of the token k places ahead, on answer
tokens only (arXiv 2401.10774, section 2.2.1). The backbone is frozen, so its states are computed
once and every epoch works on them alone.

Legend: ``P`` answer positions, ``d`` hidden size, ``V`` vocabulary size, ``K`` heads.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treeopt.build import Request, predict
from treeopt.errors import DataError, TraceError
from treeopt.files import replacing
from treeopt.models.backbone import Backbone
from treeopt.models.candidates import cache_rows
from treeopt.models.heads import MedusaHeads
from treeopt.trace import MISSED, RankTrace
from treeopt.training.distill import Distilled

DECAY = 0.8
_NO_TARGET = -1
_ROWS = 256  # rows of logits alive at once
_WARM_UP = 0.02
_TREE_SIZE = 64  # of the trees whose acceptance length tells epochs apart
_NUM_RANKS = 10


@dataclass(frozen=True)
class States:
    """The backbone's states along its own answers.

    hidden: [P, d]. targets: int64 [P, K], ``targets[p, k-1]`` the token k places after the one
    that position p emitted; -1 past the answer's end.
    """

    hidden: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Epoch:
    """What one epoch did, on held-out answers but for the loss.

    loss: mean over the epoch's batches. top1, top5: each head's rates.
    acceptance_length: replayed with trees of 64 rows that a document had no part in; None where
        the answers are too few for that.
    best: no earlier epoch accepted more; without acceptance lengths the latest counts as best.
    """

    number: int
    loss: float
    top1: list[float]
    top5: list[float]
    acceptance_length: float | None
    best: bool


@torch.inference_mode()
def compute_states(
    backbone: Backbone, rows: Sequence[Distilled], num_heads: int, batch_tokens: int = 1024
) -> Iterator[States]:
    """Yield the states of ``rows``, batch by batch, each of about ``batch_tokens`` tokens."""
    ordered = sorted(rows, key=lambda row: len(row.prompt) + len(row.answer))
    batch: list[Distilled] = []
    for row in ordered:
        length = len(row.prompt) + len(row.answer)  # the longest so far
        if batch and (len(batch) + 1) * length > batch_tokens:
            yield _states_of(backbone, batch, num_heads)
            batch = []
        batch.append(row)
    if batch:
        yield _states_of(backbone, batch, num_heads)


def concatenate(parts: Sequence[States]) -> States:
    """Return all positions of ``parts`` as one."""
    if not parts:
        raise DataError("there are no answers to train on")
    return States(
        torch.cat([part.hidden for part in parts]), torch.cat([part.targets for part in parts])
    )


def train(
    heads: MedusaHeads,
    train_states: States,
    held_out: States,
    *,
    epochs: int,
    learning_rate: float,
    batch_size: int,
    seed: int,
    checkpoint: Path | None = None,
) -> Iterator[Epoch]:
    """Train ``heads`` in place; yield after every epoch how they do on ``held_out``.

    AdamW with a short warm-up and a cosine to zero. ``batch_size`` counts positions. With a
    ``checkpoint`` file, written after every epoch and on Ctrl-C, a run goes on where it stopped
    and gives what it would have given; the file goes when the last epoch is done.

    Raises:
        DataError: no answer is long enough for a head, the loss is not finite, or the checkpoint
            is of another run.
        KeyboardInterrupt: after the checkpoint is written.
    """
    _check_targets(train_states, heads.num_heads)
    _check_targets(held_out, heads.num_heads)
    positions = len(train_states.targets)
    steps_per_epoch = math.ceil(positions / batch_size)
    total = epochs * steps_per_epoch
    heads.train().requires_grad_(True).float()
    optimiser = torch.optim.AdamW(heads.parameters(), lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate(step, total))
    settings = {
        "backbone_sha256": heads.backbone_sha256,
        "tensors": sorted(heads.tensors()),
        "epochs": epochs,
        "learning_rate": learning_rate,
        "batch_size": batch_size,
        "seed": seed,
        "positions": positions,
        "targets": int(train_states.targets.sum()),
    }
    run = _Run(checkpoint, settings, {"heads": heads, "optimiser": optimiser, "schedule": schedule})
    run.resume()
    generator = torch.Generator().manual_seed(seed)
    with _interrupt_deferred() as interrupted:
        for number in range(1, epochs + 1):
            batches = torch.randperm(positions, generator=generator).split(batch_size)
            if number < run.epoch:
                continue
            for rows in batches[run.batch :]:
                optimiser.zero_grad()
                loss = _backward(heads, train_states.hidden[rows], train_states.targets[rows])
                if not math.isfinite(loss):
                    raise DataError(
                        f"the loss is {loss} at epoch {number}, batch {run.batch + 1}; heads saved "
                        "before are as they were, a smaller learning rate may go further"
                    )
                torch.nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
                optimiser.step()
                schedule.step()
                run.batch, run.losses = run.batch + 1, run.losses + loss
                if interrupted():
                    run.save()
                    raise KeyboardInterrupt
            loss = run.losses / steps_per_epoch
            top1, top5, length = _score(heads, held_out)
            score = float(number) if length is None else length
            best = score > run.best_score
            yield Epoch(number, loss, top1, top5, length, best)
            run.next_epoch(max(score, run.best_score))
    run.forget()


@dataclass
class _Run:
    """How far training is, and the file that keeps it.

    epoch: the one in progress, from 1. batch: batches of it that are done. losses: their sum.
    parts: what has state, by name.
    """

    file: Path | None
    settings: dict[str, Any]
    parts: dict[str, Any]
    epoch: int = 1
    batch: int = 0
    losses: float = 0.0
    best_score: float = -math.inf

    _COUNTERS = ("epoch", "batch", "losses", "best_score")

    def resume(self) -> None:
        """Go on from the file, if there is one."""
        if self.file is None or not self.file.exists():
            return
        try:
            value = torch.load(self.file, weights_only=True)
            settings = value["settings"]
        except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, TypeError) as error:
            raise DataError(f"{self.file} is not a checkpoint of `treeopt train`") from error
        for key, ours in self.settings.items():
            if settings.get(key) != ours:
                raise DataError(
                    f"{self.file} is of a run with another {key}: {settings.get(key)}, not {ours}; "
                    "repeat that run's command, or delete the file to start anew"
                )
        for name in self._COUNTERS:
            setattr(self, name, value[name])
        for name, part in self.parts.items():
            part.load_state_dict(value[name])

    def save(self) -> None:
        """Write the file, whole or not at all."""
        if self.file is None:
            return
        states = {name: part.state_dict() for name, part in self.parts.items()}
        counters = {name: getattr(self, name) for name in self._COUNTERS}
        with replacing(self.file) as temporary, Path(temporary).open("wb") as file:
            torch.save({"settings": self.settings, **counters, **states}, file)

    def next_epoch(self, best_score: float) -> None:
        self.epoch, self.batch, self.losses = self.epoch + 1, 0, 0.0
        self.best_score = best_score
        self.save()

    def forget(self) -> None:
        if self.file is not None:
            self.file.unlink(missing_ok=True)


@contextlib.contextmanager
def _interrupt_deferred() -> Iterator[Callable[[], bool]]:
    """Hold Ctrl-C back, so that it cuts no step in two; yield what tells whether it came."""
    came = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield came.is_set  # signals reach the main thread only
        return
    before = signal.signal(signal.SIGINT, lambda *_: came.set())
    try:
        yield came.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _check_targets(states: States, num_heads: int) -> None:
    for head in range(1, num_heads + 1):
        if not (states.targets[:, head - 1] != _NO_TARGET).any():
            raise DataError(
                f"no answer is long enough for head {head}, which needs {head + 1} tokens; "
                "more answers, longer ones, or fewer heads"
            )


def _rate(step: int, total: int) -> float:
    warm_up = max(1, int(_WARM_UP * total))
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, total - warm_up)))


def _backward(heads: MedusaHeads, hidden: Tensor, targets: Tensor) -> float:
    """Add the gradients of one batch; return its loss."""
    total = 0.0
    for head in range(1, heads.num_heads + 1):
        scored = targets[:, head - 1] != _NO_TARGET
        if not scored.any():
            continue
        states = heads.hidden(head, hidden[scored].float())
        loss = _FrozenCrossEntropy.apply(
            states, heads.frozen_projection(head), targets[scored, head - 1]
        )
        weighted = DECAY**head * loss
        weighted.backward()
        total += weighted.item()
    return total


class _FrozenCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of ``states @ weight.T`` for a frozen ``weight``, in bounded memory.

    The gradient with respect to the states, (softmax - onehot) @ weight, is made in the forward
    pass while the logits of a slice of rows are at hand; [P, V] never exists as a whole.
    """

    @staticmethod
    def forward(ctx: object, states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        gradient = torch.empty_like(states)
        loss = states.new_zeros(())
        for rows in torch.arange(len(states)).split(_ROWS):
            logits = states[rows].to(weight.dtype) @ weight.T
            loss += _softmax_minus_onehot_(logits, targets[rows])
            gradient[rows] = (logits @ weight).float()
        ctx.save_for_backward(gradient / len(states))  # type: ignore[attr-defined]
        return loss / len(states)

    @staticmethod
    def backward(ctx: object, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad_outputs[0] * gradient, None, None


def _softmax_minus_onehot_(logits: Tensor, targets: Tensor) -> Tensor:
    """Turn ``logits`` [n, V] into the loss's gradient in place; return the summed loss.

    Float32 copies are made of a few rows at a time, so that they stay in the CPU's cache: that is
    seven times faster than whole passes over [n, V].
    """
    loss = logits.new_zeros((), dtype=torch.float32)
    for rows, wanted in zip(
        logits.split(cache_rows(logits)), targets.split(cache_rows(logits)), strict=True
    ):
        block = rows.float()
        top = block.amax(-1, keepdim=True)
        chosen = block.gather(1, wanted[:, None])
        total = block.sub_(top).exp_().sum(-1, keepdim=True)
        loss += (total.log() + top - chosen).sum()
        block.div_(total).scatter_add_(1, wanted[:, None], -torch.ones_like(chosen))
        rows.copy_(block)
    return loss


@torch.inference_mode()
def _score(heads: MedusaHeads, states: States) -> tuple[list[float], list[float], float | None]:
    """Return each head's top-1 and top-5 rate, and the replayed acceptance length."""
    scored = states.targets != _NO_TARGET
    ranks = torch.full(states.targets.shape, MISSED, dtype=torch.int64)
    for head in range(1, heads.num_heads + 1):
        weight = heads.frozen_projection(head)
        for rows in scored[:, head - 1].nonzero()[:, 0].split(_ROWS):
            hidden = heads.hidden(head, states.hidden[rows].float())
            logits = hidden.to(weight.dtype) @ weight.T
            wanted = logits.gather(1, states.targets[rows, head - 1, None])
            ranks[rows, head - 1] = (logits > wanted).sum(1).to(ranks)
    top1, top5 = ((((ranks < top) & scored).sum(0) / scored.sum(0)).tolist() for top in (1, 5))
    return top1, top5, _acceptance_length(ranks, states.targets)


def _acceptance_length(ranks: Tensor, targets: Tensor) -> float | None:
    """Return the out-of-fold acceptance length of ``_TREE_SIZE`` rows; None if too few."""
    ranks = ranks.where(ranks < _NUM_RANKS, MISSED)
    num_positions, num_heads = ranks.shape
    ends = (targets[:, 0] == _NO_TARGET).nonzero()[:, 0] + 1  # the last token has none after it
    unknown = np.zeros(num_positions, dtype=np.float16)
    trace = RankTrace(
        ranks.numpy().astype(np.int16),
        np.zeros((num_positions, num_heads, _NUM_RANKS), dtype=np.float16),
        unknown,
        unknown.copy(),
        np.concatenate([[0], ends.numpy()]),
        provenance={},
    )
    try:
        return predict(trace, Request(_TREE_SIZE)).value
    except TraceError:  # fewer documents than folds
        return None


def _states_of(backbone: Backbone, rows: Sequence[Distilled], num_heads: int) -> States:
    """Return the states of ``rows``, run as one batch padded on the right."""
    sequences = [row.prompt + row.answer[:-1] for row in rows]
    longest = max(map(len, sequences))
    tokens = torch.tensor([s + [0] * (longest - len(s)) for s in sequences], device=backbone.device)
    hidden = backbone.forward(tokens, backbone.new_cache(longest))
    kept = [
        states[len(row.prompt) - 1 : len(row.prompt) - 1 + len(row.answer)]
        for states, row in zip(hidden, rows, strict=True)
    ]
    targets = []
    for row in rows:
        padded = torch.tensor(row.answer + [_NO_TARGET] * num_heads)
        targets.append(padded.unfold(0, num_heads + 1, 1)[:, 1:])
    return States(torch.cat(kept).clone(), torch.cat(targets))
