"""Medusa-1: heads learn from the states of a frozen backbone.

Source: arXiv 2401.10774, section 2.2.1. The states are computed once, and every epoch works on them
alone.

Legend: ``P`` answer positions, ``K`` heads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from treeopt.build import Request, predict
from treeopt.errors import DataError, TraceError
from treeopt.models.heads import MedusaHeads
from treeopt.trace import MISSED, RankTrace
from treeopt.training.loop import Score, Task
from treeopt.training.losses import ROWS, heads_backward
from treeopt.training.processes import Processes
from treeopt.training.states import NO_TARGET, States

_TREE_SIZE = 64  # of the trees whose acceptance length tells epochs apart
_NUM_RANKS = 10


class HeadsTask(Task):
    """Heads, trained in place on ``learned`` and scored on ``held_out``; items are positions.

    Raises:
        DataError: no answer is long enough for a head.
    """

    def __init__(
        self, heads: MedusaHeads, learned: States, held_out: States, learning_rate: float
    ) -> None:
        check_targets(learned.targets)
        check_targets(held_out.targets)
        self.heads, self.learned, self.held_out = heads, learned, held_out
        self.learning_rate = learning_rate
        heads.train().requires_grad_(True).float()

    @property
    def num_items(self) -> int:  # noqa: D102
        return len(self.learned.targets)

    @property
    def parameters(self) -> list[tuple[float, list[Parameter]]]:  # noqa: D102
        return [(self.learning_rate, list(self.heads.parameters()))]

    @property
    def modules(self) -> dict[str, torch.nn.Module]:  # noqa: D102
        return {"heads": self.heads}

    @property
    def settings(self) -> dict[str, Any]:  # noqa: D102
        return {
            "backbone_sha256": self.heads.backbone_sha256,
            "tensors": sorted(self.heads.tensors()),
            "learning_rate": self.learning_rate,
            "targets": int(self.learned.targets.sum()),
        }

    def backward(self, batch: Tensor, progress: float, processes: Processes) -> float:  # noqa: D102
        counts = (self.learned.targets[batch] != NO_TARGET).sum(0)
        rows = batch[processes.share]
        hidden, targets = self.learned.hidden[rows], self.learned.targets[rows]
        device = self.heads.device
        return heads_backward(
            self.heads, hidden.float().to(device), targets.to(device), counts, hidden.dtype
        )

    def score(self) -> Score:  # noqa: D102
        return Score(*rates(self.heads, self.held_out))


def check_targets(targets: Tensor) -> None:
    """Raise DataError unless some answer is long enough for every head."""
    for head, column in enumerate(targets.T, 1):
        if not (column != NO_TARGET).any():
            raise DataError(
                f"no answer is long enough for head {head}, which needs {head + 1} tokens; "
                "more answers, longer ones, or fewer heads"
            )


@torch.inference_mode()
def rates(heads: MedusaHeads, states: States) -> tuple[list[float], list[float], float | None]:
    """Return each head's top-1 and top-5 rate, and the replayed acceptance length."""
    scored = states.targets != NO_TARGET
    ranks = torch.full(states.targets.shape, MISSED, dtype=torch.int64)
    for head in range(1, heads.num_heads + 1):
        weight = heads.projection_weight(head).to(states.hidden.dtype)
        for rows in scored[:, head - 1].nonzero()[:, 0].split(ROWS):
            hidden = heads.hidden(head, states.hidden[rows].float().to(heads.device))
            logits = hidden.to(weight.dtype) @ weight.T
            wanted = logits.gather(1, states.targets[rows, head - 1, None].to(heads.device))
            ranks[rows, head - 1] = (logits > wanted).sum(1).to(ranks)
    top1, top5 = ((((ranks < top) & scored).sum(0) / scored.sum(0)).tolist() for top in (1, 5))
    return top1, top5, _acceptance_length(ranks, states.targets)


def _acceptance_length(ranks: Tensor, targets: Tensor) -> float | None:
    """Return the out-of-fold acceptance length of ``_TREE_SIZE`` rows; None if too few."""
    ranks = ranks.where(ranks < _NUM_RANKS, MISSED)
    num_positions, num_heads = ranks.shape
    ends = (targets[:, 0] == NO_TARGET).nonzero()[:, 0] + 1  # the last token has none after it
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
