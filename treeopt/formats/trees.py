"""Trees as other projects write them: lists of paths below an implied root.

Medusa, Hydra, EAGLE-1 and Spec-Bench keep Python literals; TensorRT-LLM (up to 1.2) and RTP-LLM
take the same list as JSON. All leave the root out, so 63 paths are a tree of 64 rows.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
from pathlib import Path

from treeopt.errors import PresetError, TreeError, TreeoptError
from treeopt.files import read_text
from treeopt.preset import Preset, load_preset
from treeopt.tree import Path as TreePath
from treeopt.tree import Tree


def read_tree(path: str | Path) -> Preset:
    """Return a preset file as it is, or a list of paths (JSON or Python literal) as a preset.

    The order of a list is kept as the ladder when every path follows its parent, as in all
    released trees; otherwise paths are taken by depth.

    Raises:
        TreeoptError: unreadable, or not a tree.
    """
    source = Path(path)
    if source.suffix in (".yaml", ".yml"):
        return load_preset(source)
    text = read_text(source, TreeError)
    value = _literal(text, source)
    if isinstance(value, dict):
        value = value.get("paths", value.get("tree_choices"))
    if not isinstance(value, list) or not all(isinstance(p, (list, tuple)) for p in value):
        raise TreeError(f"{source} must hold a list of paths such as [[0], [0, 0], [1]]")
    tree = Tree.from_paths(value)
    listed = tuple(tuple(path) for path in value)
    ladder = listed if _is_parents_first(listed) else tree.paths[1:]
    return Preset(
        name=source.stem,
        ladder=ladder,
        tree_size=len(ladder) + 1,
        imported={"source": str(source), "name": source.stem},
    )


def to_json(preset: Preset) -> str:
    """Return the tree as a JSON list of paths."""
    return json.dumps(_paths(preset), separators=(",", ":")) + "\n"


def to_python(preset: Preset) -> str:
    """Return the tree as the Python literal that Medusa's code base calls a choice."""
    name = re.sub(r"\W", "_", preset.name, flags=re.ASCII)
    if not name.isidentifier() or keyword.iskeyword(name):
        name = f"tree_{name}"
    return f"{name} = {[tuple(path) for path in _paths(preset)]}\n"


WRITERS = {"json": to_json, "medusa": to_python, "preset": Preset.to_yaml}


def write_tree(preset: Preset, format_name: str) -> str:
    """Return ``preset`` in one of the formats of ``WRITERS``."""
    if format_name not in WRITERS:
        known = ", ".join(WRITERS)
        raise TreeoptError(f"unknown format {format_name!r}; known: {known}")
    return WRITERS[format_name](preset)


def _paths(preset: Preset) -> list[list[int]]:
    return [list(path) for path in preset.ladder[: preset.tree_size - 1]]


def _literal(text: str, source: Path) -> object:
    """Return the JSON value or Python literal in ``text``, an assignment's right side included."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        body = ast.parse(text.strip()).body
        if len(body) == 1 and isinstance(body[0], (ast.Assign, ast.Expr)):
            return ast.literal_eval(body[0].value)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        pass
    raise PresetError(f"{source} is neither JSON nor one Python literal")


def _is_parents_first(paths: tuple[TreePath, ...]) -> bool:
    seen: set[TreePath] = {()}
    for path in paths:
        if path[:-1] not in seen:
            return False
        seen.add(path)
    return True
