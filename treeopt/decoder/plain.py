"""Plain autoregressive decoding: the control that tree decoding is compared with.

Legend: ``B`` rows, ``n`` tokens, ``d`` hidden size, ``V`` vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from treeopt.errors import DataError
from treeopt.models.backbone import Backbone, attention_limit
from treeopt.models.cache import KVCache


def greedy(logits: Tensor) -> Tensor:
    """Return the ids of the largest logits [..., V]: int64 [...]."""
    return logits.max(-1).indices  # faster than argmax in bfloat16


def prefill(backbone: Backbone, cache: KVCache, prompt: Sequence[int]) -> Tensor:
    """Fill the empty ``cache`` with ``prompt``; return the state [d] that emits the first token."""
    cache.reset()
    tokens = torch.tensor([list(prompt)], device=backbone.device)
    return backbone.forward(tokens, cache)[0, -1]


def room_for(backbone: Backbone, prompt: Sequence[int], max_new_tokens: int) -> int:
    """Return how many tokens can be emitted after ``prompt``, at most ``max_new_tokens``.

    Raises:
        DataError: the prompt is empty or leaves no room in the context.
    """
    limit = attention_limit(backbone.model.config)
    if not prompt:
        raise DataError("the prompt is empty")
    if len(prompt) >= limit:
        window = limit < backbone.context_length
        reason = (
            "the sliding window, beyond which a tree mask is wrong," if window else "the context"
        )
        raise DataError(f"the prompt has {len(prompt)} tokens; {reason} holds {limit}")
    return min(max_new_tokens, limit - len(prompt) + 1)  # the last token need not be read


def decode_plain(
    backbone: Backbone, cache: KVCache, prompt: Sequence[int], max_new_tokens: int
) -> Iterator[int]:
    """Yield the greedy tokens after ``prompt``, one backbone call each; the first from prefill.

    Stops with the end token, or at ``max_new_tokens`` or the context's end exactly.
    """
    for token, _ in decode_with_logits(backbone, cache, prompt, max_new_tokens):
        yield token


@torch.inference_mode()
def decode_with_logits(
    backbone: Backbone, cache: KVCache, prompt: Sequence[int], max_new_tokens: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield what ``decode_plain`` does, each token with the logits [V] it comes from."""
    remaining = room_for(backbone, prompt, max_new_tokens)
    state = prefill(backbone, cache, prompt)
    while remaining > 0:
        logits = backbone.logits(state)
        token = greedy(logits)
        token_id = int(token)
        yield token_id, logits
        remaining -= 1
        if token_id in backbone.eos_ids or remaining == 0:
            return
        state = backbone.forward(token.view(1, 1), cache)[0, -1]


_COMPACT_BELOW = 0.8  # share of a batch still decoding at which ended rows are dropped


@dataclass
class Answer:
    """What the backbone said to one prompt.

    tokens: the emitted tokens, the end token included when it came.
    hidden: [len(tokens), d] — ``hidden[p]`` is the state that emitted ``tokens[p]``.
    """

    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    hidden: Tensor | None = None


def like_length(prompts: Sequence[Sequence[int]], batch_size: int) -> Iterator[list[int]]:
    """Yield the indices of ``prompts`` in batches of similar length, so that padding is short."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for first in range(0, len(order), batch_size):
        yield order[first : first + batch_size]


@torch.inference_mode()
def answer_batch(
    backbone: Backbone,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    choose: Callable[[Tensor], Tensor] = greedy,
) -> Iterator[list[Answer]]:
    """Yield after every step the answers that ended in it, until all ``prompts`` are answered.

    All prompts in one batch, padded on the left; ``choose`` turns logits [B, V] into tokens
    int64 [B]. An answer ends where ``decode_plain`` ends it; rows that ended are dropped once they
    are a fifth of the batch, because dropping copies the cache.

    Raises:
        DataError: a prompt is empty or leaves no room in the context.
    """
    device = backbone.device
    limits = [room_for(backbone, prompt, max_new_tokens) for prompt in prompts]
    longest, most = max(map(len, prompts)), max(limits)
    cache = backbone.new_cache(longest + most)
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    tokens = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=device)
    states = torch.empty(
        (len(prompts), most, backbone.hidden_size), dtype=backbone.dtype, device=device
    )
    visible = torch.zeros((len(prompts), 1, 1, cache.capacity), dtype=backbone.dtype, device=device)
    columns = torch.arange(cache.capacity, device=device)
    visible[(columns < padding[:, None])[:, None, None]] = backbone.masked
    rows = [Answer(prompt) for prompt in prompts]
    last = backbone.context_length - 1
    hidden = _prefill_padded(backbone, cache, tokens, padding, visible)
    for step in range(most):
        states[:, step] = hidden
        emitted = choose(backbone.logits(hidden))
        ended = []
        for row, token in enumerate(emitted.tolist()):
            answer = rows[row]
            if answer.hidden is None:
                answer.tokens.append(token)
                if token in backbone.eos_ids or step + 1 == limits[row]:
                    answer.hidden = states[row, : step + 1].clone()
                    ended.append(answer)
        yield ended
        live = [row for row, answer in enumerate(rows) if answer.hidden is None]
        if not live:
            return
        if len(live) <= _COMPACT_BELOW * len(rows):
            rows, limits = [rows[row] for row in live], [limits[row] for row in live]
            keep = torch.tensor(live, device=device)
            cache.select(keep)
            emitted, padding, visible, states = (
                tensor[keep] for tensor in (emitted, padding, visible, states)
            )
        position = (cache.length - padding)[:, None].clamp(max=last)  # of rows that ended, too
        mask = visible[..., : cache.length + 1]
        hidden = backbone.forward(emitted[:, None], cache, position, mask)[:, -1]


def _prefill_padded(
    backbone: Backbone, cache: KVCache, tokens: Tensor, padding: Tensor, visible: Tensor
) -> Tensor:
    """Fill ``cache`` with left-padded ``tokens`` [B, n]; return the last hidden states [B, d]."""
    length = tokens.shape[1]
    positions = (torch.arange(length, device=tokens.device) - padding[:, None]).clamp(min=0)
    causal = torch.full(
        (length, length), backbone.masked, dtype=backbone.dtype, device=tokens.device
    )
    mask = torch.maximum(causal.triu(1) + visible[..., :length], causal.new_tensor(backbone.masked))
    return backbone.forward(tokens, cache, positions, mask)[:, -1]
