"""Validate a preset for real: tree decoding against plain decoding and ``generate``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers.generation.streamers import BaseStreamer

from treeopt.decoder.plain import decode_plain, decode_with_logits
from treeopt.decoder.tree import StepLog, TreeDecoder
from treeopt.errors import DataError
from treeopt.models.backbone import Backbone, attention_limit
from treeopt.models.cache import KVCache
from treeopt.report import DecodedPrompt, DecodeReport, Mismatch

# Rounding differs between one row and many. A near-tie is a gap of at most this many units in the
# last place of the logit, for the dtype in use.
NEAR_TIE_ULPS = 4
_SHOWN_AFTER = 8  # tokens of each answer shown beyond the first difference


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
    limit = attention_limit(backbone.model.config)
    cache = backbone.new_cache(min(max(map(len, prompts)) + max_new_tokens, limit))
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
    return DecodeReport(decoder.tree_size, tuple(decoded), tuple(mismatches), backbone.machine())


def _one_prompt(
    backbone: Backbone,
    decoder: TreeDecoder,
    cache: KVCache,
    prompt: Sequence[int],
    max_new_tokens: int,
) -> tuple[DecodedPrompt, list[int], list[int]]:
    """Return the measurements, and the tokens of plain and of tree decoding."""
    log = StepLog()
    tree = Timed()
    for tokens in decoder.decode(prompt, max_new_tokens, log):
        tree.add(tokens)
    plain = Timed()
    for token in decode_plain(backbone, cache, prompt, max_new_tokens):
        plain.add([token])
    generated = time_generate(backbone, prompt, max_new_tokens)
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
        nodes=tuple(log.nodes),
        step_s=tuple(log.step_s),
        num_prompt=len(prompt),
    )
    return measured, plain.tokens, tree.tokens


class Timed:
    """Collects tokens and when they came; the first ones end the prefill."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.start = self.first = self.last = time.perf_counter()

    def add(self, tokens: list[int]) -> None:
        """Note that ``tokens`` came now."""
        self.last = time.perf_counter()
        if not self.tokens:
            self.first = self.last
        self.tokens += tokens

    @property
    def prefill_s(self) -> float:
        """Seconds until the first token."""
        return self.first - self.start

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last."""
        return self.last - self.first


class _TimingStreamer(BaseStreamer):
    """Lets transformers' ``generate`` report its tokens as they come."""

    def __init__(self) -> None:
        self.timed = Timed()
        self.saw_prompt = False

    def put(self, value: Any) -> None:
        if self.saw_prompt:
            self.timed.add(value.flatten().tolist())
        self.saw_prompt = True

    def end(self) -> None: ...


def time_generate(
    backbone: Backbone, prompt: Sequence[int], max_new_tokens: int, **options: Any
) -> Timed:
    """Return the greedy answer of transformers' own ``generate``, with ``options`` of its own."""
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
        **options,
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
    shown = position + _SHOWN_AFTER
    texts = (backbone.decode(plain[:shown]), backbone.decode(tree[:shown]))
    return Mismatch(document, position, expected, tree[position], gap, near, *texts)


def explain_mismatch(decoder: TreeDecoder, prompt: Sequence[int], mismatch: Mismatch) -> str:
    """Return the step that emitted the first difference, as a person debugs it.

    The prompt is decoded again up to there: the path that was accepted, its nodes' ancestors and
    positions, the mask row of its last node, and how far the logits lie apart.
    """
    log = StepLog()
    for _ in decoder.decode(prompt, mismatch.position + 1, log):
        pass
    starts = np.cumsum([1, *(count + 1 for count in log.num_accepted)])
    step = int(np.searchsorted(starts, mismatch.position, side="right")) - 1
    start, node = int(starts[step]), log.nodes[step]
    tree = decoder.tree
    ancestors = tree.ancestor_mask[node].nonzero()[0].tolist()
    first = len(prompt) + start - 1
    positions = [first + int(tree.depths[ancestor]) for ancestor in ancestors]
    visible = "".join("1" if seen else "." for seen in tree.ancestor_mask[node])
    return "\n".join(
        [
            f"answer {mismatch.document + 1}, token {mismatch.position}: plain decoding says "
            f"{mismatch.expected}, tree decoding {mismatch.got}, {mismatch.gap:.4g} lower",
            f"step {step + 1} starts at token {start}; accepted path {list(tree.paths[node])}",
            f"ancestors {ancestors} at positions {positions}",
            f"mask row {'1' * min(first, 8)}{'…' if first > 8 else ''} {visible}",
            f"plain: …{mismatch.expected_text[-80:]!r}",
            f"tree:  …{mismatch.got_text[-80:]!r}",
        ]
    )
