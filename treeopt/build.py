"""From a trace or a table to a preset: grow the ladder, choose the size, predict by replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from treeopt.acceptance import MODELS, FloatArray, IndependentAcceptance
from treeopt.cost import StepCost
from treeopt.errors import CostError, TraceError
from treeopt.files import sha256_of_file
from treeopt.preset import Preset, Section
from treeopt.provenance import library_versions, now
from treeopt.replay import Interval, Replay, accepted_at, walk
from treeopt.search import Ladder, grow, grow_contiguous
from treeopt.trace import RankTrace

FOLDS = 5
LADDER_SIZE = 128  # a ladder is kept beyond the tree in use, for machines where more rows pay


@dataclass(frozen=True)
class Request:
    """What to build: rows of the verify call (root included), acceptance model and limits."""

    tree_size: int
    model: str = "joint"
    max_depth: int | None = None
    max_ranks: int | None = None


@dataclass(frozen=True)
class SizePoint:
    """What a tree size promises in one situation: the curve behind a choice of size."""

    tree_size: int
    acceptance_length: float
    step_ms: float

    @property
    def tokens_per_s(self) -> float:
        """Replayed tokens per step over measured time per step."""
        return 1000 * self.acceptance_length / self.step_ms

    def as_dict(self) -> dict[str, float]:
        """Return the point for a report."""
        return {**asdict(self), "tokens_per_s": self.tokens_per_s}


def held_out_replays(
    trace: RankTrace, ladder_of: Callable[[RankTrace], Ladder], sizes: Sequence[int]
) -> list[Replay]:
    """Return, for each of ``sizes``, the replay with trees that a document had no part in.

    Documents are dealt into ``FOLDS`` in turn, so that an order by category is spread; a fold is
    decoded with the ladder that ``ladder_of`` makes from the others.

    Raises:
        TraceError: there are fewer documents than folds.
    """
    if trace.num_documents < FOLDS:
        raise TraceError(
            f"{trace.num_documents} documents are too few to hold some out; {FOLDS} are needed"
        )
    fold_of = np.arange(trace.num_documents) % FOLDS
    fold_at = np.repeat(fold_of, np.diff(trace.doc_start))
    accepted = np.zeros((len(sizes), trace.num_positions), dtype=np.int64)
    for fold in range(FOLDS):
        ladder = ladder_of(trace.documents(np.flatnonzero(fold_of != fold)))
        for row, size in zip(accepted, sizes, strict=True):
            tree = ladder.tree(min(size, ladder.max_tree_size))
            row[fold_at == fold] = accepted_at(trace, tree)[fold_at == fold]
    return [walk(trace, row) for row in accepted]


def predict(trace: RankTrace, request: Request) -> Interval:
    """Return the acceptance length to expect, on unseen text, of the tree that is asked for."""
    (held_out,) = held_out_replays(trace, partial(_grow, request=request), [request.tree_size])
    return held_out.interval()


def size_curve(
    trace: RankTrace, preset: Preset, request: Request, cost: StepCost, situation: tuple[int, int]
) -> list[SizePoint]:
    """Return held-out acceptance length and step time at each measured size on the ladder.

    ``situation`` is (batch, context), one that ``cost`` measured.
    """
    sizes = [size for size in cost.sizes(*situation) if size <= len(preset.ladder) + 1]
    replays = held_out_replays(trace, partial(_grow, request=request), sizes)
    return [
        SizePoint(size, held_out.acceptance_length, cost.step_ms(size, *situation))
        for size, held_out in zip(sizes, replays, strict=True)
    ]


def best_size(curve: list[SizePoint], plain_ms: float) -> SizePoint:
    """Return the point with the most tokens/s; of equals the smallest.

    No speculation may win: then the point has tree_size 1 and the time of a plain step.
    """
    none = SizePoint(1, 1.0, plain_ms)
    return max([none, *curve], key=lambda point: (point.tokens_per_s, -point.tree_size))


def preset_from_trace(
    trace: RankTrace, file: Path, request: Request, *, name: str, command: str
) -> Preset:
    """Return the preset that best-first search over ``trace``, read from ``file``, gives.

    Its prediction is a replay of documents that the tree was not built from.
    """
    ladder = _grow(trace, request)
    tree_size = min(request.tree_size, ladder.max_tree_size)
    predicted = predict(trace, replace(request, tree_size=tree_size))
    source = _provenance_of(trace)
    return Preset(
        name=name,
        ladder=ladder.paths,
        path_probs=_rounded(ladder.probs),
        tree_size=tree_size,
        decoding=source["decoding"],
        backbone=_backbone_of(source),
        heads={
            "id": source["heads"],
            "sha256": source["heads_sha256"],
            "num_heads": trace.num_heads,
            "layout": source["heads_layout"],
        },
        calibration={
            "sha256": sha256_of_file(file),
            "data": source["data"],
            "documents": trace.num_documents,
            "positions": trace.num_positions,
            "num_ranks": trace.num_ranks,
            "template_sha256": source["template_sha256"],
        },
        predicted=_prediction(predicted),
        provenance=_provenance(command),
    )


def preset_from_rates(rates: FloatArray, request: Request, *, name: str, command: str) -> Preset:
    """Return the preset that a table of rates [K, R] gives, heads taken as independent."""
    ladder = grow(
        IndependentAcceptance(rates),
        max(request.tree_size, LADDER_SIZE),
        request.max_depth,
        request.max_ranks,
    )
    tree_size = min(request.tree_size, ladder.max_tree_size)
    return _preset_from_table(ladder, tree_size, "independence", name=name, command=command)


def preset_from_positional_rates(
    rates: FloatArray, request: Request, *, name: str, command: str
) -> Preset:
    """Return the preset for sampled candidates that one vector of rates [R] gives.

    Its ladder is the best tree without gaps of ``request.tree_size``, as deep as pays.
    """
    num_heads = request.max_depth or max(1, request.tree_size - 1)
    model = IndependentAcceptance.positional(rates, num_heads)
    ladder = grow_contiguous(model, request.tree_size, request.max_depth, request.max_ranks)
    preset = _preset_from_table(
        ladder, ladder.max_tree_size, "positional rates", name=name, command=command
    )
    return replace(preset, decoding={"rule": "sampling", "candidates": "sampled"})


def _preset_from_table(
    ladder: Ladder, tree_size: int, method: str, *, name: str, command: str
) -> Preset:
    """Return a preset that knows no more than the table behind ``ladder``."""
    expected = ladder.expected_acceptance_lengths()[tree_size - 1]
    return Preset(
        name=name,
        ladder=ladder.paths,
        path_probs=_rounded(ladder.probs),
        tree_size=tree_size,
        predicted={
            "acceptance_length": round(float(expected), 5),
            "method": method,
            "held_out": False,
        },
        provenance=_provenance(command),
    )


def with_best_sizes(preset: Preset, trace: RankTrace, cost: StepCost, request: Request) -> Preset:
    """Return ``preset`` cut to the size that is fastest on the machine of ``cost``.

    ``sizes`` gets the best size of every measured situation; ``tree_size`` is the first one's.
    Sizes for a modelled machine are marked with its name.

    Raises:
        CostError: the cost was measured with another backbone.
    """
    sha256 = _provenance_of(trace)["backbone_sha256"]
    if cost.measured and cost.machine.get("backbone_sha256") != sha256:
        raise CostError(
            f"the step costs were measured with backbone {cost.machine.get('backbone')}, "
            f"the calibration with {trace.provenance['backbone']}"
        )
    sizes: list[Section] = []
    label = {} if cost.measured else {"modelled": str(cost.machine["device"])}
    for batch, context in cost.situations():
        curve = size_curve(trace, preset, request, cost, (batch, context))
        best = best_size(curve, cost.plain_ms(batch, context))
        sizes.append({"batch": batch, "context": context, "tree_size": best.tree_size} | label)
    chosen = sizes[0]["tree_size"]
    predicted = predict(trace, replace(request, tree_size=chosen))
    return replace(
        preset,
        tree_size=chosen,
        sizes=tuple(sizes),
        predicted=_prediction(predicted),
    )


_NEEDED = ("decoding", "backbone", "backbone_sha256", "heads", "heads_sha256", "heads_layout")


def _provenance_of(trace: RankTrace) -> Section:
    """Return the trace's provenance; raise TraceError when it does not name its models."""
    missing = [key for key in (*_NEEDED, "data", "template_sha256") if key not in trace.provenance]
    if missing:
        raise TraceError(f"the trace does not say its {', '.join(missing)}; calibrate again")
    return trace.provenance


def _backbone_of(source: Section) -> Section:
    backbone = {"id": source["backbone"], "sha256": source["backbone_sha256"]}
    origin = source.get("backbone_tuned_from")
    return {**backbone, "tuned_from": origin} if origin else backbone


def _prediction(interval: Interval) -> Section:
    return {
        "acceptance_length": round(interval.value, 4),
        "low": round(interval.low, 4),
        "high": round(interval.high, 4),
        "method": "replay",
        "held_out": True,
    }


def _grow(trace: RankTrace, request: Request) -> Ladder:
    """Return the ladder of ``trace``, at least ``LADDER_SIZE`` long where there are paths."""
    model = MODELS[request.model](trace)
    return grow(model, max(request.tree_size, LADDER_SIZE), request.max_depth, request.max_ranks)


def _rounded(probs: FloatArray) -> tuple[float, ...]:
    return tuple(probs.round(6).tolist())


def _provenance(command: str) -> Section:
    return {**library_versions(), "command": command, "seed": 0, "created": now()}
