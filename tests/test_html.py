"""The HTML report: well-formed, escaped, complete."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

import pytest

from treeopt.curve import SizePoint
from treeopt.html import html_report
from treeopt.preset import Preset
from treeopt.replay import Interval

SVG = '<?xml version="1.0"?>\n<!DOCTYPE svg>\n<svg><text>picture of the tree</text></svg>\n'

MEASURED = {
    "tree_size": 4,
    "acceptance_length": 2.381,
    "num_accepted_mean": 1.381,
    "overhead": 1.452,
    "overhead_low": 1.401,
    "overhead_high": 1.503,
    "speedup_vs_plain": 1.643,
    "speedup_vs_plain_low": 1.584,
    "speedup_vs_plain_high": 1.712,
    "speedup_vs_generate": 1.802,
    "speedup_vs_generate_low": 1.741,
    "speedup_vs_generate_high": 1.873,
    "tokens_per_s": 41.27,
    "plain_tokens_per_s": 25.12,
    "generate_tokens_per_s": 22.93,
    "equal": True,
    "first_mismatch": None,
    "near_ties": 0,
    "documents": 40,
    "tokens": 5120,
    "device": "cpu <2 cores>",
    "dtype": "float32",
    "threads": 2,
    "data": "benchmarks/prompts.jsonl",
    "treeopt": "0.1.0",
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "created": "2026-11-30T20:00:00+00:00",
}

PRESET = Preset(
    name="tiny <script>alert(1)</script>",
    ladder=((0,), (0, 0), (1,), (0, 0, 0), (0, 1)),
    tree_size=4,
    backbone={"id": "smollm2-135m", "sha256": "a"},
    heads={"id": "heads.safetensors", "sha256": "b", "num_heads": 3, "layout": "shared_lm_head"},
    sizes=({"batch": 4, "context": 256, "tree_size": 2},),
    calibration={
        "sha256": "c",
        "data": "calibration/prompts.jsonl",
        "documents": 240,
        "positions": 30720,
        "num_ranks": 16,
    },
    predicted={
        "acceptance_length": 2.412,
        "low": 2.334,
        "high": 2.493,
        "method": "replay",
        "held_out": True,
    },
    measured=(MEASURED,),
    provenance={"treeopt": "0.1.0", "command": "treeopt build", "seed": 7, "created": "today"},
)

CURVE = tuple(
    SizePoint(1, 256, size, Interval(length, 0.9 * length, 1.1 * length), Interval(ms, ms, ms))
    for size, length, ms in ((1, 1.0, 40.0), (4, 2.2, 50.0), (6, 2.4, 80.0))
)
DRAWN = replace(
    PRESET,
    sizes=({"batch": 1, "context": 256, "tree_size": 4},),
    curve=CURVE,
    cost={"device": "cpu <x>", "dtype": "float32", "compiled": False, "measured": True},
)


class Page(HTMLParser):
    """Checks that elements nest, and collects the rows of the tables and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    def cell(self, heading: str) -> str:
        (row,) = (row for row in self.rows if row[0] == heading)
        assert len(row) == 2
        return row[1]


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(html_report(DRAWN, SVG))


def test_is_one_file_without_scripts_or_references(page: Page) -> None:
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "img", "iframe", "object")
        assert not {"src", "href", "xlink:href", "onload"} & set(attributes)
    assert "url(" not in page.text
    assert "@import" not in page.text


def test_escapes_names_and_values(page: Page) -> None:
    text = html_report(PRESET, SVG)
    assert "<script>" not in text
    assert "<title>tiny &lt;script&gt;alert(1)&lt;/script&gt;</title>" in text
    assert page.cell("device") == "cpu <2 cores>"


def test_holds_the_picture_without_its_prolog() -> None:
    text = html_report(PRESET, SVG)
    assert "<svg><text>picture of the tree</text></svg>" in text
    assert "<?xml" not in text
    assert text.count("<!DOCTYPE") == 1


@pytest.mark.parametrize(
    ("heading", "value"),
    [
        ("backbone", "smollm2-135m"),
        ("heads", "heads.safetensors (3 heads, shared_lm_head)"),
        ("depth", "2"),
        ("decoding", "greedy"),
        (
            "predicted acceptance length",
            "2.41 tokens a step (95 % interval 2.33–2.49), by replay on held-out documents",
        ),
        ("calibration", "240 documents, 30,720 positions of calibration/prompts.jsonl"),
        ("tree_size by situation", "batch 1, context 256: 4"),
        ("tokens/s, tree decoding", "41.3"),
        ("tokens/s, plain decoding", "25.1"),
        ("tokens/s, transformers generate", "22.9"),
        ("speedup over plain decoding", "1.64 (1.58–1.71)"),
        ("speedup over generate", "1.80 (1.74–1.87)"),
        ("overhead of a verify step", "1.45 (1.40–1.50)"),
        ("acceptance length, measured", "2.38"),
        ("acceptance length, replayed", "2.41"),
        ("same tokens as plain decoding", "yes"),
        ("near ties", "0"),
        ("dtype", "float32"),
        ("threads", "2"),
        ("documents", "40"),
        ("tokens", "5,120"),
    ],
)
def test_tables_hold_the_numbers(page: Page, heading: str, value: str) -> None:
    assert page.cell(heading) == value


def test_shows_every_measured_entry_and_where_tokens_differ() -> None:
    other = {
        **MEASURED,
        "tree_size": 6,
        "equal": False,
        "first_mismatch": {"document": 3, "position": 71},
        "near_ties": 2,
    }
    rows = {row[0]: row[1:] for row in Page(html_report(PRESET.with_measured(other), SVG)).rows}
    assert rows[""] == ["run 1", "run 2"]
    assert rows["same tokens as plain decoding"] == [
        "yes",
        "no; first mismatch: document 3, position 71",
    ]
    # The replayed value belongs to the preset's own tree_size.
    assert rows["acceptance length, replayed"] == ["2.41", "–"]


def test_a_preset_of_which_little_is_known() -> None:
    bare = Preset("bare", ((0,),), 2, decoding={"epsilon": 0.09, "rule": "typical"})
    page = Page(html_report(bare, SVG))
    assert page.cell("backbone") == "–"
    assert page.cell("predicted acceptance length") == "–"
    lossy = "(lossy: answers differ from the backbone's own)"
    assert page.cell("decoding") == f"typical, epsilon 0.09 {lossy}"
    assert "Not measured yet" in page.text
    assert "Choice of tree size" not in page.text


def test_says_when_a_prediction_is_in_sample() -> None:
    predicted = {"acceptance_length": 2.0, "method": "joint", "held_out": False}
    page = Page(html_report(replace(PRESET, predicted=predicted), SVG))
    assert page.cell("predicted acceptance length") == (
        "2.00 tokens a step, by joint on the calibration's own documents"
    )
    assert page.cell("acceptance length, predicted joint") == "2.00"


def test_charts_mark_the_chosen_size(page: Page) -> None:
    marks = [attributes for tag, attributes in page.tags if attributes.get("class") == "chosen"]
    assert len(marks) == 3
    for value in ("4: 2.20", "4: 50.00", "4: 44.00"):
        assert value in page.text
    assert "tree_size 6: 30.00 (27.00–33.00)" in page.text
    assert "Batch 1, context 256: 4 is best." in page.text
    assert "the step times of cpu <x>, float32." in page.text


def test_every_situation_has_charts_of_its_own() -> None:
    more = tuple(replace(point, batch=4) for point in CURVE)
    sizes = (*DRAWN.sizes, {"batch": 4, "context": 256, "tree_size": 1})
    page = Page(html_report(replace(DRAWN, curve=CURVE + more, sizes=sizes), SVG))
    assert sum(attributes.get("class") == "curve" for _, attributes in page.tags) == 6
    assert "Batch 4, context 256: no speculation is best." in page.text


def places_of(kind: str) -> list[str | None]:
    found = Page(html_report(DRAWN, SVG)).tags
    return [attributes["points"] for _, attributes in found if attributes.get("class") == kind]


def test_points_lie_where_their_values_say() -> None:
    # Sizes 1, 4 and 6 from the plot's left edge, 44, to its right one, 428; values from the lower
    # edge, 226, to the upper one, 36: lengths from 1 to 3, ms from 0 to 80, tokens/s from 0 to 50.
    length, step, speed = places_of("curve")
    assert length == "44.0,226.0 274.4,112.0 428.0,93.0"
    assert step == "44.0,131.0 274.4,107.2 428.0,36.0"
    assert speed == "44.0,131.0 274.4,58.8 428.0,112.0"


def test_bands_go_along_the_upper_bounds_and_back_along_the_lower() -> None:
    *_, speed = places_of("band")
    upper = "44.0,121.5 274.4,42.1 428.0,100.6"
    assert speed == f"{upper} 428.0,123.4 274.4,75.5 44.0,140.5"


def test_a_curve_of_one_point_is_drawn() -> None:
    page = Page(html_report(replace(DRAWN, tree_size=1, curve=CURVE[:1], sizes=()), SVG))
    assert "1: 1.00" in page.text
