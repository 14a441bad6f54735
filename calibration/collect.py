"""Run backbone and heads over prompts: a RankTrace out.

Legend: ``n`` tokens of one answer, ``K`` heads, ``R`` ranks kept, ``d`` hidden size, ``V``
vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from calibration.data import Dataset
from treeopt.decoder.plain import Answer, answer_batch, like_length, room_for
from treeopt.errors import DataError, TraceError
from treeopt.models.backbone import Backbone
from treeopt.models.candidates import cache_rows, log_total, top_candidates
from treeopt.models.heads import MedusaHeads, offset_scores, offset_warning
from treeopt.trace import MISSED, RankTrace
from treeopt.training.distill import template_sha256

NUM_RANKS = 32
_ROWS = 256  # rows of logits alive at once, for one head

Progress = Callable[[int, int], None]


def collect(
    backbone: Backbone,
    heads: MedusaHeads,
    dataset: Dataset,
    *,
    max_new_tokens: int,
    batch_size: int,
    teacher_forced: bool = False,
    on_progress: Progress = lambda documents, tokens: None,
    on_warning: Callable[[str], None] = lambda message: None,
) -> RankTrace:
    """Return the trace of the backbone's greedy answers to ``dataset``, in the dataset's order.

    Args:
        max_new_tokens: an answer ends here or with the end token.
        teacher_forced: score the dataset's own answers, which the backbone must have written.
        on_progress: called with the numbers of newly finished documents and tokens.
        on_warning: called when head 1 scores best at an offset that is not its own.

    Raises:
        DataError: a prompt does not fit the context, or an answer is missing.
    """
    prompts = [backbone.encode(prompt.messages) for prompt in dataset.prompts]
    for prompt in prompts:
        room_for(backbone, prompt, max_new_tokens)
    answers: dict[int, Answer] = {}
    scored: dict[int, dict[str, Tensor]] = {}
    for batch in like_length(prompts, batch_size):
        if teacher_forced:
            found = _forced(backbone, dataset, prompts, batch, max_new_tokens)
            on_progress(len(batch), sum(len(answer.tokens) for answer in found))
        else:
            found = _answered(backbone, [prompts[i] for i in batch], max_new_tokens, on_progress)
        answers.update(zip(batch, found, strict=True))
        if not scored and (warning := _check_offset(heads, found)):
            on_warning(warning)
        scored.update(zip(batch, score(backbone, heads, found), strict=True))
    return _assemble(
        [scored[index] for index in range(len(prompts))],
        {
            "backbone": backbone.id,
            "backbone_sha256": backbone.sha256,
            **({"backbone_tuned_from": backbone.tuned_from} if backbone.tuned_from else {}),
            "heads": heads.id,
            "heads_sha256": heads.sha256,
            "heads_layout": heads.layout,
            "data": dataset.name,
            "data_sha256": dataset.sha256,
            "decoding": {"rule": "greedy"},
            "mode": "teacher-forced" if teacher_forced else "generate",
            "max_new_tokens": max_new_tokens,
            "dtype": str(backbone.dtype).removeprefix("torch."),
            "template_sha256": template_sha256(backbone),
        },
    )


@torch.inference_mode()
def score(
    backbone: Backbone, heads: MedusaHeads, answers: Sequence[Answer]
) -> list[dict[str, Tensor]]:
    """Return the trace's columns for each answer, from the states that emitted its tokens.

    Rows of all answers are worked off together, a slice at a time and one head after the other,
    so [tokens, V] never exists.
    """
    states = torch.cat([answer.hidden for answer in answers if answer.hidden is not None])
    tokens = [torch.tensor(answer.tokens, device=states.device) for answer in answers]
    num_heads = heads.num_heads
    targets = torch.cat([_targets(answer_tokens, num_heads) for answer_tokens in tokens])
    parts = []
    for rows in torch.arange(len(states), device=states.device).split(_ROWS):
        hidden, wanted = states[rows], targets[rows]
        columns = dict(
            zip(("target_probs", "entropy"), _own(backbone, hidden, wanted), strict=True)
        )
        ranked = [_ranks(heads, head, hidden, wanted[:, head]) for head in range(1, num_heads + 1)]
        columns["ranks"] = torch.stack([ranks for ranks, _ in ranked], dim=1)
        columns["probs"] = torch.stack([probs for _, probs in ranked], dim=1)
        parts.append(columns)
    lengths = [len(answer_tokens) for answer_tokens in tokens]
    split = {name: torch.cat([p[name] for p in parts]).cpu().split(lengths) for name in parts[0]}
    return [{name: split[name][i] for name in split} for i in range(len(answers))]


def _own(backbone: Backbone, hidden: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the backbone's probability [n] of the emitted tokens and its entropy [n]."""
    logits = backbone.logits(hidden)
    probs, entropies = [], []
    size = cache_rows(logits)
    for rows, tokens in zip(logits.split(size), wanted[:, :1].split(size), strict=True):
        log_probs = rows.float().log_softmax(-1)
        probs.append(log_probs.gather(1, tokens)[:, 0].exp())
        entropies.append(-(log_probs.exp() * log_probs).sum(-1))
    return torch.cat(probs), torch.cat(entropies)


def _ranks(heads: MedusaHeads, head: int, hidden: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rank [n] of each wanted token in the head's list, and the list's probabilities."""
    logits = heads.project(head, heads.hidden(head, hidden))
    values, ids = top_candidates(logits, min(NUM_RANKS, logits.shape[-1]))
    probs = (values.float() - log_total(logits)).exp()
    found = ids == wanted[:, None]
    ranks = torch.where(found.any(-1), found.int().argmax(-1), MISSED)
    return ranks, probs


def _targets(tokens: Tensor, num_heads: int) -> Tensor:
    """Return int64 [n, num_heads + 1]: the tokens 0…K places on; past the end, no token's id."""
    padded = torch.cat([tokens, tokens.new_full((num_heads,), MISSED)])
    return padded.unfold(0, num_heads + 1, 1)


def _answered(
    backbone: Backbone, prompts: list[list[int]], max_new_tokens: int, on_progress: Progress
) -> list[Answer]:
    """Return the greedy answers to ``prompts``, in their order."""
    position = {id(prompt): index for index, prompt in enumerate(prompts)}
    found: dict[int, Answer] = {}
    for ended in answer_batch(backbone, prompts, max_new_tokens):
        for answer in ended:
            found[position[id(answer.prompt)]] = answer
        if ended:
            on_progress(len(ended), sum(len(answer.tokens) for answer in ended))
    return [found[index] for index in range(len(prompts))]


@torch.inference_mode()
def _forced(
    backbone: Backbone,
    dataset: Dataset,
    prompts: list[list[int]],
    batch: list[int],
    max_new_tokens: int,
) -> list[Answer]:
    """Return the dataset's own answers with the states that would have emitted them."""
    answers = []
    for index in batch:
        room = room_for(backbone, prompts[index], max_new_tokens)
        tokens = _own_tokens(backbone, dataset, index)[:room]
        sequence = torch.tensor([prompts[index] + tokens[:-1]], device=backbone.device)
        hidden = backbone.forward(sequence, backbone.new_cache(sequence.shape[1]))[0]
        answers.append(Answer(prompts[index], tokens, hidden[len(prompts[index]) - 1 :]))
    return answers


def _own_tokens(backbone: Backbone, dataset: Dataset, index: int) -> list[int]:
    """Return the tokens of the answer in row ``index``."""
    prompt = dataset.prompts[index]
    if prompt.answer_ids:
        return prompt.answer_ids
    if prompt.answer is None:
        raise DataError(
            f"{dataset.name} row {index + 1} has no answer; teacher-forced mode needs the "
            "backbone's own (output, an assistant message, or a file of `treeopt distill`)"
        )
    tokens = backbone.tokenizer(prompt.answer, add_special_tokens=False)["input_ids"]
    return list(tokens) + sorted(backbone.eos_ids)[:1]


@torch.inference_mode()
def _check_offset(heads: MedusaHeads, answers: Sequence[Answer]) -> str | None:
    """Return a warning when head 1 guesses another place than its own on the longest answers."""
    longest = max(answers, key=lambda answer: len(answer.tokens))
    if len(longest.tokens) < 16 or longest.hidden is None:
        return None
    tokens = torch.tensor(longest.tokens, device=longest.hidden.device)
    return offset_warning(offset_scores(heads, longest.hidden, tokens))


def _assemble(documents: list[dict[str, Tensor]], provenance: dict[str, Any]) -> RankTrace:
    lengths = [len(document["ranks"]) for document in documents]
    if max(lengths) < 2:
        raise TraceError("every answer ended with its first token; there is nothing to calibrate")

    def column(name: str, dtype: Any) -> Any:
        return torch.cat([document[name] for document in documents]).numpy().astype(dtype)

    return RankTrace(
        column("ranks", np.int16),
        column("probs", np.float16),
        column("target_probs", np.float16),
        column("entropy", np.float16),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        provenance,
    )
