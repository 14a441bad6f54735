"""Stream an answer's text as the tree decoder emits it."""

from __future__ import annotations

import time
from collections.abc import Iterator

from treeopt.decoder.tree import StepLog, TreeDecoder
from treeopt.models.backbone import Backbone
from treeopt.models.heads import MedusaHeads
from treeopt.tree import Tree

_INCOMPLETE = "�"  # what a tokenizer makes of a character whose last bytes are still to come


class TextStream:
    """Pieces of the answer to one prompt; iterate once, then ask for the summary."""

    def __init__(
        self,
        backbone: Backbone,
        heads: MedusaHeads,
        tree: Tree,
        prompt: str,
        max_new_tokens: int,
    ) -> None:
        self._backbone, self._max_new_tokens = backbone, max_new_tokens
        self._decoder = TreeDecoder(backbone, heads, tree)
        self._prompt = backbone.encode([{"role": "user", "content": prompt}])
        self._log = StepLog()
        self._tokens: list[int] = []
        self._seconds = 0.0

    def __iter__(self) -> Iterator[str]:
        """Yield text as soon as it can no longer change."""
        start = time.perf_counter()
        cache = self._decoder.new_cache(len(self._prompt) + self._max_new_tokens)
        shown = ""
        for emitted in self._decoder.decode(cache, self._prompt, self._max_new_tokens, self._log):
            self._tokens += emitted
            self._seconds = time.perf_counter() - start
            text = self._backbone.decode(self._tokens)
            if not text.endswith(_INCOMPLETE):
                yield text[len(shown) :]
                shown = text
        yield self._backbone.decode(self._tokens)[len(shown) :]

    def summary(self) -> str:
        """Return speed and acceptance length of what was streamed."""
        steps = len(self._log.num_accepted)
        length = (len(self._tokens) - 1) / steps if steps else 1.0
        return (
            f"{len(self._tokens)} tokens in {self._seconds:.1f} s, "
            f"{len(self._tokens) / self._seconds:.1f} tokens/s with prefill, "
            f"{length:.2f} tokens per step"
        )
