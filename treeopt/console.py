"""How results look on a terminal: tables on stdout, progress and warnings on stderr."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from treeopt.cost import StepCost
from treeopt.curve import NO_SPECULATION, SizePoint, by_situation
from treeopt.preset import Preset, describe_size
from treeopt.replay import Interval
from treeopt.report import DecodeReport
from treeopt.serving import Served
from treeopt.trace import RankTrace

stdout = Console(highlight=False)
stderr = Console(stderr=True, highlight=False)

Advance = Callable[[int, int], None]
Row = dict[str, Any]


def warn(message: str) -> None:
    """Print a warning."""
    click.echo(f"warning: {message}", err=True)


def say_compiling(num_rows: int) -> None:
    """Say on stderr that calls of ``num_rows`` are being compiled, which takes minutes."""
    click.echo(f"compiling calls of {num_rows} rows for this machine; minutes, once", err=True)


@contextlib.contextmanager
def progress(what: str, total: int | None) -> Iterator[Advance]:
    """Show a progress bar, of ``total`` units if that is known.

    Yields a function that takes (new units, new tokens).
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    start, seen = time.monotonic(), 0
    with Progress(*columns, console=stderr, transient=True) as bar:
        task = bar.add_task(what, total=total, speed="")

        def advance(units: int, tokens: int) -> None:
            nonlocal seen
            seen += tokens
            speed = f"{seen / (time.monotonic() - start):.0f} tokens/s" if seen else ""
            bar.update(task, advance=units, speed=speed)

        yield advance


def emit(as_json: bool, value: Row, rows: Sequence[Row], title: str) -> None:
    """Print ``value`` as one JSON object, or ``rows`` as a table with a title."""
    if as_json:
        click.echo(json.dumps(value))
        return
    table = Table(title=title, title_justify="left")
    for key in rows[0]:
        table.add_column(key.replace("_", " "), justify="right", overflow="fold")
    for row in rows:
        table.add_row(*(_shown(value) for value in row.values()))
    stdout.print(table)


def show_rates(trace: RankTrace, out: str, as_json: bool) -> None:
    """Print how often each head's list held the right token."""
    tops = [top for top in (1, 2, 3, 5, 10) if top <= trace.num_ranks]
    hits, trials = trace.hits(), trace.trials()
    rows = [
        {
            "head": head + 1,
            "trials": int(trials[head]),
            **{f"top_{top}": _share(hits[head, :top].sum(), trials[head]) for top in tops},
        }
        for head in range(trace.num_heads)
    ]
    value = {"out": out, "documents": trace.num_documents, "positions": trace.num_positions}
    title = f"{trace.num_documents} answers, {trace.num_positions} tokens -> {out}"
    emit(as_json, {**value, "heads": rows}, rows, title)


def show_build(preset: Preset, out: str, as_json: bool) -> None:
    """Print what a built preset promises."""
    predicted = preset.predicted or {}
    value = {
        "tree_size": preset.tree_size,
        "depth": preset.tree.depth,
        "expected_acceptance_length": round(1 + sum((preset.node_probs or [1])[1:]), 4),
        **{f"replayed_{key}": predicted[key] for key in ("low", "high") if key in predicted},
        "out": out,
    }
    if predicted.get("method") == "replay":
        value["replayed_acceptance_length"] = predicted["acceptance_length"]
    if preset.sizes:
        value["sizes"] = list(preset.sizes)
    if preset.curve:
        value["curve"] = [
            {**point.as_row(), "tokens_per_s": round(point.tokens_per_s.value, 2)}
            for point in preset.curve
        ]
    if preset.dynamic:
        value["dynamic"] = {key: preset.dynamic[key] for key in preset.dynamic if key != "maps"}
    row = {
        "rows": describe_size(preset.tree_size),
        "depth": preset.tree.depth,
        "expected": value["expected_acceptance_length"],
        "predicted acceptance length": _predicted(predicted),
    }
    if preset.dynamic:
        text = preset.describe_dynamic()
        row = {"dynamic tree": text, "predicted acceptance length": _predicted(predicted)}
    emit(as_json, value, [row], f"{preset.name} -> {out}")
    if not as_json:
        for line in _choice(preset):
            stdout.print(line)


def show_curve(preset: Preset) -> None:
    """Print what each tree size gives, a table per situation, the best size marked."""
    best = {(row["batch"], row["context"]): row["tree_size"] for row in preset.sizes}
    for (batch, context), points in by_situation(preset.curve).items():
        rows = [
            {
                "rows": "plain" if point.tree_size == NO_SPECULATION else point.tree_size,
                "acceptance length": _interval(point.acceptance_length),
                "step, ms": _interval(point.step_ms, 1),
                "tokens/s": _interval(point.tokens_per_s, 1),
                "": "best" if point.tree_size == best.get((batch, context)) else "",
            }
            for point in points
        ]
        emit(False, {}, rows, f"Batch {batch}, context {context}, {preset.describe_cost()}")


def show_cost(cost: StepCost, out: str, as_json: bool) -> None:
    """Print step times beside those of a plain step."""
    rows = [
        {"batch": row.batch, "context": row.context, "tree_size": row.tree_size,
         "step_ms": row.step_ms, "low_ms": row.low_ms, "high_ms": row.high_ms,
         "overhead": round(row.step_ms / cost.plain_ms(row.batch, row.context), 3)}
        for row in cost.times
    ]  # fmt: skip
    how = "Step times" if cost.measured else f"Modelled step times of {cost.machine['device']}"
    value = {"out": out, "measured": cost.measured, **cost.machine, "times": rows}
    emit(as_json, value, rows, f"{how} (0: plain)")


def show_report(preset: Preset, report: DecodeReport, as_json: bool) -> None:
    """Print the three sides of a validation, and what the tree decode's numbers mean."""
    value = report.as_dict()
    point = _predicted_point(preset, report)
    if as_json:
        predicted = {} if point is None else {"predicted_tokens_per_s": point.tokens_per_s.value}
        click.echo(json.dumps(value | _rounded(report.details() | predicted)))
        return
    speeds = [
        {"": name, "tokens/s": value[f"{key}tokens_per_s"], "tree is faster by": ratio}
        for name, key, ratio in (
            ("transformers generate", "generate_", _ratio(report.speedup_vs_generate)),
            ("plain decode", "plain_", _ratio(report.speedup_vs_plain)),
            ("tree decode", "", ""),
        )
    ]
    machine = report.machine
    title = (
        f"{preset.name}, {len(report.prompts)} prompts, {value['tokens']} tokens, batch 1, "
        f"{machine['dtype']}, {machine['threads']} threads, {machine['device']}"
    )
    emit(False, {}, speeds, title)
    predicted = preset.predicted or {}
    for name, text in (
        ("backbone", preset.describe_backbone() or report.machine["backbone"]),
        ("tree size", f"{report.tree_size} rows, {preset.draft_tree.depth} deep"),
        *([("dynamic tree", preset.describe_dynamic())] if preset.dynamic else []),
        ("replayed acceptance length", _predicted(predicted)),
        ("measured acceptance length", _interval(report.acceptance_length)),
        *([("predicted tokens/s", _predicted_speed(point, report))] if point else []),
        ("overhead of a step", _interval(report.overhead)),
        ("forward calls", _forward_calls(report.machine)),
        ("outside model calls", f"{report.outside_model_share:.1%} of a step"),
        ("a step, ms", _step_times(report)),
        ("accepted by depth", ", ".join(f"{share:.0%}" for share in report.accepted_by_depth)),
        ("equal to plain decode", _equality(report)),
    ):
        stdout.print(f"{name:<28}{text}")


def show_served(preset: Preset, sides: Sequence[Served], setting: Row, as_json: bool) -> None:
    """Print what each policy made of the same simulated requests."""
    rows = [side.as_dict() for side in sides]
    requests = len(sides[0].latency_s)
    value = {"simulated": True, "preset": preset.name, "requests": requests, **setting}
    # The title says "simulated" for every column; JSON names say it one by one.
    columns = {
        "policy": "policy",
        "simulated_tokens_per_s": "tokens/s",
        "simulated_latency_mean_s": "mean s",
        "simulated_latency_p95_s": "p95 s",
        "simulated_batch_mean": "batch",
        "simulated_rows_mean": "rows",
        "simulated_acceptance_length": "length",
    }
    shown = [{title: row[key] for key, title in columns.items()} for row in rows]
    title = (
        f"Simulated: {preset.name}, {requests} requests at {setting['rate']}/s, "
        f"batch <= {setting['max_batch']}, context {setting['context']}"
    )
    emit(as_json, {**value, "policies": rows}, shown, title)


def describe(preset: Preset) -> str:
    """Return the head of a preset as text."""
    size = f"{preset.tree_size} rows, {preset.tree.depth} deep"
    if preset.tree_size == NO_SPECULATION:
        size = "no speculation: plain decoding, the tree is its root alone"
    lines = [
        f"{preset.name}: {size}",
        f"decoding: {preset.describe_rule()}",
    ]
    if preset.backbone:
        lines.insert(1, f"backbone: {preset.describe_backbone()}")
    if preset.dynamic:
        lines.append(f"dynamic tree: {preset.describe_dynamic()}; the static one is drawn")
    if preset.imported:
        lines.append(f"imported from {preset.imported['source']}")
    if preset.predicted:
        lines.append(f"predicted acceptance length {_predicted(preset.predicted)}")
    lines += _choice(preset)
    for row in preset.measured:
        lines.append(
            f"measured {row['acceptance_length']} tokens/step, {row['speedup_vs_plain']}x plain, "
            f"{row['speedup_vs_generate']}x generate ({row['dtype']}, {row['device']})"
        )
    return "\n".join(lines)


def _choice(preset: Preset) -> list[str]:
    """Return the best size of each situation, with what it gives where the curve says so."""
    lines = []
    for situation, row in zip(preset.describe_sizes(), preset.sizes, strict=True):
        point = preset.point(row["tree_size"], row["batch"], row["context"])
        speed = f", {_interval(point.tokens_per_s, 1)} tokens/s predicted" if point else ""
        lines.append(f"best size at {situation}{speed}")
    return lines


def _predicted(predicted: Row) -> str:
    if not predicted:
        return "unknown"
    text = f"{predicted['acceptance_length']:.3f}"
    if "low" in predicted:
        text += f" [{predicted['low']:.3f}, {predicted['high']:.3f}]"
    held_out = "held-out documents" if predicted["held_out"] else "no held-out text"
    return f"{text} ({predicted['method']}, {held_out})"


def _predicted_point(preset: Preset, report: DecodeReport) -> SizePoint | None:
    """Return the curve's point for what was measured, if the curve is of this very machine."""
    cost, machine = preset.cost or {}, report.machine
    same = cost.get("compiled") == bool(machine.get("compiled_rows")) and all(
        cost.get(key) == machine.get(key) for key in ("device", "dtype", "threads")
    )
    return preset.point(report.tree_size, 1, report.context) if same else None


def _predicted_speed(point: SizePoint, report: DecodeReport) -> str:
    ratio = report.tokens_per_s / point.tokens_per_s.value
    speed = _interval(point.tokens_per_s, 1)
    return f"{speed} at context {point.context}; measured {ratio - 1:+.0%}"


def _equality(report: DecodeReport) -> str:
    if not report.mismatches:
        return f"yes, all {len(report.prompts)} answers token for token"
    widest = max(mismatch.gap for mismatch in report.mismatches)
    if report.equal:
        return (
            f"yes, but for {len(report.mismatches)} answers that leave at a near-tie "
            f"(logits at most {widest:.3f} apart)"
        )
    return f"NO: {sum(not m.is_near_tie for m in report.mismatches)} answers differ"


def _forward_calls(machine: Row) -> str:
    """Return which kind of forward calls were measured."""
    if rows := machine.get("compiled_rows"):
        return f"compiled for {', '.join(map(str, rows))} rows, in {machine['compile_s']} s now"
    return f"eager, linear layers {machine.get('linear_layers', 'as loaded')}"


def _step_times(report: DecodeReport) -> str:
    details = report.details()
    phases = ", ".join(
        f"{key.removesuffix('_ms')} {details[key]:.1f}"
        for key in ("draft_ms", "verify_ms", "accept_ms", "gather_ms")
    )
    tail = ", ".join(f"p{p} {details[f'step_p{p}_ms']:.1f}" for p in (50, 95, 99))
    return f"{phases}; {tail}"


def _rounded(value: Any) -> Any:
    """Return ``value`` with every float in it cut to 4 places."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


def _interval(interval: Interval, places: int = 3) -> str:
    value, low, high = (
        f"{bound:.{places}f}" for bound in (interval.value, interval.low, interval.high)
    )
    return f"{value} [{low}, {high}]"


def _ratio(interval: Interval) -> str:
    return f"{interval.value:.2f}x [{interval.low:.2f}, {interval.high:.2f}]"


def _share(part: Any, whole: Any) -> float:
    return round(float(part / whole), 4) if whole else 0.0


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
