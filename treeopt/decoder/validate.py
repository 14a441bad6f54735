"""Validate a preset for real: tree decoding against plain decoding and ``generate``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from treeopt.decoder.plain import decode_plain, decode_with_logits
from treeopt.decoder.tree import StepLog, TreeDecoder
from treeopt.errors import DataError
from treeopt.models.backbone import Backbone
from treeopt.models.cache import KVCache
from treeopt.report import DecodedPrompt, DecodeReport, Mismatch

# Rounding differs between one row and many. A near-tie is a gap of at most this many units in the
# last place of the logit, for the dtype in use.
NEAR_TIE_ULPS = 4


def validate(
    backbone: Backbone,
    decoder: TreeDecoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    on_prompt: Callable[[], None] = lambda: None,
) -> DecodeReport:
    """Decode ``prompts`` with each side in turn and compare.

    Prompts whose answer is a single token have no step to time and are left out.
    """
    cache = decoder.new_cache(max(map(len, prompts)) + max_new_tokens)
    _one_prompt(backbone, decoder, cache, prompts[0], min(8, max_new_tokens))  # warm up
    decoded, mismatches = [], []
    for document, prompt in enumerate(prompts):
        measured, plain, tree = _one_prompt(backbone, decoder, cache, prompt, max_new_tokens)
        if min(measured.num_tokens, measured.num_plain, measured.num_generate) > 0:
            decoded.append(measured)
        if plain != tree:
            mismatches.append(_mismatch(backbone, cache, document, prompt, plain, tree))
        on_prompt()
    if not decoded:
        raise DataError("every answer ended with its first token; there is no step to time")
    return DecodeReport(
        decoder.tree.tree_size, tuple(decoded), tuple(mismatches), backbone.machine()
    )


def _one_prompt(
    backbone: Backbone,
    decoder: TreeDecoder,
    cache: KVCache,
    prompt: Sequence[int],
    max_new_tokens: int,
) -> tuple[DecodedPrompt, list[int], list[int]]:
    """Return the measurements, and the tokens of plain and of tree decoding."""
    log = StepLog()
    tree = _Timed()
    for tokens in decoder.decode(cache, prompt, max_new_tokens, log):
        tree.add(tokens)
    plain = _Timed()
    for token in decode_plain(backbone, cache, prompt, max_new_tokens):
        plain.add([token])
    generated = _generate(backbone, prompt, max_new_tokens)
    measured = DecodedPrompt(
        num_tokens=len(tree.tokens) - 1,
        num_plain=len(plain.tokens) - 1,
        num_generate=len(generated.tokens) - 1,
        num_accepted=tuple(log.num_accepted),
        tree_s=tree.decode_s,
        plain_s=plain.decode_s,
        generate_s=generated.decode_s,
        prefill_s=tree.prefill_s,
        phase_s=log.phase_s,
    )
    return measured, plain.tokens, tree.tokens


class _Timed:
    """Collects tokens and when they came; the first ones end the prefill."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.start = self.first = self.last = time.perf_counter()

    def add(self, tokens: list[int]) -> None:
        self.last = time.perf_counter()
        if not self.tokens:
            self.first = self.last
        self.tokens += tokens

    @property
    def prefill_s(self) -> float:
        return self.first - self.start

    @property
    def decode_s(self) -> float:
        return self.last - self.first


class _TimingStreamer(BaseStreamer):
    """Lets transformers' ``generate`` report its tokens as they come."""

    def __init__(self) -> None:
        self.timed = _Timed()
        self.saw_prompt = False

    def put(self, value: Any) -> None:
        if self.saw_prompt:
            self.timed.add(value.flatten().tolist())
        self.saw_prompt = True

    def end(self) -> None: ...


def _generate(backbone: Backbone, prompt: Sequence[int], max_new_tokens: int) -> _Timed:
    """Return the greedy answer of transformers' own ``generate``."""
    streamer = _TimingStreamer()
    tokens = torch.tensor([list(prompt)], device=backbone.device)
    backbone.model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=sorted(backbone.eos_ids) or None,
        pad_token_id=min(backbone.eos_ids, default=0),
        streamer=streamer,
    )
    return streamer.timed


def _mismatch(
    backbone: Backbone,
    cache: KVCache,
    document: int,
    prompt: Sequence[int],
    plain: list[int],
    tree: list[int],
) -> Mismatch:
    """Return where ``tree`` leaves ``plain``, with the gap in the plain decode's own logits."""
    position = next(i for i, (a, b) in enumerate(zip(plain, tree, strict=False)) if a != b)
    *_, (expected, logits) = decode_with_logits(backbone, cache, prompt, position + 1)
    top = logits[expected].item()
    gap = top - logits[tree[position]].item()
    near = gap <= NEAR_TIE_ULPS * abs(top) * torch.finfo(backbone.dtype).eps
    return Mismatch(document, position, expected, tree[position], gap, near)
