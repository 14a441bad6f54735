"""A tree as text, as a networkx graph, as Graphviz source, and as a picture.

Wherever ``probs`` is taken it is float [N], the path probability of every node in tree order, the
root's being 1. Pictures need no Graphviz program: see ``write_picture``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from treeopt import svg
from treeopt.errors import TreeError, TreeoptError
from treeopt.files import replacing
from treeopt.svg import Probs
from treeopt.tree import ROOT, Tree

if TYPE_CHECKING:
    import graphviz
    import networkx

FORMATS = (".svg", ".png", ".pdf", ".dot")

_PNG_DPI = "144"  # twice the 72 of Graphviz's SVG: sharp on dense screens


def as_text(tree: Tree, probs: ArrayLike | None = None, width: int = 80) -> str:
    """Return the tree as lines of at most ``width`` characters, one per node, depth first.

    Nodes show their rank and, given ``probs``, the probability of their path. Where lines would
    be too long, all branches are drawn narrower; what is still too long ends in ``…``. The
    example::

        root
        ├─ 0         60.0 %
        │  ├─ 0      40.0 %
        │  │  └─ 0   30.0 %
        │  └─ 1      10.0 %
        └─ 1         20.0 %
    """
    checked = _checked(tree, probs)
    lines = _text_lines(tree, checked, ("├─ ", "└─ ", "│  ", "   "))
    if max(map(len, lines)) > width:
        lines = _text_lines(tree, checked, ("├", "└", "│", " "))
    return "\n".join(line if len(line) <= width else line[: width - 1] + "…" for line in lines)


def as_graph(tree: Tree, probs: ArrayLike | None = None) -> networkx.DiGraph[int]:
    """Return the tree as a graph with edges from parents to children.

    Nodes are 0 to N - 1, with attributes rank, depth, path and, given ``probs``, prob.
    """
    import networkx

    checked = _checked(tree, probs)
    graph: networkx.DiGraph[int] = networkx.DiGraph()
    for node, path in enumerate(tree.paths):
        prob = {} if checked is None else {"prob": float(checked[node])}
        graph.add_node(node, rank=int(tree.ranks[node]), depth=len(path), path=path, **prob)
        if node != ROOT:
            graph.add_edge(int(tree.parents[node]), node)
    return graph


def as_dot(tree: Tree, probs: ArrayLike | None = None, title: str | None = None) -> str:
    """Return Graphviz source that draws the tree from left to right, one column per head.

    Equal arguments give equal text. The more probable a path, the darker its node's box and the
    thicker the edge to it.
    """
    return str(_digraph(tree, _checked(tree, probs), title).source)


def as_svg(tree: Tree, probs: ArrayLike | None = None, title: str | None = None) -> str:
    """Return the picture as SVG text, by the first renderer at hand: see ``write_picture``."""
    picture = _Picture(tree, _checked(tree, probs), title, "svg")
    return _rendered(picture, "the tree")[1].decode()


def write_picture(
    path: str | Path, tree: Tree, probs: ArrayLike | None = None, title: str | None = None
) -> str:
    """Draw the tree into ``path``, whole or not at all, and return what drew it.

    The suffix chooses the format, one of ``FORMATS``. The first of these at hand draws: ``dot``
    on the PATH, ``pygraphviz``, and for SVG ``treeopt`` itself.

    Raises:
        TreeError: ``probs`` does not fit the tree.
        TreeoptError: an unknown suffix, nothing at hand for that format, or a failed write.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise TreeoptError(f"cannot draw {path}: its suffix must be one of {', '.join(FORMATS)}")
    picture = _Picture(tree, _checked(tree, probs), title, suffix[1:])
    renderer, data = _rendered(picture, path)
    with replacing(path) as temporary:
        temporary.write_bytes(data)
    return renderer


class _Picture(NamedTuple):
    tree: Tree
    probs: Probs
    title: str | None
    format: str

    def digraph(self) -> graphviz.Digraph:
        graph = _digraph(self.tree, self.probs, self.title)
        if self.format == "png":
            graph.attr(dpi=_PNG_DPI)
        return graph


class _CannotDrawError(Exception):
    """Why one renderer cannot draw; the next one is asked."""


def _rendered(picture: _Picture, path: str | Path) -> tuple[str, bytes]:
    """Return the first renderer that can draw ``picture``, and the picture's bytes."""
    if picture.format == "dot":
        return "treeopt", picture.digraph().source.encode()
    renderers: dict[str, Callable[[_Picture], bytes]] = {
        "dot": _by_dot,
        "pygraphviz": _by_pygraphviz,
        "treeopt": _by_treeopt,
    }
    reasons = []
    for name, render in renderers.items():
        try:
            return name, render(picture)
        except _CannotDrawError as reason:
            reasons.append(str(reason))
    raise TreeoptError(
        f"cannot draw {path}: {', '.join(reasons)}; install Graphviz (apt install graphviz) or "
        "pygraphviz (pip install pygraphviz), or choose .svg"
    )


def _by_dot(picture: _Picture) -> bytes:
    if shutil.which("dot") is None:
        raise _CannotDrawError("there is no program dot on the PATH")
    import graphviz

    try:
        return bytes(picture.digraph().pipe(format=picture.format, quiet=True))
    except graphviz.CalledProcessError as error:
        said = (error.stderr or b"").decode(errors="replace").strip()
        raise _CannotDrawError(f"dot failed ({said})") from error


def _by_pygraphviz(picture: _Picture) -> bytes:
    try:
        import pygraphviz
    except ImportError as error:
        raise _CannotDrawError("there is no package pygraphviz") from error
    graph = pygraphviz.AGraph(string=picture.digraph().source)
    try:
        with _stderr_of_libraries_muted():
            return bytes(graph.draw(format=picture.format, prog="dot"))
    except ValueError as error:
        raise _CannotDrawError(f"pygraphviz failed ({error})") from error
    finally:
        graph.close()


def _by_treeopt(picture: _Picture) -> bytes:
    if picture.format != "svg":
        raise _CannotDrawError("treeopt itself draws only SVG")
    return svg.tidy_svg(picture.tree, picture.probs, picture.title).encode()


@contextlib.contextmanager
def _stderr_of_libraries_muted() -> Iterator[None]:
    """Drop what C code prints: pygraphviz's fontconfig complains about newer systems' files."""
    saved = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def _text_lines(tree: Tree, probs: Probs, branches: tuple[str, str, str, str]) -> list[str]:
    inner, last, passing, empty = branches
    last_child = dict(zip(tree.parents.tolist(), range(tree.tree_size), strict=True))
    below = [""] * tree.tree_size  # what the lines of a node's children start with
    texts = ["root"] * tree.tree_size
    for node in range(1, tree.tree_size):
        parent = int(tree.parents[node])
        is_last = node == last_child[parent]
        texts[node] = f"{below[parent]}{last if is_last else inner}{tree.ranks[node]}"
        below[node] = below[parent] + (empty if is_last else passing)
    if probs is not None:
        column = max(map(len, texts))
        for node in range(1, tree.tree_size):
            texts[node] = f"{texts[node]:{column}}  {svg.percent(probs[node]):>7}"
    return [texts[node] for node in svg.depth_first(tree)]


def _digraph(tree: Tree, probs: Probs, title: str | None) -> graphviz.Digraph:
    import graphviz

    graph = graphviz.Digraph("tree")
    graph.attr(rankdir="LR", ordering="out", ranksep="0.8", nodesep="0.09", pad="0.2")
    graph.attr(label=_dot_title(title, probs), labelloc="t", labeljust="l")
    graph.attr("graph", fontname=svg.FONT, fontcolor=svg.INK)
    graph.attr("node", fontname=svg.FONT, fontsize="11", margin="0.09,0.03")
    graph.attr("node", shape="box", style="rounded,filled", width="1.1", height="0.27")
    graph.attr("node", color=svg.LINE)
    graph.attr("edge", color=svg.LINE, arrowhead="none", headport="w")
    for depth in range(tree.depth + 1):
        with graph.subgraph() as level:
            level.attr(rank="same")
            for node in np.flatnonzero(tree.depths == depth).tolist():
                fill, ink, _ = svg.look(probs, node)
                text = svg.label(tree, probs, node)
                level.node(str(node), text, fillcolor=fill, fontcolor=ink)
            head = f"head {depth}" if depth else " "
            level.node(f"head{depth}", head, shape="plain", style="", fontcolor=svg.MUTED)
    for node in range(1, tree.tree_size):
        width = svg.look(probs, node).line_width
        graph.edge(str(tree.parents[node]), str(node), penwidth=width)
    # Invisible edges keep the names of the heads in one row, above the tree.
    for depth in range(tree.depth):
        graph.edge(f"head{depth}", f"head{depth + 1}", style="invis", weight="100")
    return graph


def _dot_title(title: str | None, probs: Probs) -> str:
    """Return an HTML-like label; its text is escaped, so a title cannot become markup."""
    left, gap = '<br align="left"/>', '<font point-size="5"> </font>'
    caption = f'<font point-size="11" color="{svg.MUTED}">{svg.caption(probs)}</font>{left}'
    head = f'<font point-size="15"><b>{svg.escaped(title)}</b></font>{left}' if title else ""
    return f"<{head}{gap}{left}{caption}{gap}{left}>"


def _checked(tree: Tree, probs: ArrayLike | None) -> Probs:
    """Return ``probs`` as an array; raise TreeError unless it is one probability per node."""
    if probs is None:
        return None
    array = np.asarray(probs, dtype=np.float64)
    if array.shape != (tree.tree_size,):
        raise TreeError(f"probs has shape {array.shape}; the tree has {tree.tree_size} nodes")
    if not ((array >= 0) & (array <= 1)).all():
        raise TreeError("probs holds a value outside 0 to 1")
    return array
