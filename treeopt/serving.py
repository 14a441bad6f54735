"""Which cut of its ladder each request gets when B requests share one verify call.

A call emits 1 + F_i tokens for request i in expectation, F_i the sum of the path probabilities
that it drafts, and takes a time that depends on the rows of all requests together. The cuts that
emit the most tokens per second give every row to whichever request has the most probable node
left, so all requests draft down to one probability; how far down, the measured times decide.

``simulate`` plays requests that arrive at random through such calls, on a trace, without a model.
Everything it returns is simulated: step times are measured, what happens in between is not.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from treeopt.cost import StepCost
from treeopt.errors import CostError, DataError, PresetError, TableError, TraceError
from treeopt.preset import Preset
from treeopt.replay import accepted_at
from treeopt.trace import RankTrace
from treeopt.tree import Path, Tree

Cuts = tuple[int, ...]
"""Rows of each request in one call, root included: at least 1."""

Policy = Callable[[int], Cuts]
"""Returns the cuts of a call for a number of running requests."""


@dataclass(frozen=True)
class CallCost:
    """What a call for ``num_requests`` requests costs, by its rows in total: a staircase.

    plain_ms: one row per request, nothing drafted.
    rows, ms: right edges of the stairs, rising in rows, and their times. A call costs what the
        next edge does; ``ms`` may fall and is kept as measured.
    """

    num_requests: int
    plain_ms: float
    rows: tuple[int, ...]
    ms: tuple[float, ...]

    @classmethod
    def of(cls, cost: StepCost, num_requests: int, context: int) -> CallCost:
        """Read the curve from the smallest measured batch that holds ``num_requests``.

        Raises:
            CostError: no such batch was measured at ``context``, or only one tree size was, which
                says nothing about what another row costs.
        """
        batches = [batch for batch, length in cost.situations() if length == context]
        if not batches:
            contexts = sorted({length for _, length in cost.situations()})
            raise CostError(f"context {context} was not measured; measured: {contexts}")
        if num_requests > batches[-1]:
            raise CostError(
                f"a batch of {num_requests} was not measured at context {context}; the largest is "
                f"{batches[-1]} (`treeopt profile --batch 1,{num_requests}`)"
            )
        batch = batches[bisect_left(batches, num_requests)]
        sizes = [size for size in cost.sizes(batch, context) if size > 1]  # 1 drafts nothing
        if len(sizes) < 2:
            raise CostError(
                f"batch {batch}, context {context} was measured with the tree sizes {sizes} "
                "only; what a row costs takes two above 1 (`treeopt profile --sizes 1,4,16,64`)"
            )
        return cls(
            num_requests,
            cost.plain_ms(batch, context),
            tuple(batch * size for size in sizes),
            tuple(cost.step_ms(size, batch, context) for size in sizes),
        )

    def ms_of(self, rows: int) -> float:
        """Return the time of a call of ``rows``, at least one per request.

        Raises:
            CostError: ``rows`` is beyond what was measured.
        """
        if rows <= self.num_requests:
            return self.plain_ms
        if rows > self.rows[-1]:
            raise CostError(
                f"no call of {rows} rows for {self.num_requests} requests was measured; the "
                f"largest has {self.rows[-1]} (`treeopt profile --sizes`)"
            )
        return self.ms[bisect_left(self.rows, rows)]


@dataclass(frozen=True)
class Admission:
    """The cuts of one call, and what is expected of it.

    tokens: emitted by all requests together. step_ms: what the call takes.
    """

    cuts: Cuts
    tokens: float
    step_ms: float

    @property
    def tokens_per_ms(self) -> float:
        """The goodput, and the price of a millisecond.

        Rows pay when their probabilities sum to more than the time that they add times this.
        """
        return self.tokens / self.step_ms


def admit(weights: Sequence[Sequence[float]], cost: CallCost) -> Admission:
    """Return the cuts with the most expected tokens per millisecond; of equals the fewest rows.

    At a given number of rows the most probable nodes are best, and they are a leading slice of
    every request's ladder. So only how many rows is open. The ratio has many local peaks where
    the cost is a staircase, so every right edge is tried; in between, rows are free. This is the
    fixed point of Dinkelbach's iteration (Management Science 13(7), 1967).

    Args:
        weights: per running request the path probabilities of its ladder, falling, root left out.
        cost: of a call for that many requests.

    Raises:
        CostError: the cost is of another number of requests.
        TableError: a weight is no probability, or weights rise.
    """
    if len(weights) != cost.num_requests:
        raise CostError(
            f"the cost is of a call for {cost.num_requests} requests, not {len(weights)}"
        )
    nodes = _best_first(weights)
    gained = [0.0, *accumulate(-negative for negative, _, _ in nodes)]
    base = len(weights)
    edges = (min(rows - base, len(nodes)) for rows in cost.rows if rows > base)
    counts = sorted({0, *edges})
    best = max(counts, key=lambda count: (base + gained[count]) / cost.ms_of(base + count))
    cuts = np.ones(base, dtype=np.int64)
    np.add.at(cuts, [request for _, _, request in nodes[:best]], 1)
    return Admission(tuple(cuts.tolist()), base + gained[best], cost.ms_of(base + best))


def _best_first(weights: Sequence[Sequence[float]]) -> list[tuple[float, int, int]]:
    """Return (-weight, place, request) of every node, the likeliest first."""
    for request, row in enumerate(weights):
        for place, weight in enumerate(row):
            if not 0 <= weight <= 1:
                raise TableError(
                    f"request {request} has the weight {weight}; a probability lies in [0, 1]"
                )
            if place and weight > row[place - 1]:
                raise TableError(
                    f"the weights of request {request} rise from {row[place - 1]} to {weight} at "
                    f"place {place}; a ladder's never do"
                )
    return sorted(
        (-float(weight), place, request)
        for request, row in enumerate(weights)
        for place, weight in enumerate(row)
    )


@dataclass(frozen=True)
class Workload:
    """Requests in the order in which they arrive.

    documents: int64 [requests] — the document of the trace that each one's answer is.
    arrival_s: float64 [requests], rising.
    """

    documents: NDArray[np.int64]
    arrival_s: NDArray[np.float64]

    @classmethod
    def poisson(cls, trace: RankTrace, rate: float, num_requests: int, seed: int) -> Workload:
        """Draw documents that need a step, with ``rate`` arrivals per second on average.

        Raises:
            DataError: the rate is not above 0, or there are no requests.
            TraceError: no document has a second token.
        """
        if not 0 < rate < math.inf:
            raise DataError(f"a rate of {rate} requests/s is not above 0 and finite")
        if num_requests < 1:
            raise DataError(f"{num_requests} requests are too few; at least 1 is needed")
        eligible = np.flatnonzero(np.diff(trace.doc_start) > 1)
        if not len(eligible):
            raise TraceError("no document has more than one token; there is nothing to serve")
        generator = np.random.default_rng(seed)
        documents = eligible[generator.integers(len(eligible), size=num_requests)]
        return cls(documents, generator.exponential(1 / rate, num_requests).cumsum())


@dataclass(frozen=True)
class Served:
    """What one policy made of a workload: simulated, every number of it.

    tokens: emitted by steps, so without each request's first, which prefill gives.
    elapsed_s: from the first arrival to the last token.
    latency_s: float64 [requests], from a request's arrival to its last token, without prefill.
    num_running, num_rows: int64 [steps], requests and rows of every call.
    """

    policy: str
    tokens: int
    elapsed_s: float
    latency_s: NDArray[np.float64]
    num_running: NDArray[np.int64]
    num_rows: NDArray[np.int64]

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per request and step."""
        return float(self.tokens / self.num_running.sum())

    def as_dict(self) -> dict[str, float | str]:
        """Return the numbers of a report, each named as simulated."""
        numbers = {
            "tokens_per_s": self.tokens / self.elapsed_s,
            "latency_mean_s": self.latency_s.mean(),
            "latency_p95_s": np.quantile(self.latency_s, 0.95),
            "batch_mean": self.num_running.mean(),
            "rows_mean": self.num_rows.mean(),
            "acceptance_length": self.acceptance_length,
        }
        rounded = {f"simulated_{key}": round(float(value), 4) for key, value in numbers.items()}
        return {"policy": self.policy, **rounded}


def simulate(
    trace: RankTrace,
    preset: Preset,
    cost: StepCost,
    workload: Workload,
    *,
    max_batch: int,
    context: int,
) -> list[Served]:
    """Serve ``workload`` without speculation, with the preset's tree, and with admitted cuts.

    Requests wait in one queue, join between steps, and leave with their last token. A step costs
    what ``cost`` says for its rows at ``context``; prefill and scheduling cost nothing here.

    Raises:
        CostError: a batch up to ``max_batch``, ``context`` or the tree's size was not measured.
        PresetError: the preset does not say how probable its paths are.
        TreeError: the ladder needs more heads or ranks than the trace has.
    """
    if max_batch < 1:
        raise DataError(f"a batch of at most {max_batch} serves nobody; at least 1 is needed")
    if preset.path_probs is None:
        raise PresetError(
            f"preset {preset.name} has no tree.path_probs to admit nodes by; build it from a "
            "calibration"
        )
    costs = [CallCost.of(cost, running, context) for running in range(1, max_batch + 1)]
    weights = preset.path_probs

    @cache
    def admitted(num_running: int) -> Cuts:
        return admit([weights] * num_running, costs[num_running - 1]).cuts

    policies: dict[str, Policy] = {
        "plain": lambda num_running: (1,) * num_running,
        f"fixed {preset.tree_size}": lambda num_running: (preset.tree_size,) * num_running,
        "admitted": admitted,
    }
    return [
        _serve(name, policy, trace, preset.ladder, costs, workload)
        for name, policy in policies.items()
    ]


@dataclass
class _Running:
    """A request in the batch: the position its next step starts at, and its last one."""

    request: int
    position: int
    last: int


def _serve(
    name: str,
    policy: Policy,
    trace: RankTrace,
    ladder: tuple[Path, ...],
    costs: list[CallCost],
    workload: Workload,
) -> Served:
    """Return what ``policy`` makes of ``workload`` in batches of at most ``len(costs)``."""

    @cache
    def accepted(cut: int) -> NDArray[np.int16]:
        return accepted_at(trace, Tree.from_paths(ladder[: cut - 1]))

    arrival_s = workload.arrival_s
    first, last = trace.doc_start[workload.documents], trace.doc_start[workload.documents + 1] - 1
    latency_s = np.zeros(len(arrival_s))
    num_running: list[int] = []
    num_rows: list[int] = []
    running: list[_Running] = []
    now, arrived = float(arrival_s[0]), 0
    while running or arrived < len(arrival_s):
        if not running:
            now = max(now, arrival_s[arrived])
        while arrived < len(arrival_s) and len(running) < len(costs) and arrival_s[arrived] <= now:
            running.append(_Running(arrived, int(first[arrived]), int(last[arrived])))
            arrived += 1
        cuts = policy(len(running))
        num_running.append(len(running))
        num_rows.append(sum(cuts))
        now += costs[len(running) - 1].ms_of(num_rows[-1]) / 1000
        for request, cut in zip(running, cuts, strict=True):
            request.position += int(accepted(cut)[request.position]) + 1
            latency_s[request.request] = now - arrival_s[request.request]
        running = [request for request in running if request.position < request.last]
    return Served(
        name,
        int((last - first).sum()),
        now - float(arrival_s[0]),
        latency_s,
        np.array(num_running),
        np.array(num_rows),
    )
