"""Measure what a step costs on this machine, with the real decoder."""

from __future__ import annotations

import functools
import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median

import torch

from treeopt.cost import StepCost, StepTime
from treeopt.decoder.plain import greedy
from treeopt.decoder.tree import TreeDecoder
from treeopt.errors import CostError
from treeopt.models.backbone import Backbone, attention_limit
from treeopt.models.heads import MedusaHeads
from treeopt.replay import CONFIDENCE
from treeopt.tree import Path, Tree

CONTEXTS = (256, 1024)
ROUNDS = 15
COARSE = (1, 2, 4, 8, 16, 32, 64)  # where the search for edges starts
# Neighbours whose times differ by less count as flat. Leaving out what lies between them costs at
# most this much of the tokens/s, and at most what the acceptance length grows between them.
RESOLUTION = 0.05
NOISY = 0.05  # drift of the plain step, or half an interval's width, that is worth a warning

_LOOK = 5  # rounds that decide whether neighbours differ

Step = Callable[[], None]
StepOf = Callable[[int], Step]


def profile(
    backbone: Backbone,
    heads: MedusaHeads,
    *,
    sizes: Sequence[int] | None = None,
    contexts: Sequence[int] = CONTEXTS,
    batches: Sequence[int] = (1,),
    rounds: int = ROUNDS,
    on_step: Callable[[], None] = lambda: None,
    on_warning: Callable[[str], None] = lambda message: None,
) -> StepCost:
    """Return the median step time by tree size, at every batch size and context length.

    Args:
        sizes: tree sizes to measure. By default both sides of every edge of the staircase, found
            by bisection from ``COARSE``.
        rounds: repeats of each step that a median is taken over.
        on_step: called after each step.
        on_warning: called with what makes the times doubtful.

    Raises:
        CostError: a context that leaves no room for the largest tree.
    """
    first = COARSE if sizes is None else sizes
    limit = attention_limit(backbone.model.config)
    if max(contexts) + max(first) > limit:
        raise CostError(
            f"context {max(contexts)} and a tree of {max(first)} exceed the backbone's {limit}"
        )
    times: list[StepTime] = []
    for batch, context in itertools.product(batches, contexts):
        step_of = _steps(backbone, heads, max(first), batch, context)

        def timed(size: int, step_of: StepOf = step_of) -> float:
            seconds = _timed(step_of(size), backbone.device)
            on_step()
            return 1000 * seconds

        wanted = both_sides_of_edges(timed, first) if sizes is None else first
        repeats = take_turns(timed, {0, *wanted}, rounds)
        found = [_step_time(batch, context, size, values) for size, values in repeats.items()]
        for doubt in doubts(repeats[0], found):
            on_warning(f"batch {batch}, context {context}: {doubt}")
        times += found
    machine = backbone.machine() | {"heads": heads.id, "heads_sha256": heads.sha256}
    return StepCost(tuple(times), machine)


def both_sides_of_edges(timed: Callable[[int], float], sizes: Iterable[int]) -> set[int]:
    """Return ``sizes`` and those between, so that neighbours are adjacent or take equally long.

    timed: the time of a step of so many rows.
    """
    found: set[int] = set()
    new = set(sizes)
    while new:
        found |= new
        new = _between(take_turns(timed, found, _LOOK), new)
    return found


def take_turns(
    timed: Callable[[int], float], sizes: Iterable[int], rounds: int
) -> dict[int, list[float]]:
    """Return ``rounds`` values of ``timed`` for each size, rising.

    All sizes take their turn inside a round, so that a drift of the machine falls on all alike,
    and in random order, so that none always follows the same one.
    """
    order = random.Random(0)
    values: dict[int, list[float]] = {size: [] for size in sorted(sizes)}
    for size in values:
        timed(size)  # warms up
    for _ in range(rounds):
        for size in order.sample(list(values), len(values)):
            values[size].append(timed(size))
    return values


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the bounds of the median of what ``values`` are drawn from, at ``CONFIDENCE``.

    They are order statistics, so nothing is assumed about the distribution; below 6 values they
    are the extremes and the confidence is lower. Source: David and Nagaraja, Order Statistics,
    section 7.1.
    """
    ordered, count = sorted(values), len(values)
    tail, below = 0.5**count, 0  # the chance that at most ``below`` values lie under the median
    while 2 * (tail + math.comb(count, below + 1) * 0.5**count) <= 1 - CONFIDENCE:
        below += 1
        tail += math.comb(count, below) * 0.5**count
    return ordered[below], ordered[-1 - below]


def doubts(plain: Sequence[float], times: Sequence[StepTime]) -> list[str]:
    """Return what says that the machine was too noisy to trust ``times``.

    plain: times of the plain step, in the order in which they were taken.
    """
    third = max(1, len(plain) // 3)
    before, after = median(plain[:third]), median(plain[-third:])
    widths = [(row.high_ms - row.low_ms) / 2 / row.step_ms for row in times]
    found = []
    if abs(after / before - 1) > NOISY:
        found.append(f"the machine's speed drifts: a plain step took {before:.1f} ms at first, "
                     f"{after:.1f} ms at last")  # fmt: skip
    if median(widths) > NOISY:
        found.append(f"the machine is noisy: medians are known to {median(widths):.0%} only; "
                     "more --rounds or fewer other programs would help")  # fmt: skip
    return found


def profile_tree(tree_size: int, num_heads: int) -> Tree:
    """Return a tree of ``tree_size`` nodes that uses every head: a chain beside a star."""
    chain: list[Path] = [(0,) * depth for depth in range(1, min(num_heads, tree_size - 1) + 1)]
    wide: list[Path] = [(rank,) for rank in range(1, tree_size - len(chain))]
    return Tree.from_paths(chain + wide)


def _steps(
    backbone: Backbone, heads: MedusaHeads, max_size: int, num_rows: int, context: int
) -> StepOf:
    """Return a function from tree size, 0 for plain decode, to a step of ``num_rows`` sequences.

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

    def decoder_of(size: int) -> TreeDecoder:
        return TreeDecoder(backbone, heads, profile_tree(size, heads.num_heads))

    largest = decoder_of(max_size)
    batch = largest.new_batch(context, num_rows)
    with torch.inference_mode():
        for row in range(num_rows):
            largest.fill(batch, row, tokens.tolist(), generator)

    @functools.cache
    def step_of(size: int) -> Step:
        if size == 0:
            return plain
        decoder = decoder_of(size)

        def step() -> None:
            batch.cache.length = context
            batch.cache.lengths.fill_(context)
            with torch.inference_mode():
                decoder.step(batch, [None] * num_rows)

        return step

    return step_of


def _timed(step: Step, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _between(values: dict[int, list[float]], new: set[int]) -> set[int]:
    """Return the sizes halfway between neighbours whose times differ.

    values: by rising size. new: sizes not looked at before; each pair is judged once, because many
    looks at noise find a difference.
    """
    found = set()
    for low, high in itertools.pairwise(values):
        if not new & {low, high}:
            continue
        (_, top), (bottom, _) = sorted(map(median_interval, (values[low], values[high])))
        smaller, larger = sorted(map(median, (values[low], values[high])))
        differ = top < bottom and larger > (1 + RESOLUTION) * smaller
        if differ and high - low > 1:
            found.add((low + high) // 2)
    return found


def _step_time(batch: int, context: int, tree_size: int, values: Sequence[float]) -> StepTime:
    low, high = median_interval(values)
    middle, low, high = (round(ms, 3) for ms in (median(values), low, high))
    return StepTime(batch, context, tree_size, middle, low, high, len(values))
