"""A tree as SVG, laid out and drawn with the standard library and numpy alone.

Also what every picture of a tree shares: the look of a node, its label, the caption.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treeopt.tree import ROOT, Tree

Probs = NDArray[np.float64] | None

FONT = "Helvetica,Arial,sans-serif"
INK, MUTED, LINE = "#1b2733", "#52606d", "#8798a8"

_UNLIKELY, _LIKELY = (242, 246, 251), (12, 74, 130)  # fills at probability 0 and 1
_COLUMN, _ROW, _BOX_WIDTH, _BOX_HEIGHT, _MARGIN = 148, 27, 92, 22, 20  # pixels


class Look(NamedTuple):
    """How a node is drawn: colour of its box and text, width of the line that leads to it."""

    fill: str
    ink: str
    line_width: str


def look(probs: Probs, node: int) -> Look:
    """Return a darker box and a thicker line the more probable the node's path is.

    They follow the square root of the probability, which sets apart the many small ones.
    """
    strength = 0.15 if probs is None else float(probs[node]) ** 0.5
    channels = zip(_UNLIKELY, _LIKELY, strict=True)
    fill = [round(light + strength * (dark - light)) for light, dark in channels]
    ink = "black" if strength < 0.72 else "white"  # contrast at least 4.5 : 1 on every fill
    return Look("#{:02x}{:02x}{:02x}".format(*fill), ink, f"{0.8 + 3.2 * strength:.2f}")


def label(tree: Tree, probs: Probs, node: int) -> str:
    """Return ``root``, or the rank and the path probability: ``0 · 60.0 %``."""
    if node == ROOT:
        return "root"
    rank = str(tree.ranks[node])
    return rank if probs is None else f"{rank} · {percent(probs[node])}"


def caption(probs: Probs) -> str:
    """Return the line that says how to read the labels, escaped."""
    what = "" if probs is None else " · probability that the whole path is right"
    return escaped(f"in each box: rank in the head's list{what}")


def percent(prob: float) -> str:
    """Return a probability with one decimal: ``60.0 %``."""
    return f"{100 * prob:.1f} %"


def escaped(text: str) -> str:
    """Return text that XML takes as text: markup escaped, control characters dropped."""
    return escape("".join(char for char in text if char.isprintable()))


def depth_first(tree: Tree) -> list[int]:
    """Return the nodes in reading order: a node, then all below it, siblings by rank."""
    return sorted(range(tree.tree_size), key=tree.paths.__getitem__)


def tidy_svg(tree: Tree, probs: Probs = None, title: str | None = None) -> str:
    """Return an SVG that draws the tree from left to right, one column per head."""
    top = _MARGIN + (26 if title else 0)
    xs = _MARGIN + _COLUMN * tree.depths
    ys = top + 58 + _ROW * _rows(tree)
    text_width = max(480, 10 * len(title or ""))  # the caption's; SVG cannot measure text
    width, height = _MARGIN + max(int(xs.max()) + _BOX_WIDTH, text_width), int(ys.max()) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="{FONT}" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    if title:
        bold = f'font-size="16" font-weight="bold" fill="{INK}"'
        parts.append(f'<text x="{_MARGIN}" y="{_MARGIN + 10}" {bold}>{escaped(title)}</text>')
    parts.append(f'<text x="{_MARGIN}" y="{top + 8}" fill="{MUTED}">{caption(probs)}</text>')
    for depth in range(1, tree.depth + 1):
        parts.append(_text_over_box(_MARGIN + _COLUMN * depth, top + 36, MUTED, f"head {depth}"))
    parts.extend(_lines(tree, probs, xs, ys))
    for node in range(tree.tree_size):
        fill, ink, _ = look(probs, node)
        parts.append(
            f'<rect x="{xs[node]}" y="{ys[node] - _BOX_HEIGHT / 2}" width="{_BOX_WIDTH}" '
            f'height="{_BOX_HEIGHT}" rx="6" fill="{fill}" stroke="{LINE}"/>'
        )
        parts.append(_text_over_box(xs[node], ys[node] + 4, ink, label(tree, probs, node)))
    return "\n".join([*parts, "</svg>\n"])


def _rows(tree: Tree) -> NDArray[np.float64]:
    """Return float64 [N]: leaves on rows 0, 1, … in reading order, parents midway."""
    leaves = [node for node in depth_first(tree) if node in tree.leaves]
    rows = np.zeros(tree.tree_size)
    rows[leaves] = np.arange(len(leaves))
    for node in range(tree.tree_size - 1, -1, -1):  # children come after their parents
        children = np.flatnonzero(tree.parents == node)
        if len(children):
            rows[node] = (rows[children[0]] + rows[children[-1]]) / 2
    return rows


def _lines(
    tree: Tree, probs: Probs, xs: NDArray[np.int64], ys: NDArray[np.float64]
) -> Iterator[str]:
    """Yield a curve from every parent's right side to its child's left side."""
    for node in range(1, tree.tree_size):
        parent = tree.parents[node]
        x, y, end_x, end_y = xs[parent] + _BOX_WIDTH, ys[parent], xs[node], ys[node]
        bend = (x + end_x) / 2
        yield (
            f'<path d="M{x},{y} C{bend},{y} {bend},{end_y} {end_x},{end_y}" fill="none" '
            f'stroke="{LINE}" stroke-width="{look(probs, node).line_width}"/>'
        )


def _text_over_box(box_x: int, y: float, ink: str, text: str) -> str:
    x = box_x + _BOX_WIDTH / 2
    return f'<text x="{x}" y="{y}" text-anchor="middle" fill="{ink}">{text}</text>'
