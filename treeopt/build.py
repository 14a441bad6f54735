"""From a trace or a table to a preset: grow the ladder, choose the size, predict by replay."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from treeopt.acceptance import MODELS, FloatArray, IndependentAcceptance
from treeopt.cost import StepCost
from treeopt.curve import NO_SPECULATION, SizePoint, best_point, by_situation
from treeopt.dynamic import ChanceMap, DynamicTree, fit_maps
from treeopt.errors import TraceError
from treeopt.files import sha256_of_file
from treeopt.preset import Preset, Section
from treeopt.provenance import library_versions, now
from treeopt.replay import Interval, Replay, accepted_at, difference, intervals, walk
from treeopt.search import Ladder, grow, grow_contiguous
from treeopt.trace import FOLDS, RankTrace
from treeopt.tree import Tree

LADDER_SIZE = 128  # a ladder is kept beyond the tree in use, for machines where more rows pay
MIN_COUNT = 10  # times that a tree's least probable path should have been right in the calibration

Warn = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What to build: rows of the verify call (root included), acceptance model and limits.

    dynamic: whether every step chooses its nodes from the ladder.
    """

    tree_size: int
    model: str = "joint"
    max_depth: int | None = None
    max_ranks: int | None = None
    dynamic: bool = False


@dataclass(frozen=True)
class DynamicLadder:
    """The dynamic trees of every size that choose from one universe, by one set of maps."""

    universe: Tree
    maps: tuple[ChanceMap, ...]

    @property
    def max_tree_size(self) -> int:
        """Size of the universe, root included."""
        return self.universe.tree_size

    def tree(self, tree_size: int) -> DynamicTree:
        """Return the dynamic tree of ``tree_size`` nodes, root included."""
        return DynamicTree(self.universe, tree_size, self.maps)


def held_out_replays(
    trace: RankTrace,
    ladder_of: Callable[[RankTrace], Ladder | DynamicLadder],
    sizes: Sequence[int],
) -> list[Replay]:
    """Return, for each of ``sizes``, the replay with trees that a document had no part in.

    A fold of documents is decoded with the ladder that ``ladder_of`` makes from the others.

    Raises:
        TraceError: there are fewer documents than folds.
    """
    if trace.num_documents < FOLDS:
        raise TraceError(
            f"{trace.num_documents} documents are too few to hold some out; {FOLDS} are needed"
        )
    fold_at = trace.fold_at
    accepted = np.zeros((len(sizes), trace.num_positions), dtype=np.int16)
    for fold in range(FOLDS):
        held_out = trace.fold_of == fold
        ladder = ladder_of(trace.documents(np.flatnonzero(~held_out)))
        judged, here = trace.documents(np.flatnonzero(held_out)), fold_at == fold
        for row, size in zip(accepted, sizes, strict=True):
            row[here] = accepted_at(judged, ladder.tree(min(size, ladder.max_tree_size)))
    return [walk(trace, row) for row in accepted]


def predict(trace: RankTrace, request: Request) -> Interval:
    """Return the acceptance length to expect, on unseen text, of the tree that is asked for."""
    return _held_out(trace, request).interval()


def _held_out(trace: RankTrace, request: Request) -> Replay:
    (replay,) = held_out_replays(trace, partial(_trees, request=request), [request.tree_size])
    return replay


def size_curve(
    trace: RankTrace, request: Request, cost: StepCost, max_tree_size: int
) -> list[SizePoint]:
    """Return what each measured size gives in each situation, plain decoding first.

    Sizes beyond ``max_tree_size`` count as that one, which then costs what they do.
    """
    sizes_of = {
        situation: sorted({min(size, max_tree_size) for size in cost.sizes(*situation)} - {1})
        for situation in cost.situations()
    }
    sizes = sorted({NO_SPECULATION}.union(*sizes_of.values()))
    replays = held_out_replays(trace, partial(_trees, request=request), sizes)
    length_of = dict(zip(sizes, intervals(replays), strict=True))
    return [
        SizePoint(*situation, size, length_of[size], _step_interval(cost, size, *situation))
        for situation in cost.situations()
        for size in (NO_SPECULATION, *sizes_of[situation])
    ]


def _step_interval(cost: StepCost, tree_size: int, batch: int, context: int) -> Interval:
    plain = tree_size == NO_SPECULATION
    time = cost.plain(batch, context) if plain else cost.step(tree_size, batch, context)
    return Interval(time.step_ms, time.low_ms, time.high_ms)


def preset_from_trace(
    trace: RankTrace,
    file: Path,
    request: Request,
    *,
    name: str,
    command: str,
    cost: StepCost | None = None,
    on_warning: Warn = lambda message: None,
) -> Preset:
    """Return the preset that best-first search over ``trace``, read from ``file``, gives.

    Its prediction is a replay of documents that the tree was not built from. With ``cost`` the
    tree is cut to the size that is fastest on that machine; see `with_best_sizes`.

    Raises:
        TraceError: too few documents, or the trace does not name its models.
        CostError: the cost is of other models, or of one tree size only.
    """
    source = _provenance_of(trace)
    ladder = _grow(trace, request)
    preset = Preset(
        name=name,
        ladder=ladder.paths,
        path_probs=_rounded(ladder.probs),
        tree_size=min(request.tree_size, ladder.max_tree_size),
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
            **{key: source[key] for key in ("data_sha256", "max_new_tokens") if key in source},
        },
        provenance=_provenance(command),
    )
    if cost:
        preset = with_best_sizes(preset, trace, cost, request, on_warning)
    else:
        request = replace(request, tree_size=preset.tree_size)
        predicted = _prediction(predict(trace, request))
        preset = replace(preset, predicted=predicted, dynamic=_dynamic_section(trace, request))
    for warning in _too_few_positions(preset, trace):
        on_warning(warning)
    return preset


def _too_few_positions(preset: Preset, trace: RankTrace) -> Iterator[str]:
    """Yield a warning when the tree's least probable path is expected too seldom in ``trace``."""
    probs = (preset.path_probs or ())[: preset.tree_size - 1]
    if probs and probs[-1] * trace.num_positions < MIN_COUNT:
        needed = math.ceil(MIN_COUNT / max(probs[-1], 1e-6))
        yield (
            f"{trace.num_positions} calibrated positions are few for {preset.tree_size} rows: the "
            f"last path is right {probs[-1] * trace.num_positions:.1f} times in so many; about "
            f"{needed} are needed for {MIN_COUNT} times"
        )


def _dynamic_section(trace: RankTrace, request: Request) -> Section | None:
    """Return the maps of ``trace``, and the held-out gain of choosing by such maps at each step."""
    if not request.dynamic:
        return None
    fixed, chosen = (_held_out(trace, replace(request, dynamic=on)) for on in (False, True))
    gain = difference(fixed, chosen)
    return {
        "gain": round(gain.value, 4),
        "gain_low": round(gain.low, 4),
        "gain_high": round(gain.high, 4),
        "maps": [_map_section(chance_map) for chance_map in fit_maps(trace)],
    }


def _map_section(chance_map: ChanceMap) -> Section:
    section = asdict(chance_map)
    for key in ("probs", "chances"):
        section[key] = [float(f"{value:.5g}") for value in section[key]]
    return section


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


def with_best_sizes(
    preset: Preset,
    trace: RankTrace,
    cost: StepCost,
    request: Request,
    on_warning: Warn = lambda message: None,
) -> Preset:
    """Return ``preset`` cut to the size that is fastest on the machine of ``cost``.

    ``sizes`` gets the best size of every measured situation, ``curve`` what every size gives;
    ``tree_size`` is the first situation's. Sizes for a modelled machine are marked with its name.

    Raises:
        CostError: the cost is of other models or another dtype, or of one tree size only.
    """
    cost.check_matches(_provenance_of(trace))
    cost.check_choice()
    points = size_curve(trace, request, cost, len(preset.ladder) + 1)
    label = {} if cost.measured else {"modelled": str(cost.machine["device"])}
    best = {where: best_point(known) for where, known in by_situation(points).items()}
    for where, point in best.items():
        for doubt in cost.doubts(*where, point.tree_size):
            on_warning(doubt)
    first = next(iter(best.values()))
    return replace(
        preset,
        tree_size=first.tree_size,
        sizes=tuple(
            {"batch": batch, "context": context, "tree_size": point.tree_size} | label
            for (batch, context), point in best.items()
        ),
        curve=tuple(points),
        cost=_cost_section(cost),
        predicted=_prediction(first.acceptance_length),
        dynamic=_dynamic_section(trace, replace(request, tree_size=first.tree_size)),
    )


def _cost_section(cost: StepCost) -> Section:
    """Return what of the machine the curve depends on."""
    known = ("device", "dtype", "threads")
    return {
        **{key: cost.machine[key] for key in known if key in cost.machine},
        "compiled": bool(cost.machine.get("compiled_rows")),
        "measured": cost.measured,
    }


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
    """Return the ladder of ``trace``, at least ``LADDER_SIZE`` long where there are paths.

    A dynamic tree needs more to choose from than it holds.
    """
    model = MODELS[request.model](trace)
    size = max(request.tree_size * (2 if request.dynamic else 1), LADDER_SIZE)
    return grow(model, size, request.max_depth, request.max_ranks)


def _trees(trace: RankTrace, request: Request) -> Ladder | DynamicLadder:
    """Return the trees of every size that ``request`` asks for, made from ``trace``."""
    ladder = _grow(trace, request)
    if not request.dynamic:
        return ladder
    return DynamicLadder(ladder.tree(ladder.max_tree_size), fit_maps(trace))


def _rounded(probs: FloatArray) -> tuple[float, ...]:
    return tuple(probs.round(6).tolist())


def _provenance(command: str) -> Section:
    return {**library_versions(), "command": command, "seed": 0, "created": now()}
