"""Stream an answer's text as the tree decoder emits it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from treeopt.decoder.tree import StepLog, TreeDecoder

_INCOMPLETE = "�"  # what a tokenizer makes of a character whose last bytes are still to come


class TextStream:
    """Pieces of the answer to one prompt; iterate once, then ask for the summary."""

    def __init__(self, decoder: TreeDecoder, prompt: Sequence[int], max_new_tokens: int) -> None:
        self._decoder, self._prompt, self._max_new_tokens = decoder, prompt, max_new_tokens
        self._log = StepLog()
        self._tokens: list[int] = []
        self._seconds = 0.0

    def __iter__(self) -> Iterator[str]:
        """Yield text as soon as it can no longer change."""
        start = time.perf_counter()
        backbone, shown = self._decoder.backbone, ""
        for emitted in self._decoder.decode(self._prompt, self._max_new_tokens, self._log):
            self._tokens += emitted
            self._seconds = time.perf_counter() - start
            text = backbone.decode(self._tokens)
            if not text.endswith(_INCOMPLETE):
                yield text[len(shown) :]
                shown = text
        yield backbone.decode(self._tokens)[len(shown) :]

    def summary(self) -> str:
        """Return speed and acceptance length of what was streamed."""
        steps = len(self._log.num_accepted)
        length = (len(self._tokens) - 1) / steps if steps else 1.0
        return (
            f"{len(self._tokens)} tokens in {self._seconds:.1f} s, "
            f"{len(self._tokens) / self._seconds:.1f} tokens/s with prefill, "
            f"{length:.2f} tokens per step"
        )
