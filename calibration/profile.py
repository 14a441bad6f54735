"""Measure what a step costs on this machine, with the real decoder."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from treeopt.cost import StepCost, StepTime
from treeopt.decoder.plain import greedy, prefill
from treeopt.decoder.tree import TreeDecoder
from treeopt.errors import CostError
from treeopt.models.backbone import Backbone, attention_limit
from treeopt.models.heads import MedusaHeads
from treeopt.tree import Path, Tree

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
CONTEXTS = (256, 1024)
ROUNDS = 15


def profile(
    backbone: Backbone,
    heads: MedusaHeads,
    *,
    sizes: Sequence[int] = SIZES,
    contexts: Sequence[int] = CONTEXTS,
    rounds: int = ROUNDS,
    on_step: Callable[[], None] = lambda: None,
) -> StepCost:
    """Return the median step time of every tree size at every context length, for batch 1.

    Sizes and plain decode take turns inside each round, so that a drift of the machine falls on
    all of them alike.

    Raises:
        CostError: a context that leaves no room for the largest tree.
    """
    limit = attention_limit(backbone.model.config)
    if max(contexts) + max(sizes) > limit:
        raise CostError(
            f"context {max(contexts)} and a tree of {max(sizes)} exceed the backbone's {limit}"
        )
    times: list[StepTime] = []
    for context in contexts:
        steps = _steps(backbone, heads, sizes, context)
        measured: dict[int, list[float]] = {size: [] for size in steps}
        for number in range(rounds + 1):
            for size, step in steps.items():
                seconds = _timed(step, backbone.device)
                if number > 0:  # the first round warms up
                    measured[size].append(1000 * seconds)
                on_step()
        times += [_step_time(context, size, values) for size, values in measured.items()]
    return StepCost(tuple(times), backbone.machine())


def num_steps(sizes: Sequence[int], contexts: Sequence[int], rounds: int) -> int:
    """Return how often ``profile`` will call ``on_step``."""
    return len(contexts) * (len(sizes) + 1) * (rounds + 1)


def profile_tree(tree_size: int, num_heads: int) -> Tree:
    """Return a tree of ``tree_size`` nodes that uses every head: a chain beside a star."""
    chain: list[Path] = [(0,) * depth for depth in range(1, min(num_heads, tree_size - 1) + 1)]
    wide: list[Path] = [(rank,) for rank in range(1, tree_size - len(chain))]
    return Tree.from_paths(chain + wide)


def _steps(
    backbone: Backbone, heads: MedusaHeads, sizes: Sequence[int], context: int
) -> dict[int, Callable[[], Any]]:
    """Return one call per tree size, 0 for plain decode, each a step after ``context`` tokens."""
    cache = backbone.new_cache(context + 1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(backbone.vocab_size, (context,), generator=generator).tolist()
    with torch.inference_mode():
        state = prefill(backbone, cache, tokens)
        root = greedy(backbone.logits(state))

    def plain() -> None:
        cache.length = context
        with torch.inference_mode():
            hidden = backbone.forward(root.view(1, 1), cache)[0, -1]
            greedy(backbone.logits(hidden)).item()

    decoders = {
        size: TreeDecoder(backbone, heads, profile_tree(size, heads.num_heads)) for size in sizes
    }
    batch = decoders[max(sizes)].new_batch(context, 1)
    with torch.inference_mode():
        decoders[max(sizes)].fill(batch, 0, tokens, generator)

    def tree_step(decoder: TreeDecoder) -> Callable[[], None]:
        def step() -> None:
            batch.cache.length = context
            batch.cache.set_length(0, context)
            with torch.inference_mode():
                decoder.step(batch)

        return step

    return {0: plain, **{size: tree_step(decoder) for size, decoder in decoders.items()}}


def _timed(step: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _step_time(context: int, tree_size: int, values: list[float]) -> StepTime:
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75]).round(3).tolist()
    return StepTime(1, context, tree_size, median, low, high, len(values))
