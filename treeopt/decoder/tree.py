"""Tree decoding: draft with the heads, verify in one backbone call, accept, greedy and lossless.

Legend: ``N`` tree size, ``K`` tree depth, ``R`` ranks the tree uses, ``d`` hidden size, ``V``
vocabulary size. Row i of a verify call is tree node i.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from treeopt.decoder.plain import greedy, prefill, room_for
from treeopt.models.backbone import Backbone, attention_limit
from treeopt.models.cache import KVCache
from treeopt.models.candidates import top_candidates
from treeopt.models.heads import MedusaHeads
from treeopt.tree import NO_PARENT, ROOT, Tree

PHASES = ("draft", "verify", "accept", "gather")


@dataclass
class StepLog:
    """What the steps of one decode did, for reports; times are empty unless asked for.

    num_accepted: draft tokens accepted per step.
    phase_s: seconds per phase, summed over steps.
    """

    num_accepted: list[int] = field(default_factory=list)
    phase_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))


class TreeDecoder:
    """Decodes one sequence at a time with a fixed tree.

    Everything that does not depend on the text is made once: mask, depths, and where in the
    heads' lists each node's token stands.
    """

    def __init__(self, backbone: Backbone, heads: MedusaHeads, tree: Tree) -> None:
        """Prepare ``tree`` for ``backbone`` and ``heads``.

        Raises:
            TreeError: the tree is deeper than the heads or uses ranks beyond the vocabulary.
        """
        tree.check_fits(heads.num_heads, backbone.vocab_size)
        self.backbone, self.heads, self.tree = backbone, heads, tree
        device = backbone.device
        self.depths = torch.tensor(tree.depths, device=device)
        self.parents = torch.tensor(tree.parents, device=device).clamp(min=ROOT)
        self.ancestors = torch.tensor(tree.ancestor_mask, device=device)
        self.is_root = torch.tensor(tree.parents == NO_PARENT, device=device)
        slots = (tree.depths[1:] - 1) * tree.num_ranks + tree.ranks[1:]
        self.slots = torch.tensor(slots, device=device)  # [N - 1] into [K, R], flattened
        self._mask = torch.empty(0)

    @torch.inference_mode()
    def decode(
        self,
        cache: KVCache,
        prompt: Sequence[int],
        max_new_tokens: int,
        log: StepLog | None = None,
    ) -> Iterator[list[int]]:
        """Yield the tokens that each step emits after ``prompt``; the first one from prefill.

        The tokens are those of ``decode_plain``, and stop where it stops. Where a tree no longer
        fits the cache, steps verify the root alone.
        """
        remaining = room_for(self.backbone, prompt, max_new_tokens)
        state = prefill(self.backbone, cache, prompt)
        root = greedy(self.backbone.logits(state))
        emitted = self._until_end([int(root)], remaining)
        while True:
            yield emitted
            remaining -= len(emitted)
            if remaining == 0 or emitted[-1] in self.backbone.eos_ids:
                return
            state, root, accepted = self.step(cache, state, root, log)
            emitted = self._until_end([*accepted, int(root)], remaining)
            if log is not None:
                log.num_accepted.append(min(len(accepted), len(emitted)))

    def new_cache(self, num_tokens: int) -> KVCache:
        """Return a cache for ``num_tokens`` of text and the scratch rows of a verify call.

        It never reaches beyond the context, so that no node's position does either.
        """
        limit = attention_limit(self.backbone.model.config)
        return self.backbone.new_cache(min(num_tokens + self.tree.tree_size, limit))

    def step(
        self, cache: KVCache, state: Tensor, root: Tensor, log: StepLog | None
    ) -> tuple[Tensor, Tensor, list[int]]:
        """Do one step; return the next one's (state [d], root []) and the draft tokens accepted."""
        start = cache.length
        if start + self.tree.tree_size > cache.capacity:
            state = self.backbone.forward(root.view(1, 1), cache)[0, -1]
            return state, greedy(self.backbone.logits(state)), []
        clock = _Clock(self.backbone.device, log)
        tokens = self.draft(state, root)
        clock.lap("draft")
        states, predicted = self.verify(cache, tokens)
        clock.lap("verify")
        rows = self.accept(tokens, predicted)
        accepted = tokens[rows[1:]].tolist()
        clock.lap("accept")
        cache.keep(start, rows)
        clock.lap("gather")
        return states[rows[-1]], predicted[rows[-1]], accepted

    def draft(self, state: Tensor, root: Tensor) -> Tensor:
        """Return the token of every node, int64 [N]: ``root`` and the heads' guesses there."""
        if self.tree.depth == 0:
            return root[None]
        logits = self.heads.logits(state, self.tree.depth)
        _, candidates = top_candidates(logits, self.tree.num_ranks)
        return torch.cat([root[None], candidates.flatten()[self.slots]])

    def verify(self, cache: KVCache, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Run ``tokens`` [N] under the tree mask; return states [N, d] and greedy tokens [N]."""
        positions = cache.length + self.depths
        mask = self._mask_for(cache)
        states = self.backbone.forward(tokens[None], cache, positions[None], mask)[0]
        return states, greedy(self.backbone.logits(states))

    def accept(self, tokens: Tensor, predicted: Tensor) -> Tensor:
        """Return the rows of the longest right path, int64 [num_accepted + 1], the root first.

        A node is right when the backbone predicts its token at its parent, and its ancestors are
        right. Nodes are named by their parents, so there is no padding that could be accepted.
        """
        matches = (tokens == predicted[self.parents]) | self.is_root
        right = (matches | ~self.ancestors).all(-1)
        deepest = (right * (self.depths + 1)).argmax()  # right nodes form one chain
        return self.ancestors[deepest].nonzero()[:, 0]

    def _until_end(self, tokens: list[int], remaining: int) -> list[int]:
        """Return ``tokens`` up to the end token or the limit."""
        for index, token in enumerate(tokens[:remaining]):
            if token in self.backbone.eos_ids:
                return tokens[: index + 1]
        return tokens[:remaining]

    def _mask_for(self, cache: KVCache) -> Tensor:
        """Return the additive mask [1, 1, N, cache.length + N].

        The tree's part stands at the right end of a buffer whose other columns are 0, so the mask
        for any prefix length is a slice.
        """
        size = self.tree.tree_size
        if self._mask.shape[-1] < cache.capacity + size:
            backbone = self.backbone
            mask = torch.zeros(
                (1, 1, size, cache.capacity + size), dtype=backbone.dtype, device=backbone.device
            )
            mask[0, 0, :, cache.capacity :][~self.ancestors] = backbone.masked
            self._mask = mask
        return self._mask[..., self._mask.shape[-1] - cache.length - size :]


class _Clock:
    """Adds the time since the last lap to a phase of a StepLog; does nothing without one."""

    def __init__(self, device: torch.device, log: StepLog | None) -> None:
        self.device, self.log = device, log
        self.last = self._now() if log is not None else 0.0

    def lap(self, phase: str) -> None:
        if self.log is not None:
            now = self._now()
            self.log.phase_s[phase] += now - self.last
            self.last = now

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
