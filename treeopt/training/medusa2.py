"""Medusa-2: a low-rank adapter of the backbone learns together with the heads.

Source: arXiv 2401.10774, sections 2.2.2 and 2.3.2: L_LM + λ0 · L_heads, where L_LM is KL(original ‖
tuned) because the text is the original's own. The result is another backbone: decoding it is
lossless with respect to itself, not to the original.

Legend: ``P`` answer positions, ``d`` hidden size, ``K`` heads.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import Parameter

from treeopt.errors import ModelError
from treeopt.files import replacing
from treeopt.models.backbone import Backbone, without_lm_head
from treeopt.models.heads import MedusaHeads
from treeopt.training.distill import Distilled
from treeopt.training.loop import Score, Task
from treeopt.training.losses import ROWS, divergence, heads_backward
from treeopt.training.medusa1 import check_targets, rates
from treeopt.training.processes import Processes
from treeopt.training.states import (
    NO_TARGET,
    States,
    answer_states,
    of_like_length,
    padded,
)

HEADS_WEIGHT = 0.2  # λ0


@dataclass(frozen=True)
class Adapter:
    """Low-rank updates of every linear layer but the LM head; the paper's settings."""

    rank: int = 32
    alpha: int = 16
    dropout: float = 0.05


class Answers:
    """Answers, and the states that the original backbone emitted them from."""

    def __init__(self, rows: Sequence[Distilled], original: States) -> None:
        """Take ``rows`` and their states, answer by answer in the same order."""
        self.rows, self.original = rows, original
        self._ends = list(accumulate(len(row.answer) for row in rows))

    def calls(
        self, indices: Sequence[int], forward_tokens: int
    ) -> Iterator[tuple[list[Distilled], Tensor]]:
        """Yield some answers, a forward call's worth at a time, and their positions int64 [n]."""
        for call in of_like_length([self.rows[index] for index in indices], forward_tokens):
            rows = [self.rows[indices[place]] for place in call]
            yield rows, self.positions([indices[place] for place in call])

    def positions(self, indices: Sequence[int]) -> Tensor:
        """Return the positions of some answers, one after the other: int64 [n]."""
        ends = [self._ends[index] for index in indices]
        lengths = [len(self.rows[index].answer) for index in indices]
        return torch.cat([torch.arange(e - n, e) for e, n in zip(ends, lengths, strict=True)])


class JointTask(Task):
    """Heads and an adapter of the backbone, both trained in place; items are answers.

    New heads come in slowly: λ0 rises along a sine from 0. Trained ones, the second of two stages,
    count in full from the start.

    Args:
        forward_tokens: tokens of one forward call, padding included; memory grows with it, and
            gradients accumulate over the calls of a batch.

    Raises:
        DataError: no answer is long enough for a head.
        ModelError: peft is missing, or knows no such backbone.
    """

    def __init__(
        self,
        backbone: Backbone,
        heads: MedusaHeads,
        learned: Answers,
        held_out: Answers,
        *,
        heads_rate: float,
        backbone_rate: float,
        seed: int,
        adapter: Adapter = Adapter(),
        forward_tokens: int = 1024,
    ) -> None:
        for answers in (learned, held_out):
            check_targets(answers.original.targets)
        self.backbone, self.heads, self.learned, self.held_out = backbone, heads, learned, held_out
        self.heads_rate, self.backbone_rate = heads_rate, backbone_rate
        self.adapter, self.forward_tokens = adapter, forward_tokens
        self.two_stages = any(bool(p.any()) for p in heads.blocks.parameters())
        torch.manual_seed(seed)
        self.tuned = _with_adapter(backbone, adapter)
        heads.train().requires_grad_(True).float()

    @property
    def num_items(self) -> int:  # noqa: D102
        return len(self.learned.rows)

    @property
    def parameters(self) -> list[tuple[float, list[Parameter]]]:  # noqa: D102
        learned = list(self._learned().values())
        return [(self.heads_rate, list(self.heads.parameters())), (self.backbone_rate, learned)]

    @property
    def modules(self) -> dict[str, nn.Module]:  # noqa: D102
        learned = {name.replace(".", "/"): value for name, value in self._learned().items()}
        return {"heads": self.heads, "adapter": nn.ParameterDict(learned)}

    @property
    def settings(self) -> dict[str, Any]:  # noqa: D102
        return {
            "backbone_sha256": self.backbone.sha256,
            "tensors": sorted(self.heads.tensors()),
            "learning_rate": self.heads_rate,
            "backbone_rate": self.backbone_rate,
            "adapter": vars(self.adapter),
            "targets": int(self.learned.original.targets.sum()),
        }

    def backward(self, batch: Tensor, progress: float, processes: Processes) -> float:  # noqa: D102
        targets = self.learned.original.targets
        whole = targets[self.learned.positions(batch.tolist())]
        counts = (whole != NO_TARGET).sum(0)
        scale = HEADS_WEIGHT * (1.0 if self.two_stages else math.sin(math.pi / 2 * progress))
        self.tuned.train()
        total = 0.0
        share = batch[processes.share].tolist()
        for rows, positions in self.learned.calls(share, self.forward_tokens):
            hidden = self._run(rows)
            leaf = hidden.detach().float().requires_grad_()
            wanted = targets[positions].to(leaf.device)
            total += heads_backward(self.heads, leaf, wanted, counts, hidden.dtype, scale)
            kl = self._divergence(leaf, self.learned, positions, hidden.dtype) / len(whole)
            kl.backward()
            assert leaf.grad is not None
            hidden.backward(leaf.grad.to(hidden))
            total += kl.item()
        return total

    @torch.no_grad()
    def score(self) -> Score:  # noqa: D102
        self.tuned.eval()
        original = self.held_out.original
        hidden = torch.empty_like(original.hidden)
        kl = 0.0
        for rows, positions in self.held_out.calls(range(len(self.held_out.rows)), 1024):
            states = self._run(rows)
            hidden[positions] = states.to(hidden)
            kl += float(self._divergence(states.float(), self.held_out, positions, states.dtype))
        agreed = sum(
            int((self._tokens(hidden[rows]) == self._tokens(original.hidden[rows])).sum())
            for rows in torch.arange(len(hidden)).split(ROWS)
        )
        top1, top5, length = rates(self.heads, States(hidden, original.targets))
        return Score(top1, top5, length, kl / len(hidden), agreed / len(hidden))

    def _learned(self) -> dict[str, Parameter]:
        return {name: p for name, p in self.tuned.named_parameters() if p.requires_grad}

    def _run(self, rows: Sequence[Distilled]) -> Tensor:
        """Return the tuned backbone's states that emit the answers of ``rows``: [n, d]."""
        tokens = padded(rows, self.backbone.device)
        hidden = without_lm_head(self.backbone.model)(tokens, use_cache=False).last_hidden_state
        return torch.cat(list(answer_states(hidden, rows)))

    def _divergence(
        self, states: Tensor, answers: Answers, positions: Tensor, dtype: torch.dtype
    ) -> Tensor:
        teacher = answers.original.hidden[positions].to(states.device)
        return divergence(states, self.backbone.lm_head.weight, teacher, dtype)

    def _tokens(self, states: Tensor) -> Tensor:
        return self.backbone.lm_head(states.to(self.backbone.device)).argmax(-1)

    def save_adapter(self, directory: Path) -> None:
        """Write the adapter in peft's own format, whole or not at all."""
        with replacing(directory) as temporary:
            self.tuned.save_pretrained(temporary)

    def merge(self, adapter: Path, directory: Path) -> Score:
        """Write the backbone with the ``adapter`` merged in; return how that backbone does.

        The model is changed in place: the original is gone from memory afterwards. Its
        configuration says what it was tuned from and how far it went.
        """
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(self.tuned, load_file(adapter / "adapter_model.safetensors"))
        self.tuned = self.tuned.merge_and_unload()
        score = self.score()
        self.tuned.config.treeopt = {
            "tuned_from": self.backbone.id,
            "tuned_from_sha256": self.backbone.sha256,
            "kl": score.kl,
            "agreement": score.agreement,
        }
        with replacing(directory) as temporary:
            self.tuned.save_pretrained(temporary)
            self.backbone.tokenizer.save_pretrained(temporary)
        return score


def _with_adapter(backbone: Backbone, adapter: Adapter) -> Any:
    """Return peft's model around ``backbone.model``, whose linear layers it replaces."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ModelError(
            "tuning the backbone needs peft; `pip install treeopt[lora]` brings it"
        ) from error
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules="all-linear",  # peft leaves the LM head out
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():  # peft asks transformers by a name that is on its way out
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(backbone.model, config)
