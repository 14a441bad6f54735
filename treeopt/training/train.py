"""Medusa-1: train heads on a frozen backbone's own answers.

Loss: the sum over heads k of 0.8^k times the cross-entropy of the token k places ahead, on answer
tokens only (arXiv 2401.10774, section 2.2.1). The backbone is frozen, so its states are computed
once and every epoch works on them alone.

Legend: ``P`` answer positions, ``d`` hidden size, ``V`` vocabulary size, ``K`` heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treeopt.errors import DataError
from treeopt.models.backbone import Backbone
from treeopt.models.candidates import cache_rows
from treeopt.models.heads import MedusaHeads
from treeopt.training.distill import Distilled

DECAY = 0.8
_NO_TARGET = -1
_ROWS = 256  # rows of logits alive at once
_WARM_UP = 0.02


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
    """What one epoch did: mean loss, and each head's top-1 and top-5 rate on held-out answers."""

    number: int
    loss: float
    top1: list[float]
    top5: list[float]


@torch.inference_mode()
def compute_states(
    backbone: Backbone, rows: Sequence[Distilled], num_heads: int, batch_tokens: int = 8192
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
) -> Iterator[Epoch]:
    """Train ``heads`` in place; yield after every epoch how they do on ``held_out``.

    AdamW with a short warm-up and a cosine to zero. ``batch_size`` counts positions.
    """
    positions = len(train_states.targets)
    steps_per_epoch = math.ceil(positions / batch_size)
    total = epochs * steps_per_epoch
    heads.train().requires_grad_(True).float()
    optimiser = torch.optim.AdamW(heads.parameters(), lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate(step, total))
    generator = torch.Generator().manual_seed(seed)
    for number in range(1, epochs + 1):
        losses = 0.0
        for rows in torch.randperm(positions, generator=generator).split(batch_size):
            optimiser.zero_grad()
            losses += _backward(heads, train_states.hidden[rows], train_states.targets[rows])
            torch.nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
            optimiser.step()
            schedule.step()
        top1, top5 = _score(heads, held_out)
        yield Epoch(number, losses / steps_per_epoch, top1, top5)


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
def _score(heads: MedusaHeads, states: States) -> tuple[list[float], list[float]]:
    """Return each head's top-1 and top-5 rate."""
    top1, top5 = [], []
    for head in range(1, heads.num_heads + 1):
        scored = states.targets[:, head - 1] != _NO_TARGET
        hidden, wanted = states.hidden[scored], states.targets[scored, head - 1]
        ranks = []
        for rows in torch.arange(len(wanted)).split(_ROWS):
            weight = heads.frozen_projection(head)
            logits = heads.hidden(head, hidden[rows].float()).to(weight.dtype) @ weight.T
            ranks.append((logits > logits.gather(1, wanted[rows, None])).sum(1))
        rank = torch.cat(ranks)
        top1.append((rank < 1).float().mean().item())
        top5.append((rank < 5).float().mean().item())
    return top1, top5


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
