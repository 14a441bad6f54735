"""Walk a trace with a tree, exactly as a greedy decode would.

Averages over positions are not what decoding meets: a step starts where the last one stopped, so
hard places are visited more often. Replay starts where decoding would start; it needs no model.

Legend: ``S`` documents, ``P`` positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.dynamic import DynamicTree
from treeopt.errors import TraceError
from treeopt.trace import RankTrace
from treeopt.tree import NO_CHILD, ROOT, Tree

Documents = NDArray[np.int64]  # indices of documents, repeats allowed

CONFIDENCE = 0.95
_BOUNDS = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
_RESAMPLES, _AT_ONCE = 2000, 100
_CHUNK = 1 << 16  # positions walked at once: the working set stays in cache


@dataclass(frozen=True)
class Interval:
    """A value with the bounds of its bootstrap interval over documents."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Replay:
    """What decoding the documents of a trace with one tree would do.

    tokens: int64 [S] — tokens emitted by steps, so all but the first, which prefill gives.
    steps: int64 [S] — verify calls.
    num_accepted: int16 [steps of all documents] — draft tokens accepted, in decoding order.
    """

    tokens: NDArray[np.int64]
    steps: NDArray[np.int64]
    num_accepted: NDArray[np.int16]

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per step."""
        return float(self.tokens.sum() / self.steps.sum())

    def interval(self) -> Interval:
        """Return the acceptance length with its interval."""
        return intervals([self])[0]

    def _length_of(self, documents: Documents) -> float:
        tokens, steps = self.tokens[documents].sum(), self.steps[documents].sum()
        return float(max(tokens, 1) / max(steps, 1))  # 1 where no document has a step


def replay(trace: RankTrace, tree: Tree | DynamicTree) -> Replay:
    """Return what greedy decoding of the trace's documents with ``tree`` would do.

    Raises:
        TreeError: the tree needs more heads or ranks than the trace has.
        TraceError: no document has a second token, so no step would run.
    """
    return walk(trace, accepted_at(trace, tree))


def walk(trace: RankTrace, accepted: NDArray[np.int16]) -> Replay:
    """Return the replay in which a step at position p accepts ``accepted[p]`` draft tokens.

    Raises:
        TraceError: no document has a second token, so no step would run.
    """
    starts = step_starts(trace, accepted)
    if not starts.any():
        raise TraceError("no document has more than one token; there is nothing to replay")
    before = np.concatenate([[0], np.cumsum(starts)])
    steps = before[trace.doc_start[1:]] - before[trace.doc_start[:-1]]
    return Replay(np.diff(trace.doc_start) - 1, steps, accepted[starts])


def accepted_at(trace: RankTrace, tree: Tree | DynamicTree) -> NDArray[np.int16]:
    """Return int16 [P]: draft tokens a step at each position would accept with ``tree``.

    Raises:
        TreeError: the tree needs more heads or ranks than the trace has.
    """
    tree.check_fits(trace.num_heads, trace.num_ranks)
    dynamic = tree if isinstance(tree, DynamicTree) else None
    tree = tree.universe if isinstance(tree, DynamicTree) else tree
    table = _transitions(tree, trace.num_ranks)
    flat, width, missed = table.ravel(), table.shape[1], tree.tree_size
    depths = np.append(tree.depths, 0).astype(np.int16)
    accepted = np.zeros(trace.num_positions, dtype=np.int16)
    chunk = _CHUNK // 16 if dynamic else _CHUNK  # a dynamic tree weighs every node
    for first in range(0, trace.num_positions, chunk):
        ranks = trace.ranks[first : first + chunk, : tree.depth].astype(np.int32)
        ranks[ranks < 0] = trace.num_ranks
        node = np.full(len(ranks), ROOT, dtype=np.int32)
        reached = accepted[first : first + chunk]
        if dynamic:
            chosen = np.pad(dynamic.chosen(trace.probs[first : first + chunk]), ((0, 0), (0, 1)))
        for column in ranks.T:
            node = flat[node * width + column]
            if dynamic:
                node = np.where(chosen[np.arange(len(node)), node], node, missed)
            np.maximum(reached, depths[node], out=reached)
    return accepted


def _transitions(tree: Tree, num_ranks: int) -> NDArray[np.int32]:
    """Return int32 [N + 1, num_ranks + 1]: the node after each node and rank.

    The last row and column absorb misses, so that a walk needs no branches.
    """
    size, known = tree.children.shape
    table = np.full((size + 1, num_ranks + 1), size, dtype=np.int32)
    table[:size, :known] = np.where(tree.children == NO_CHILD, size, tree.children)
    return table


def step_starts(trace: RankTrace, accepted: NDArray[np.int16]) -> NDArray[np.bool_]:
    """Return bool [P]: where decoding starts a step, given what each position would accept.

    The first step of a document starts at its first token; the next one behind the accepted
    tokens and the backbone's own. A document's last token needs no step.
    """
    starts = np.zeros(trace.num_positions, dtype=np.bool_)
    position, last = trace.doc_start[:-1], trace.doc_start[1:] - 1
    while len(position):
        inside = position < last
        position, last = position[inside], last[inside]
        starts[position] = True
        position = position + accepted[position] + 1
    return starts


def intervals(replays: Sequence[Replay]) -> list[Interval]:
    """Return the acceptance lengths of replays of the same documents, each with its interval.

    All are resampled alike: entry i is ``bootstrap`` of replay i's acceptance length.
    """
    tokens = np.stack([one.tokens for one in replays], axis=1).astype(np.float64)  # [S, replays]
    steps = np.stack([one.steps for one in replays], axis=1).astype(np.float64)
    num_documents = len(tokens)
    lengths = []
    for drawn in _resamples(num_documents):
        times = np.stack([np.bincount(row, minlength=num_documents) for row in drawn])
        counts = times.astype(np.float64)
        lengths.append(np.maximum(counts @ tokens, 1) / np.maximum(counts @ steps, 1))
    low, high = np.quantile(np.concatenate(lengths), _BOUNDS, axis=0)
    values = [one.acceptance_length for one in replays]
    return [Interval(*bounds) for bounds in zip(values, low.tolist(), high.tolist(), strict=True)]


def difference(first: Replay, second: Replay) -> Interval:
    """Return how much longer ``second`` accepts than ``first`` on the same documents, paired."""
    return bootstrap(
        lambda documents: second._length_of(documents) - first._length_of(documents),
        len(first.tokens),
    )


def bootstrap(
    statistic: Callable[[Documents], float], num_documents: int, seed: int = 0
) -> Interval:
    """Return ``statistic`` of all documents, with its percentile interval over resamples of them.

    Whole documents are drawn, because positions within one are alike.
    """
    resampled = [statistic(row) for drawn in _resamples(num_documents, seed) for row in drawn]
    low, high = np.quantile(resampled, _BOUNDS)
    return Interval(float(statistic(np.arange(num_documents))), float(low), float(high))


def _resamples(num_documents: int, seed: int = 0) -> Iterator[Documents]:
    """Yield the resamples, int64 [some, S] at a time; a seed always gives the same ones."""
    generator = np.random.default_rng(seed)
    for _ in range(_RESAMPLES // _AT_ONCE):
        yield generator.integers(num_documents, size=(_AT_ONCE, num_documents))
