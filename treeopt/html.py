"""A preset as one self-contained HTML page: picture, summary, measurements, choice of size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from treeopt.curve import by_situation
from treeopt.preset import Preset, describe_size
from treeopt.replay import CONFIDENCE, Interval
from treeopt.svg import escaped

Point = tuple[int, Interval]  # a tree size and a value there
Section = Mapping[str, Any]
Row = tuple[str, Sequence[str]]

UNKNOWN = "–"

# Heading -> key of a measured entry and how its value is written. A ratio has low and high too.
_MEASURED = {
    "tree_size": ("tree_size", "{:,}"),
    "tokens/s, tree decoding": ("tokens_per_s", "{:.1f}"),
    "tokens/s, plain decoding": ("plain_tokens_per_s", "{:.1f}"),
    "tokens/s, transformers generate": ("generate_tokens_per_s", "{:.1f}"),
    "speedup over plain decoding": ("speedup_vs_plain", "{:.2f}"),
    "speedup over generate": ("speedup_vs_generate", "{:.2f}"),
    "overhead of a verify step": ("overhead", "{:.2f}"),
    "acceptance length, measured": ("acceptance_length", "{:.2f}"),
    "draft tokens accepted a step": ("num_accepted_mean", "{:.2f}"),
    "near ties": ("near_ties", "{:,}"),
    "documents": ("documents", "{:,}"),
    "tokens": ("tokens", "{:,}"),
    "data": ("data", "{}"),
    "device": ("device", "{}"),
    "dtype": ("dtype", "{}"),
    "threads": ("threads", "{}"),
    "torch": ("torch", "{}"),
    "transformers": ("transformers", "{}"),
    "treeopt": ("treeopt", "{}"),
    "measured on": ("created", "{}"),
}

# Title of a chart, what of a `SizePoint` it draws, and where its vertical axis starts.
_CHARTS = (
    ("acceptance length (tokens a step)", "acceptance_length", 1.0),
    ("step time (ms)", "step_ms", 0.0),
    ("tokens/s", "tokens_per_s", 0.0),
)

_WIDTH, _HEIGHT = 440, 270  # of a chart, and the edges of its plot, in pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, _WIDTH - 12, 36, _HEIGHT - 44

_STYLE = """
:root { color-scheme: light dark; --ink: #1b2733; --muted: #52606d; --page: #f4f6f8;
  --card: #ffffff; --rule: #d5dce3; --accent: #0c5da5; --mark: #b3400e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6ebf0; --muted: #a4b1be;
  --page: #12181e; --card: #1c242c; --rule: #36424e; --accent: #6db3f2; --mark: #f5a26b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 64rem; background: var(--page);
  color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 0 0 .6rem; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: .6rem;
  padding: 1rem; margin: 0 0 1rem; }
.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .3rem 1.2rem .3rem 0;
  border-bottom: 1px solid var(--rule); }
tr:last-child > * { border-bottom: 0; }
th { font-weight: 600; }
tbody th { min-width: 7rem; width: 31%; font-weight: 400; color: var(--muted); }
td { min-width: 8.5rem; overflow-wrap: anywhere; }
.picture { background: #ffffff; border-radius: .4rem; }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; }
.charts svg { flex: 1 1 20rem; min-width: 0; max-width: 100%; height: auto; }
.charts text { fill: var(--muted); font: 12px system-ui, sans-serif; }
.charts .title { fill: var(--ink); font-weight: 600; }
.grid { stroke: var(--rule); } .point { fill: var(--accent); }
.curve { fill: none; stroke: var(--accent); stroke-width: 2; }
.band { fill: var(--accent); opacity: .2; }
.chosen { stroke: var(--mark); stroke-dasharray: 4 3; }
.charts .mark { fill: var(--mark); font-weight: 600; }
p { margin: .4rem 0; color: var(--muted); }
"""


def html_report(preset: Preset, svg: str) -> str:
    """Return one HTML page that needs no other file and no network.

    Args:
        preset: what the page shows, its ``measured`` entries and its ``curve`` included.
        svg: text of the tree's picture, put into the page as it is: our own, never a stranger's.
    """
    name = escaped(preset.name)
    sections = [
        _section("Preset", _table(_summary(preset))),
        _section("Tree", f'<div class="scroll picture">{_inline(svg)}</div>'),
        _section("Measured", _measured(preset)),
    ]
    if preset.curve:
        sections.append(_section("Choice of tree size", _charts(preset)))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{name}</h1>\n"
        + "\n".join(sections)
        + f"\n{_provenance(preset)}</body>\n</html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{content}\n</section>"


def _inline(svg: str) -> str:
    """Return the svg element without the XML declaration and doctype, which HTML has no use for."""
    return svg[max(svg.find("<svg"), 0) :].strip()


def _table(rows: Iterable[Row], header: Sequence[str] = ()) -> str:
    """Return a table of escaped texts, the first of each row being its heading."""
    head = "".join(f'<th scope="col">{escaped(text)}</th>' for text in header)
    body = "\n".join(
        f'<tr><th scope="row">{escaped(heading)}</th>'
        + "".join(f"<td>{escaped(text)}</td>" for text in texts)
        + "</tr>"
        for heading, texts in rows
    )
    head = f"<thead><tr>{head}</tr></thead>\n" if header else ""
    return f'<div class="scroll"><table>\n{head}<tbody>\n{body}\n</tbody></table></div>'


def _summary(preset: Preset) -> list[Row]:
    heads, calibration = preset.heads or {}, preset.calibration or {}
    known = {
        "backbone": preset.describe_backbone(),
        "heads": heads and f"{heads['id']} ({heads['num_heads']} heads, {heads['layout']})",
        "tree_size": f"{preset.tree_size} nodes, root included",
        "depth": str(preset.tree.depth),
        "dynamic tree": preset.describe_dynamic(),
        "decoding": preset.describe_rule(),
        "predicted acceptance length": _predicted(preset),
        "calibration": calibration
        and f"{calibration['documents']:,} documents, {calibration['positions']:,} positions "
        f"of {calibration['data']}",
        "tree_size by situation": "; ".join(preset.describe_sizes()),
        "imported from": ", ".join(map(str, (preset.imported or {}).values())),
    }
    always = ("backbone", "heads", "predicted acceptance length", "calibration")
    return [(key, [value or UNKNOWN]) for key, value in known.items() if value or key in always]


def _predicted(preset: Preset) -> str:
    """Return the predicted value with its interval and how it came about."""
    predicted = preset.predicted
    if not predicted:
        return ""
    value = f"{predicted['acceptance_length']:.2f} tokens a step"
    if "low" in predicted and "high" in predicted:
        bounds = f"{predicted['low']:.2f}–{predicted['high']:.2f}"
        value += f" ({100 * CONFIDENCE:.0f} % interval {bounds})"
    documents = "held-out" if predicted["held_out"] else "the calibration's own"
    return f"{value}, by {predicted['method']} on {documents} documents"


def _measured(preset: Preset) -> str:
    """Return a table with a column per measured entry: few entries, many quantities."""
    if not preset.measured:
        return "<p>Not measured yet: <code>treeopt validate --write</code> does it.</p>"
    rows: list[Row] = [
        (heading, [_value(entry, key, form) for entry in preset.measured])
        for heading, (key, form) in _MEASURED.items()
    ]
    after = 1 + list(_MEASURED).index("acceptance length, measured")
    rows[after:after] = [
        _predicted_row(preset),
        ("same tokens as plain decoding", [_equality(entry) for entry in preset.measured]),
    ]
    header = ["", *(f"run {number}" for number in range(1, len(preset.measured) + 1))]
    return _table(rows, header) + "\n<p>In brackets: low–high over the pairs of runs.</p>"


def _value(entry: Section, key: str, form: str) -> str:
    if entry.get(key) is None:
        return UNKNOWN
    keys = [name for name in (key, f"{key}_low", f"{key}_high") if name in entry]
    value, *bounds = (form.format(entry[name]) for name in keys)
    return f"{value} ({'–'.join(bounds)})" if bounds else value


def _predicted_row(preset: Preset) -> Row:
    """Return the prediction beside each entry that ran the preset's tree_size."""
    predicted = preset.predicted or {}
    method = predicted.get("method", "")
    kind = "replayed" if method == "replay" else f"predicted {method}".strip()
    value = _value(predicted, "acceptance_length", "{:.2f}")
    same = [entry.get("tree_size") == preset.tree_size for entry in preset.measured]
    return f"acceptance length, {kind}", [value if is_same else UNKNOWN for is_same in same]


def _equality(entry: Section) -> str:
    if entry.get("equal") is None:
        return UNKNOWN
    mismatch = entry.get("first_mismatch")
    if isinstance(mismatch, Mapping):
        mismatch = ", ".join(f"{key} {value}" for key, value in mismatch.items())
    where = "" if mismatch is None else f"; first mismatch: {mismatch}"
    return f"{'yes' if entry['equal'] else 'no'}{where}"


def _provenance(preset: Preset) -> str:
    """Return the line that says how the preset was made; nothing when unknown."""
    if not preset.provenance:
        return ""
    known = preset.provenance
    made = f"Made by treeopt {known['treeopt']} on {known['created']}, seed {known['seed']}:"
    return f"<p>{escaped(made)} <code>{escaped(known['command'])}</code></p>\n"


def _charts(preset: Preset) -> str:
    """Return three charts for each batch size and context length that the curve holds."""
    best = {(row["batch"], row["context"]): row["tree_size"] for row in preset.sizes}
    parts = []
    for (batch, context), points in by_situation(preset.curve).items():
        chosen = best.get((batch, context), preset.tree_size)
        charts = [
            _chart(title, [(p.tree_size, getattr(p, key)) for p in points], floor, chosen)
            for title, key, floor in _CHARTS
        ]
        where = f"Batch {batch}, context {context}: {describe_size(chosen)} is best."
        parts.append(
            f"<p>{where}</p>\n" + '<div class="charts">\n' + "\n".join(charts) + "\n</div>"
        )
    note = (
        f"Predicted from the calibration and the step times of {escaped(preset.describe_cost())}. "
        f"Shaded: {100 * CONFIDENCE:.0f} % intervals. Dashed: the best tree_size, the smallest "
        "within the interval of the most tokens/s. A tree_size of 1 is plain decoding."
    )
    return "\n".join(parts) + f"\n<p>{note}</p>"


class _Plot(NamedTuple):
    """The area of a chart: tree_size from 1 to x_end across, values from floor to top upwards."""

    x_end: int
    floor: float
    top: float

    def at(self, size: float, value: float) -> tuple[float, float]:
        """Return where a value is drawn."""
        across = (size - 1) / (self.x_end - 1)
        up = (value - self.floor) / (self.top - self.floor)
        return _LEFT + across * (_RIGHT - _LEFT), _BOTTOM - up * (_BOTTOM - _TOP)


def _chart(title: str, curve: Sequence[Point], floor: float, chosen: int) -> str:
    """Return a line chart over tree_size as SVG; its vertical axis starts at floor."""
    ticks = _ticks(floor, max(interval.high for _, interval in curve))
    plot = _Plot(max(2, *(size for size, _ in curve)), floor, ticks[-1])
    view = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
    parts = [
        f'<svg {view} role="img" aria-label="{title}">',
        f'<text class="title" x="4" y="18">{title}</text>',
        *_axes(plot, ticks),
        *_points(plot, curve, chosen),
        "</svg>",
    ]
    return "\n".join(parts)


def _axes(plot: _Plot, ticks: Sequence[float]) -> Iterator[str]:
    for tick in ticks:
        _, y = plot.at(1, tick)
        yield _line("grid", (_LEFT, y), (_RIGHT, y))
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
    for size in sorted({1, *_ticks(0, plot.x_end, whole=True)[1:]}):
        if size <= plot.x_end:
            x, y = plot.at(size, plot.floor)
            yield _line("grid", (x, y), (x, y + 5))
            yield f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{size:g}</text>'
    middle = (_LEFT + _RIGHT) / 2
    yield f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">tree_size</text>'


def _points(plot: _Plot, curve: Sequence[Point], chosen: int) -> Iterator[str]:
    upper = [plot.at(size, interval.high) for size, interval in curve]
    lower = [plot.at(size, interval.low) for size, interval in curve]
    yield f'<polygon class="band" points="{_places(upper + lower[::-1])}"/>'
    places = [plot.at(size, interval.value) for size, interval in curve]
    yield f'<polyline class="curve" points="{_places(places)}"/>'
    for (size, interval), (x, y) in zip(curve, places, strict=True):
        text = f"{size}: {interval.value:.2f}"
        if size == chosen:
            yield _mark(x, text)
        radius = 5 if size == chosen else 2.5
        yield f'<circle class="point" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">'
        yield f"<title>tree_size {text} ({interval.low:.2f}–{interval.high:.2f})</title></circle>"


def _places(places: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _mark(x: float, text: str) -> str:
    """Return the line through the chosen size; its text stands low, where no curve runs."""
    side, anchor = (6, "start") if x < (_LEFT + _RIGHT) / 2 else (-6, "end")
    place = f'x="{x + side:.1f}" y="{_BOTTOM - 8}" text-anchor="{anchor}"'
    return _line("chosen", (x, _TOP), (x, _BOTTOM)) + f'<text class="mark" {place}>{text}</text>'


def _line(kind: str, start: tuple[float, float], end: tuple[float, float]) -> str:
    ends = 'x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"'.format(*start, *end)
    return f'<line class="{kind}" {ends}/>'


def _ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Return 3 to 7 round numbers from ``low``, itself round, to the first one beyond ``high``."""
    high = max(high, low + 0.1)
    about = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(about))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= about)
    step = max(round(step), 1) if whole else step
    return [low + step * index for index in range(math.ceil((high - low) / step - 1e-9) + 1)]
