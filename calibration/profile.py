"""Measure what a step costs on this machine, with the real decoder."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from treeopt.cost import SIZES, StepCost, StepTime
from treeopt.decoder.plain import greedy
from treeopt.decoder.tree import TreeDecoder
from treeopt.errors import CostError
from treeopt.models.backbone import Backbone, attention_limit
from treeopt.models.heads import MedusaHeads
from treeopt.tree import Path, Tree

CONTEXTS = (256, 1024)
ROUNDS = 15


def profile(
    backbone: Backbone,
    heads: MedusaHeads,
    *,
    sizes: Sequence[int] = SIZES,
    contexts: Sequence[int] = CONTEXTS,
    batches: Sequence[int] = (1,),
    rounds: int = ROUNDS,
    on_step: Callable[[], None] = lambda: None,
) -> StepCost:
    """Return the median step time of every tree size at every batch size and context length.

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
    for batch, context in itertools.product(batches, contexts):
        steps = _steps(backbone, heads, sizes, batch, context)
        measured: dict[int, list[float]] = {size: [] for size in steps}
        for number in range(rounds + 1):
            for size, step in steps.items():
                seconds = _timed(step, backbone.device)
                if number > 0:  # the first round warms up
                    measured[size].append(1000 * seconds)
                on_step()
        times += [_step_time(batch, context, size, values) for size, values in measured.items()]
    return StepCost(tuple(times), backbone.machine())


def num_steps(
    sizes: Sequence[int], contexts: Sequence[int], batches: Sequence[int], rounds: int
) -> int:
    """Return how often ``profile`` will call ``on_step``."""
    return len(batches) * len(contexts) * (len(sizes) + 1) * (rounds + 1)


def profile_tree(tree_size: int, num_heads: int) -> Tree:
    """Return a tree of ``tree_size`` nodes that uses every head: a chain beside a star."""
    chain: list[Path] = [(0,) * depth for depth in range(1, min(num_heads, tree_size - 1) + 1)]
    wide: list[Path] = [(rank,) for rank in range(1, tree_size - len(chain))]
    return Tree.from_paths(chain + wide)


def _steps(
    backbone: Backbone, heads: MedusaHeads, sizes: Sequence[int], num_rows: int, context: int
) -> dict[int, Callable[[], Any]]:
    """Return one call per tree size, 0 for plain decode, each a step of ``num_rows`` sequences.

    All rows hold the same ``context`` tokens; what they hold does not change what a step costs.
    """
    cache = backbone.new_cache(context + 1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(backbone.vocab_size, (context,), generator=generator)
    with torch.inference_mode():
        prompts = tokens.to(backbone.device).expand(num_rows, -1)
        states = backbone.forward(prompts, cache)[:, -1]
        roots = greedy(backbone.logits(states))

    def plain() -> None:
        cache.length = context
        with torch.inference_mode():
            hidden = backbone.forward(roots[:, None], cache)[:, -1]
            greedy(backbone.logits(hidden)).tolist()

    decoders = {
        size: TreeDecoder(backbone, heads, profile_tree(size, heads.num_heads)) for size in sizes
    }
    batch = decoders[max(sizes)].new_batch(context, num_rows)
    with torch.inference_mode():
        for row in range(num_rows):
            decoders[max(sizes)].fill(batch, row, tokens.tolist(), generator)

    def tree_step(decoder: TreeDecoder) -> Callable[[], None]:
        def step() -> None:
            batch.cache.length = context
            batch.cache.lengths.fill_(context)
            with torch.inference_mode():
                decoder.step(batch, [None] * num_rows)

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


def _step_time(batch: int, context: int, tree_size: int, values: list[float]) -> StepTime:
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75]).round(3).tolist()
    return StepTime(batch, context, tree_size, median, low, high, len(values))
