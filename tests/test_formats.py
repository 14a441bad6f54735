"""Trees as other projects write them, there and back."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeopt.errors import PresetError, TreeError, TreeoptError
from treeopt.formats.trees import WRITERS, read_tree, write_tree
from treeopt.preset import Preset, load_preset, parse_preset, shipped_presets
from treeopt.tree import Tree

TreePath = tuple[int, ...]

LADDER = ((0,), (0, 0), (1,), (0, 1), (0, 0, 0))  # parents first, and not by depth
PRESET = Preset("mine", LADDER, 6)


def reading(tmp_path: Path, text: str, name: str = "tree.json") -> Preset:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return read_tree(tmp_path / name)


@pytest.mark.parametrize(
    "text",
    [
        "[[0], [0, 0], [1], [0, 1], [0, 0, 0]]",
        "[(0,), (0, 0), (1,), (0, 1), (0, 0, 0)]",
        "[[0], (0, 0), [1], (0, 1), [0, 0, 0],]  # a comment",
        "mc_sim = [(0,), (0, 0), (1,), (0, 1), (0, 0, 0)]",
        "\n\nmc_sim = [\n    [0], [0, 0], [1],\n    [0, 1], [0, 0, 0],\n]\n",
        '{"paths": [[0], [0, 0], [1], [0, 1], [0, 0, 0]], "name": "x"}',
        '{"tree_choices": [[0], [0, 0], [1], [0, 1], [0, 0, 0]]}',
    ],
    ids=["json", "tuples", "mixed", "assignment", "many lines", "paths", "tree_choices"],
)
def test_ways_to_write_one_tree(tmp_path: Path, text: str) -> None:
    preset = reading(tmp_path, text, "some.py")
    assert preset.ladder == LADDER
    assert preset.tree_size == 6
    assert preset.name == "some"
    assert preset.imported == {"source": str(tmp_path / "some.py"), "name": "some"}
    assert parse_preset(preset.to_yaml(), "mine.yaml") == preset


def test_a_list_that_names_children_first_is_taken_by_depth(tmp_path: Path) -> None:
    preset = reading(tmp_path, "[[0, 0, 0], [1], [0, 1], [0], [0, 0]]")
    assert preset.ladder == ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))


def test_the_root_alone(tmp_path: Path) -> None:
    assert reading(tmp_path, "[]").tree == Tree.from_paths([])


def test_a_preset_is_read_as_it_is(tmp_path: Path) -> None:
    preset = Preset("mine", LADDER, 3, path_probs=(0.6, 0.5, 0.2, 0.1, 0.1))
    for name in ("mine.yaml", "mine.yml"):
        preset.save(tmp_path / name)
        assert read_tree(str(tmp_path / name)) == preset


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ('"words"', TreeError, r"must hold a list of paths such as \[\[0\], \[0, 0\], \[1\]\]"),
        ("5", TreeError, "must hold a list of paths"),
        ("[0, 1]", TreeError, "must hold a list of paths"),
        ("[[0], 1]", TreeError, "must hold a list of paths"),
        ('["00"]', TreeError, "must hold a list of paths"),
        ('{"choices": [[0]]}', TreeError, "must hold a list of paths"),
        ("{(0,)}", TreeError, "must hold a list of paths"),
        ("[[0], [1, 0]]", TreeError, r"path \[1, 0\] has no parent"),
        ("[[0], [0]]", TreeError, r"path \[0\] appears twice"),
        ("[[]]", TreeError, "the root's empty path is implied"),
        ("[[0.0]]", TreeError, "ranks are whole numbers"),
        ("[[true]]", TreeError, "ranks are whole numbers"),
        ("[[-1]]", TreeError, "ranks are whole numbers"),
        ("[['0']]", TreeError, "ranks are whole numbers"),
        ("[[[0]]]", TreeError, "ranks are whole numbers"),
        ("[[1000000000000000000000000000000]]", TreeError, "a rank above"),
        ("", PresetError, "is neither JSON nor one Python literal"),
        ("[[0],", PresetError, "is neither JSON nor one Python literal"),
        ("[[i] for i in range(3)]", PresetError, "is neither JSON nor one Python literal"),
        ("x = list(range(3))", PresetError, "is neither JSON nor one Python literal"),
        ("a = [[0]]\nb = [[1]]", PresetError, "is neither JSON nor one Python literal"),
        ("import os", PresetError, "is neither JSON nor one Python literal"),
        ("{[]: 1}", PresetError, "is neither JSON nor one Python literal"),
        ("[" * 100_000, PresetError, "is neither JSON nor one Python literal"),
        ("[[" + "1" * 5000 + "]]", PresetError, "is neither JSON nor one Python literal"),
        ("[[0]]\0", PresetError, "is neither JSON nor one Python literal"),
    ],
)
def test_refused_text(tmp_path: Path, text: str, error: type[TreeoptError], message: str) -> None:
    with pytest.raises(error, match=message):
        reading(tmp_path, text)


def test_code_is_never_run(tmp_path: Path) -> None:
    target = tmp_path / "made"
    with pytest.raises(PresetError, match="neither JSON nor one Python literal"):
        reading(tmp_path, f"x = [[open({str(target)!r}, 'w').write('x')]]", "evil.py")
    assert not target.exists()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda file: None, TreeError, "cannot read .*tree.json: No such file"),
        (lambda file: file.mkdir(), TreeError, "cannot read .*tree.json: Is a directory"),
        (lambda file: file.write_bytes(b"[[0]]\xff"), TreeError, r"not UTF-8 text \(byte 5\)"),
    ],
)
def test_unreadable_files(
    tmp_path: Path, make: Callable[[Path], object], error: type[TreeoptError], message: str
) -> None:
    make(tmp_path / "tree.json")
    with pytest.raises(error, match=message):
        read_tree(tmp_path / "tree.json")


# Writing.


def test_what_is_written() -> None:
    cut = Preset("my-tree", LADDER, 4)
    assert write_tree(cut, "json") == "[[0],[0,0],[1]]\n"
    assert write_tree(cut, "medusa") == "my_tree = [(0,), (0, 0), (1,)]\n"
    assert write_tree(cut, "preset") == cut.to_yaml()


def test_unknown_format() -> None:
    with pytest.raises(TreeoptError, match="unknown format 'toml'; known: json, medusa, preset"):
        write_tree(PRESET, "toml")


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("mine", "mine"),
        ("vicuna-7b stage.1", "vicuna_7b_stage_1"),
        ("7b", "tree_7b"),
        ("class", "tree_class"),
        ("", "tree_"),
        ("x²", "x_"),
        ("été", "_t_"),
    ],
)
def test_name_becomes_a_variable(tmp_path: Path, name: str, variable: str) -> None:
    text = write_tree(Preset(name, LADDER, 6), "medusa")
    assert text.startswith(f"{variable} = [")
    assert isinstance(ast.parse(text).body[0], ast.Assign)
    assert reading(tmp_path, text, "tree.py").ladder == LADDER


PATHS = st.sets(st.lists(st.integers(0, 12), min_size=1, max_size=4).map(tuple), max_size=8).map(
    lambda paths: {path[:end] for path in paths for end in range(1, len(path) + 1)}
)


@pytest.mark.parametrize(("format_name", "suffix"), [("json", "json"), ("medusa", "py")])
@given(paths=PATHS, data=st.data())
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory,
    format_name: str,
    suffix: str,
    paths: set[TreePath],
    data: st.DataObject,
) -> None:
    ladder = tuple(sorted(paths))  # parents first, though not by depth
    preset = Preset("any", ladder, data.draw(st.integers(1, len(ladder) + 1)))
    folder = tmp_path_factory.mktemp("trees")
    again = reading(folder, write_tree(preset, format_name), f"any.{suffix}")
    assert again.ladder == ladder[: preset.tree_size - 1]
    assert again.tree == preset.tree
    assert write_tree(again, format_name) == write_tree(preset, format_name)


@pytest.mark.parametrize("name", [name for name in shipped_presets() if name.startswith("medusa-")])
def test_medusa_presets_go_out_and_come_back(tmp_path: Path, name: str) -> None:
    preset = load_preset(name)
    text = write_tree(preset, "medusa")
    assert text.startswith(name.replace("-", "_") + " = [(0,), ")
    assert reading(tmp_path, text, f"{name}.py").ladder == preset.ladder
    assert json.loads(write_tree(preset, "json")) == [list(path) for path in preset.ladder]
    assert set(WRITERS) == {"json", "medusa", "preset"}
