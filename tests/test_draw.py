"""Text, graph, Graphviz source and pictures of the worked example tree."""

from __future__ import annotations

import re
import stat
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from treeopt import draw, svg
from treeopt.errors import TreeError, TreeoptError
from treeopt.tree import Tree

TREE = Tree.from_paths([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])
PROBS = np.array([1.0, 0.6, 0.2, 0.4, 0.1, 0.3])
ROOT_ONLY = Tree.from_paths([])

TEXT = """\
root
├─ 0         60.0 %
│  ├─ 0      40.0 %
│  │  └─ 0   30.0 %
│  └─ 1      10.0 %
└─ 1         20.0 %"""

TEXT_WITHOUT_PROBS = """\
root
├─ 0
│  ├─ 0
│  │  └─ 0
│  └─ 1
└─ 1"""

NARROW_TEXT = """\
root
├0     60.0 %
│├0    40.0 %
││└0   30.0 %
│└1    10.0 %
└1     20.0 %"""

CUT_TEXT = """\
root
├0   …
│├0  …
││└0 …
│└1  …
└1   …"""


@pytest.fixture
def no_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the program dot off the PATH."""
    monkeypatch.setenv("PATH", "")


@pytest.fixture
def nothing_at_hand(no_dot: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave neither dot nor pygraphviz."""
    monkeypatch.setitem(sys.modules, "pygraphviz", None)


def put_dot_on_path(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "bin" / "dot"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")


def texts_of(picture: str) -> list[str]:
    return [
        element.text or ""
        for element in ElementTree.fromstring(picture.encode()).iter()
        if element.tag.endswith("}text")
    ]


class TestText:
    def test_shows_ranks_and_probabilities(self) -> None:
        assert draw.as_text(TREE, PROBS) == TEXT

    def test_shows_ranks_alone(self) -> None:
        assert draw.as_text(TREE) == TEXT_WITHOUT_PROBS

    def test_narrows_the_branches_before_it_cuts(self) -> None:
        assert draw.as_text(TREE, PROBS, width=18) == NARROW_TEXT
        assert draw.as_text(TREE, PROBS, width=6) == CUT_TEXT

    @pytest.mark.parametrize("width", [1, 2, 5, 10, 18, 19, 80])
    def test_never_exceeds_the_width(self, width: int) -> None:
        lines = draw.as_text(TREE, PROBS, width=width).split("\n")
        assert len(lines) == TREE.tree_size
        assert max(map(len, lines)) <= width

    def test_root_alone(self) -> None:
        assert draw.as_text(ROOT_ONLY, [1.0]) == "root"

    def test_a_chain_deeper_than_the_recursion_limit(self) -> None:
        deep = Tree.from_paths([(0,) * depth for depth in range(1, 1200)])
        assert draw.as_text(deep).count("\n") == 1199

    def test_refuses_probabilities_that_do_not_fit(self) -> None:
        with pytest.raises(TreeError, match=r"shape \(2,\); the tree has 6 nodes"):
            draw.as_text(TREE, [1.0, 0.5])
        with pytest.raises(TreeError, match="outside 0 to 1"):
            draw.as_text(TREE, [1.0, 0.6, 0.2, 0.4, 0.1, np.nan])


class TestGraph:
    def test_equals_the_tree(self) -> None:
        graph = draw.as_graph(TREE, PROBS)
        assert list(graph) == list(range(6))
        assert {child: parent for parent, child in graph.edges} == dict(
            enumerate(TREE.parents[1:].tolist(), start=1)
        )
        assert tuple(path for _, path in graph.nodes(data="path")) == TREE.paths
        assert [rank for _, rank in graph.nodes(data="rank")] == TREE.ranks.tolist()
        assert [depth for _, depth in graph.nodes(data="depth")] == TREE.depths.tolist()
        assert [prob for _, prob in graph.nodes(data="prob")] == PROBS.tolist()

    def test_has_no_prob_when_none_is_known(self) -> None:
        assert draw.as_graph(TREE).nodes[3] == {"rank": 0, "depth": 2, "path": (0, 0)}


class TestDot:
    def test_is_deterministic(self) -> None:
        assert draw.as_dot(TREE, PROBS, "a") == draw.as_dot(TREE, PROBS.copy(), "a")

    def test_holds_every_node_and_edge_once(self) -> None:
        source = draw.as_dot(TREE, PROBS)
        nodes = re.findall(r'^\t\t(\d+) \[label="?([^"\s]+(?: · [\d.]+ %)?)', source, re.M)
        assert sorted(nodes) == [
            ("0", "root"),
            ("1", "0 · 60.0 %"),
            ("2", "1 · 20.0 %"),
            ("3", "0 · 40.0 %"),
            ("4", "1 · 10.0 %"),
            ("5", "0 · 30.0 %"),
        ]
        edges = Counter(re.findall(r"^\t(\d+) -> (\d+)", source, re.M))
        assert edges == {(str(parent), str(node)): 1 for parent, node in draw.as_graph(TREE).edges}

    def test_names_the_head_of_every_level(self) -> None:
        labels = re.findall(r'label="(head \d)"', draw.as_dot(TREE))
        assert labels == ["head 1", "head 2", "head 3"]

    def test_a_likelier_path_has_a_thicker_edge(self) -> None:
        widths = re.findall(r"-> (\d+) \[penwidth=([\d.]+)", draw.as_dot(TREE, PROBS))
        by_width = sorted(widths, key=lambda edge: float(edge[1]), reverse=True)
        assert [node for node, _ in by_width] == ["1", "3", "5", "2", "4"]

    def test_the_title_cannot_become_markup(self) -> None:
        assert "<b>&lt;b&gt; &amp; \\N</b>" in draw.as_dot(TREE, title="<b> & \\N\x00")


class TestLook:
    def test_text_is_legible_on_every_fill(self) -> None:
        probs = np.linspace(0, 1, 201)
        for node in range(len(probs)):
            look = svg.look(probs, node)
            assert contrast(look.fill, {"black": "#000000", "white": "#ffffff"}[look.ink]) >= 4.5


def contrast(first: str, second: str) -> float:
    """Return the contrast ratio that WCAG 2.2 defines."""

    def luminance(colour: str) -> float:
        channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return float(np.dot([0.2126, 0.7152, 0.0722], linear))

    dark, light = sorted([luminance(first), luminance(second)])
    return (light + 0.05) / (dark + 0.05)


class TestPicture:
    def check_svg(self, path: Path) -> None:
        shown = texts_of(path.read_text(encoding="utf-8"))
        for text in ("<b> & c", "head 1", "head 3", "root", "0 · 60.0 %", "1 · 10.0 %"):
            assert shown.count(text) == 1, text

    def test_svg_by_whatever_is_at_hand(self, tmp_path: Path) -> None:
        path = tmp_path / "tree.svg"
        assert draw.write_picture(path, TREE, PROBS, "<b> & c") in ("dot", "pygraphviz", "treeopt")
        self.check_svg(path)

    def test_svg_text_is_what_the_file_holds(self, tmp_path: Path) -> None:
        path = tmp_path / "tree.svg"
        draw.write_picture(path, TREE, PROBS, "<b> & c")
        assert draw.as_svg(TREE, PROBS, "<b> & c") == path.read_text(encoding="utf-8")

    @pytest.mark.usefixtures("no_dot")
    def test_svg_by_pygraphviz(self, tmp_path: Path) -> None:
        pytest.importorskip("pygraphviz")
        path = tmp_path / "tree.svg"
        assert draw.write_picture(path, TREE, PROBS, "<b> & c") == "pygraphviz"
        self.check_svg(path)

    @pytest.mark.usefixtures("nothing_at_hand")
    def test_svg_by_treeopt(self, tmp_path: Path) -> None:
        path = tmp_path / "tree.SVG"
        assert draw.write_picture(path, TREE, PROBS, "<b> & c") == "treeopt"
        self.check_svg(path)

    @pytest.mark.usefixtures("no_dot")
    @pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG\r\n\x1a\n"), ("pdf", b"%PDF")])
    def test_png_and_pdf_by_pygraphviz(
        self, tmp_path: Path, suffix: str, magic: bytes, capfd: pytest.CaptureFixture[str]
    ) -> None:
        pytest.importorskip("pygraphviz")
        path = tmp_path / f"tree.{suffix}"
        assert draw.write_picture(path, TREE, PROBS) == "pygraphviz"
        assert path.read_bytes().startswith(magic)
        assert capfd.readouterr() == ("", "")

    def test_by_dot(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        put_dot_on_path(tmp_path, 'echo "$@"; cat', monkeypatch)
        path = tmp_path / "tree.pdf"
        assert draw.write_picture(path, TREE, PROBS) == "dot"
        options, source = path.read_text(encoding="utf-8").split("\n", maxsplit=1)
        assert "-Tpdf" in options
        assert source == draw.as_dot(TREE, PROBS)

    def test_dot_source(self, tmp_path: Path) -> None:
        path = tmp_path / "tree.dot"
        assert draw.write_picture(path, TREE, PROBS, "t") == "treeopt"
        assert path.read_text(encoding="utf-8") == draw.as_dot(TREE, PROBS, "t")

    @pytest.mark.usefixtures("nothing_at_hand")
    @pytest.mark.parametrize("suffix", ["png", "pdf"])
    def test_says_what_to_install(self, tmp_path: Path, suffix: str) -> None:
        path = tmp_path / f"tree.{suffix}"
        path.write_text("before")
        with pytest.raises(TreeoptError) as raised:
            draw.write_picture(path, TREE)
        assert str(raised.value) == (
            f"cannot draw {path}: there is no program dot on the PATH, there is no package "
            "pygraphviz, treeopt itself draws only SVG; install Graphviz (apt install graphviz) "
            "or pygraphviz (pip install pygraphviz), or choose .svg"
        )
        assert [file.name for file in tmp_path.iterdir()] == [path.name]
        assert path.read_text() == "before"

    def test_a_dot_that_fails_leaves_nothing_behind(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "pygraphviz", None)
        put_dot_on_path(tmp_path, "cat > /dev/null; echo no such format >&2; exit 1", monkeypatch)
        with pytest.raises(TreeoptError, match=r"dot failed \(no such format\)"):
            draw.write_picture(tmp_path / "out" / "tree.png", TREE)
        assert not (tmp_path / "out").exists()
        assert draw.write_picture(tmp_path / "tree.svg", TREE) == "treeopt"

    @pytest.mark.parametrize("name", ["tree.gif", "tree"])
    def test_refuses_an_unknown_suffix(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(TreeoptError, match=r"must be one of \.svg, \.png, \.pdf, \.dot"):
            draw.write_picture(tmp_path / name, TREE)
        assert not list(tmp_path.iterdir())


class TestOwnLayout:
    def test_every_box_has_its_own_place_and_parents_stand_midway(self) -> None:
        # Rows of the example: node 5 and its parent on 0, node 4 on 1, node 2 on 2.
        boxes = re.findall(r'<rect x="(\d+)" y="([\d.]+)"', svg.tidy_svg(TREE, PROBS))
        assert len(set(boxes)) == TREE.tree_size
        columns = np.unique([float(x) for x, _ in boxes], return_inverse=True)[1]
        assert columns.tolist() == TREE.depths.tolist()
        heights = np.array([float(y) for _, y in boxes])
        row = heights[4] - heights[5]
        assert np.allclose((heights - heights[5]) / row, [1.25, 0.5, 2, 0, 1, 0])

    def test_root_alone(self) -> None:
        assert texts_of(svg.tidy_svg(ROOT_ONLY))[-1] == "root"


def test_import_loads_no_drawing_package() -> None:
    import subprocess

    code = (
        "import sys, treeopt.draw, treeopt.html; "
        "print({'networkx', 'graphviz', 'pygraphviz', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
