"""Presets: the same text after a round trip, every refusal by name, and the shipped ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from treeopt.dynamic import DynamicTree
from treeopt.errors import PresetError, TreeoptError
from treeopt.preset import SCHEMA, Preset, load_preset, parse_preset, shipped_presets
from treeopt.replay import Interval
from treeopt.trace import RankTrace
from treeopt.tree import Tree

DATA = Path(__file__).parent / "data"
SHA256 = "0123456789abcdef" * 4

# FasterDecoding/Medusa at e2a5d20c, Apache-2.0: medusa/model/medusa_choices.py and
# assets/medusa_acc.csv.
CHOICES = json.loads((DATA / "medusa_choices.json").read_text())["choices"]
TOP_5 = json.loads((DATA / "medusa_figures.json").read_text())["cumulative_top_1_to_5"]

MEASURED = {
    "tree_size": 4,
    "acceptance_length": 2.31,
    "num_accepted_mean": 1.31,
    "overhead": 1.2,
    "overhead_low": 1.1,
    "overhead_high": 1.3,
    "speedup_vs_plain": 1.9,
    "speedup_vs_plain_low": 1.8,
    "speedup_vs_plain_high": 2.0,
    "speedup_vs_generate": 2.1,
    "speedup_vs_generate_low": 2.0,
    "speedup_vs_generate_high": 2.2,
    "tokens_per_s": 40.25,
    "plain_tokens_per_s": 21.0,
    "generate_tokens_per_s": 19.0,
    "equal": True,
    "first_mismatch": None,
    "near_ties": 1,
    "documents": 8,
    "tokens": 512,
    "device": "cpu",
    "dtype": "float32",
    "threads": 2,
    "data": "prompts.jsonl",
    "treeopt": "0.1.0",
    "torch": "2.6.0",
    "transformers": "4.57.0",
    "created": "2026-01-02T03:04:05Z",
}
FULL: dict[str, Any] = {
    "schema": SCHEMA,
    "name": "full",
    "backbone": {"id": "tiny", "sha256": SHA256},
    "heads": {"id": "tiny-heads", "sha256": SHA256, "num_heads": 4, "layout": "shared_lm_head"},
    "decoding": {"rule": "greedy"},
    "tree": {
        "tree_size": 4,
        "ladder": [[0], [0, 0], [1], [0, 1], [0, 0, 0]],
        "path_probs": [0.6, 0.4, 0.2, 0.1, 1.0e-05],
    },
    "sizes": [{"batch": 1, "context": 256, "tree_size": 4}],
    "cost": {
        "device": "cpu",
        "dtype": "float32",
        "threads": 2,
        "compiled": False,
        "measured": True,
    },
    "curve": [
        {
            "batch": 1,
            "context": 256,
            "tree_size": 4,
            "acceptance_length": 2.41,
            "low": 2.33,
            "high": 2.49,
            "step_ms": 40.0,
            "step_low_ms": 39.0,
            "step_high_ms": 42.5,
        }
    ],
    "calibration": {
        "sha256": SHA256,
        "data": "prompts.jsonl",
        "documents": 240,
        "positions": 30720,
        "num_ranks": 32,
        "template_sha256": SHA256,
        "data_sha256": SHA256,
        "max_new_tokens": 128,
    },
    "predicted": {
        "acceptance_length": 2.41,
        "low": 2.33,
        "high": 2.49,
        "method": "replay",
        "held_out": True,
    },
    "dynamic": {
        "gain": 0.031,
        "gain_low": 0.021,
        "gain_high": 0.041,
        "maps": [
            {"head": 1, "first_rank": 0, "probs": [0.1, 0.9], "chances": [0.05, 0.8]},
            {"head": 1, "first_rank": 1, "probs": [0.05], "chances": [0.1]},
            {"head": 2, "first_rank": 0, "probs": [0.1, 0.9], "chances": [0.05, 0.8]},
            {"head": 3, "first_rank": 0, "probs": [0.1, 0.9], "chances": [0.05, 0.8]},
        ],
    },
    "imported": {"source": "somewhere", "name": "x", "commit": "abc", "licence": "MIT"},
    "measured": [MEASURED],
    "provenance": {
        "treeopt": "0.1.0",
        "torch": "2.6.0",
        "transformers": "4.57.0",
        "command": "treeopt build",
        "seed": 0,
        "created": "2026-01-02T03:04:05Z",
    },
}
REMOVE = object()


def changed(*where: str | int, to: Any) -> str:
    """Return the full preset as YAML with one value set, or removed."""
    value = json.loads(json.dumps(FULL))
    section = value
    for key in where[:-1]:
        section = section[key]
    if to is REMOVE:
        del section[where[-1]]
    else:
        section[where[-1]] = to
    return yaml.safe_dump(value, sort_keys=False)


def refused(text: str, message: str) -> None:
    with pytest.raises(PresetError, match=rf"^mine\.yaml.*{message}") as caught:
        parse_preset(text, "mine.yaml")
    assert "\n" not in str(caught.value)


# Round trips.


def test_every_key_arrives() -> None:
    preset = parse_preset(yaml.safe_dump(FULL), "mine.yaml")
    assert preset.name == "full"
    assert preset.ladder == ((0,), (0, 0), (1,), (0, 1), (0, 0, 0))
    assert preset.path_probs == (0.6, 0.4, 0.2, 0.1, 1e-05)
    assert preset.tree_size == 4
    assert preset.tree == Tree.from_paths([(0,), (0, 0), (1,)])
    assert preset.node_probs == [1.0, 0.6, 0.2, 0.4]
    for key in ("backbone", "heads", "decoding", "calibration", "predicted", "imported"):
        assert getattr(preset, key) == FULL[key]
    assert preset.provenance == FULL["provenance"]
    assert (list(preset.sizes), list(preset.measured)) == (FULL["sizes"], FULL["measured"])
    assert preset.cost == FULL["cost"]
    (point,) = preset.curve
    assert point.as_row() == FULL["curve"][0]
    assert point.acceptance_length == Interval(2.41, 2.33, 2.49)
    assert point.step_ms == Interval(40.0, 39.0, 42.5)


def test_round_trip_keeps_every_byte() -> None:
    preset = parse_preset(yaml.safe_dump(FULL), "mine.yaml")
    text = preset.to_yaml()
    assert yaml.safe_load(text) == FULL
    assert list(yaml.safe_load(text)) == [
        *("schema", "name", "backbone", "heads", "decoding", "tree", "sizes"),
        *("cost", "curve", "calibration", "predicted", "dynamic", "imported", "measured"),
        "provenance",
    ]
    again = parse_preset(text, "mine.yaml")
    assert again == preset
    assert again.to_yaml() == text


def test_smallest_preset() -> None:
    preset = Preset("root", (), 1)
    assert yaml.safe_load(preset.to_yaml()) == {
        "schema": SCHEMA,
        "name": "root",
        "decoding": {"rule": "greedy"},
        "tree": {"tree_size": 1, "ladder": []},
    }
    assert parse_preset(preset.to_yaml(), "mine.yaml") == preset
    assert preset.tree.tree_size == 1
    assert preset.node_probs is None


PATHS = st.sets(st.lists(st.integers(0, 40), min_size=1, max_size=4).map(tuple), max_size=8).map(
    lambda paths: {path[:end] for path in paths for end in range(1, len(path) + 1)}
)


@given(PATHS, st.data())
def test_any_tree_survives_yaml(paths: set[tuple[int, ...]], data: st.DataObject) -> None:
    name = data.draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=10))
    size = data.draw(st.integers(1, len(paths) + 1))
    probs = data.draw(st.lists(st.floats(0, 1), min_size=len(paths), max_size=len(paths)))
    preset = Preset(name, Tree.from_paths(paths).paths[1:], size, tuple(probs))
    again = parse_preset(preset.to_yaml(), "mine.yaml")
    assert again == preset
    assert again.tree == preset.tree
    assert again.to_yaml() == preset.to_yaml()


def test_measured_results_are_appended() -> None:
    preset = Preset("a", ((0,),), 2)
    twice = preset.with_measured(MEASURED).with_measured({**MEASURED, "device": "cuda"})
    assert preset.measured == ()
    assert [row["device"] for row in twice.measured] == ["cpu", "cuda"]
    assert parse_preset(twice.to_yaml(), "mine.yaml") == twice


def test_save_and_load(tmp_path: Path) -> None:
    preset = parse_preset(yaml.safe_dump(FULL), "mine.yaml")
    preset.save(tmp_path / "new" / "mine.yaml")
    assert load_preset(tmp_path / "new" / "mine.yaml") == preset
    assert load_preset(str(tmp_path / "new" / "mine.yaml")) == preset


def test_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.yaml"
    Preset("old", ((0,),), 2).save(file)
    before = file.read_text()

    def full_disk(self: Path, text: str, encoding: str) -> None:
        self.write_bytes(text.encode()[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(TreeoptError, match=r"cannot write .*mine\.yaml: No space left on device"):
        Preset("new", ((1,),), 2).save(file)
    assert file.read_text() == before
    assert list(tmp_path.iterdir()) == [file]


# What the schema refuses.


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (("nmae",), r"the preset has an unknown key 'nmae'; did you mean name\?"),
        (("mesured",), r"unknown key 'mesured'; did you mean measured\?"),
        (("xyzzy",), "unknown key 'xyzzy'; known: schema, name, tree"),
        (("tree", "tree_sise"), r"tree has an unknown key 'tree_sise'; did you mean tree_size\?"),
        (("heads", "num_head"), r"heads has an unknown key .*did you mean num_heads\?"),
        (("backbone", "sha"), r"backbone has an unknown key 'sha'"),
        (("decoding", "warmth"), "decoding has an unknown key 'warmth'; known: rule"),
        (("calibration", "document"), r"calibration has .*did you mean documents\?"),
        (("predicted", "lo"), r"predicted has an unknown key 'lo'; did you mean low\?"),
        (("imported", "license"), r"imported has .*did you mean licence\?"),
        (("provenance", "create"), r"provenance has .*did you mean created\?"),
        (("cost", "thread"), r"cost has an unknown key 'thread'; did you mean threads\?"),
        (("curve", 0, "tokens_per_s"), r"curve\[0\] has an unknown key 'tokens_per_s'"),
        (("sizes", 0, "contexts"), r"sizes\[0\] has .*did you mean context\?"),
        (("measured", 0, "speedup"), r"measured\[0\] has an unknown key 'speedup'"),
    ],
)
def test_unknown_keys(where: tuple[str | int, ...], message: str) -> None:
    refused(changed(*where, to=1), message)


REQUIRED = [
    *(("schema",), ("name",), ("decoding",), ("tree",)),
    *(("tree", "tree_size"), ("tree", "ladder"), ("decoding", "rule")),
    *(("backbone", key) for key in FULL["backbone"]),
    *(("heads", key) for key in FULL["heads"]),
    *(("calibration", key) for key in ("sha256", "data", "documents", "positions", "num_ranks")),
    *(("cost", key) for key in ("compiled", "measured")),
    *(("curve", 0, key) for key in FULL["curve"][0]),
    *(("predicted", key) for key in ("acceptance_length", "method", "held_out")),
    *(("imported", key) for key in ("source", "name")),
    *(("provenance", key) for key in ("treeopt", "command", "seed", "created")),
    *(("sizes", 0, key) for key in FULL["sizes"][0]),
    *(("measured", 0, key) for key in MEASURED),
]
OPTIONAL = [
    *((key,) for key in ("backbone", "heads", "sizes", "calibration", "predicted", "imported")),
    *(("measured",), ("provenance",), ("tree", "path_probs"), ("calibration", "template_sha256")),
    *(("predicted", "low"), ("predicted", "high"), ("imported", "commit"), ("imported", "licence")),
    *(("provenance", "torch"), ("provenance", "transformers")),
    *(("calibration", "data_sha256"), ("calibration", "max_new_tokens"), ("cost",), ("curve",)),
    *(("cost", key) for key in ("device", "dtype", "threads")),
]


@pytest.mark.parametrize("where", REQUIRED, ids=str)
def test_missing_keys(where: tuple[str | int, ...]) -> None:
    section = {1: "the preset", 2: str(where[0]), 3: rf"{where[0]}\[0\]"}[len(where)]
    refused(changed(*where, to=REMOVE), f"{section} lacks the key '{where[-1]}'")


@pytest.mark.parametrize("where", OPTIONAL, ids=str)
def test_keys_that_may_be_absent(where: tuple[str, ...]) -> None:
    text = changed(*where, to=REMOVE)
    assert yaml.safe_load(parse_preset(text, "mine.yaml").to_yaml()) == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("schema",), "treeopt.preset/2", "schema cannot be 'treeopt.preset/2'"),
        (("name",), 7, "name cannot be 7"),
        (("tree",), [[0]], r"tree must be a mapping, not \[\[0\]\]"),
        (("tree", "tree_size"), "4", "tree: tree_size cannot be '4'"),
        (("tree", "tree_size"), 4.0, r"tree: tree_size cannot be 4\.0"),
        (("tree", "tree_size"), True, "tree: tree_size cannot be True"),
        (("tree", "tree_size"), -4, "tree: tree_size cannot be -4"),
        (("tree", "ladder"), {"0": [0]}, "tree: ladder cannot be"),
        (("tree", "ladder"), [0, 1], "tree: ladder cannot be"),
        (("tree", "path_probs"), [0.6, 0.4, 0.2, 0.1, 1.1], "tree: path_probs cannot be"),
        (("tree", "path_probs"), [0.6, 0.4, 0.2, 0.1, float("nan")], "path_probs cannot be"),
        (("tree", "path_probs"), [0.6, 0.4, 0.2, 0.1, "0"], "path_probs cannot be"),
        (("tree", "path_probs"), [0.6], "path_probs has 1 entries for 5 paths"),
        (("backbone",), "tiny", "backbone must be a mapping, not 'tiny'"),
        (("backbone",), None, "backbone must be a mapping, not None"),
        (("decoding",), None, "decoding must be a mapping, not None"),
        (("decoding", "rule"), 1, "decoding: rule cannot be 1"),
        (("heads", "num_heads"), 4.5, r"heads: num_heads cannot be 4\.5"),
        (("calibration", "positions"), "many", "calibration: positions cannot be 'many'"),
        (("predicted", "acceptance_length"), True, "acceptance_length cannot be True"),
        (("predicted", "held_out"), "yes", "predicted: held_out cannot be 'yes'"),
        (("sizes",), {"batch": 1}, "sizes must be a list, not {'batch': 1}"),
        (("sizes", 0), 64, r"sizes\[0\] must be a mapping, not 64"),
        (("curve",), {}, "curve must be a list, not {}"),
        (("curve", 0), [4, 2.41], r"curve\[0\] must be a mapping"),
        (("curve", 0, "step_ms"), 0, r"curve\[0\]: step_ms cannot be 0"),
        (("curve", 0, "low"), -1.5, r"curve\[0\]: low cannot be -1\.5"),
        (("curve", 0, "high"), float("inf"), r"curve\[0\]: high cannot be inf"),
        (("curve", 0, "step_low_ms"), 10**400, r"curve\[0\]: step_low_ms cannot be 1000"),
        (("cost", "measured"), "no", "cost: measured cannot be 'no'"),
        (("measured",), "none", "measured must be a list, not 'none'"),
        (("measured", 0, "equal"), 1, r"measured\[0\]: equal cannot be 1"),
        (("provenance", "created"), 2026, "provenance: created cannot be 2026"),
    ],
)
def test_wrong_types(where: tuple[str | int, ...], value: Any, message: str) -> None:
    refused(changed(*where, to=value), message)


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("tree", "tree_size"), 0, "tree_size is 0; the ladder allows 1 to 6"),
        (("tree", "tree_size"), 7, "tree_size is 7; the ladder allows 1 to 6"),
        (("tree", "ladder"), [[0], [0], [1], [2], [3]], r"ladder: path \[0\] appears twice"),
        (("tree", "ladder"), [[0], [1, 0], [2], [3], [4]], r"ladder: path \[1, 0\] has no parent"),
        (("tree", "ladder"), [[0], [], [2], [3], [4]], "ladder: the root's empty path is implied"),
        (("tree", "ladder"), [[0], [-1], [2], [3], [4]], r"path \[-1\] holds -1"),
        (("tree", "ladder"), [[0], [True], [2], [3], [4]], r"path \[True\] holds True"),
        (("tree", "ladder"), [[0], ["1"], [2], [3], [4]], "holds '1'"),
        (("tree", "ladder"), [[0], [[1]], [2], [3], [4]], r"holds \[1\]"),
        (
            ("tree", "ladder"),
            [[0, 0], [0], [1], [2], [3]],
            r"ladder is not parents-first: \[0, 0\] comes before \[0\]",
        ),
        (
            ("tree", "ladder"),  # beyond the cut, where another size would meet it
            [[0], [1], [2], [3, 0], [3]],
            r"ladder is not parents-first: \[3, 0\] comes before \[3\]",
        ),
        (("heads", "num_heads"), 2, "the ladder is 3 deep, heads.num_heads is 2"),
        (("calibration", "num_ranks"), 1, "uses rank 1, calibration.num_ranks is 1"),
    ],
)
def test_trees_that_do_not_fit(where: tuple[str, ...], value: Any, message: str) -> None:
    refused(changed(*where, to=value), message)


# What the loader refuses.

MINIMAL = """\
schema: treeopt.preset/1
name: a
decoding: {rule: greedy}
tree: {tree_size: 1, ladder: []}
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MINIMAL + "name: b\n", "is broken YAML at line 5: the key 'name' appears twice"),
        (MINIMAL + "'name': b\n", "the key 'name' appears twice"),
        (MINIMAL.replace("rule: greedy", "rule: x, rule: y"), "line 3: the key 'rule' appears"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "at line 2: aliases are not used"),
        ("a: &a {b: *a}\n", "at line 1: aliases are not used"),
        (
            "name: !!python/object/apply:os.getpid []\n",
            "at line 1: could not determine a construct",
        ),
        ("name: !!python/name:os.getpid\n", "at line 1: could not determine a constructor"),
        ("!mine {a: 1}\n", "at line 1: could not determine a constructor"),
        ("", "the preset must be a mapping, not None"),
        ("- a\n- b\n", r"the preset must be a mapping, not \['a', 'b'\]"),
        ("just words\n", "the preset must be a mapping, not 'just words'"),
        ("schema: treeopt.preset/1\nname: [a\ntree: 1\n", "is broken YAML at line 3: "),
        ("name: a\n\tb: c\n", "is broken YAML at line 2: "),
        (MINIMAL + "---\n" + MINIMAL, "is broken YAML at line 5: "),
        ("[" * 5000, "is broken YAML: maximum recursion depth"),
        ("{a: " * 5000, "is broken YAML: maximum recursion depth"),
        ("name: \x07\n", "is broken YAML: unacceptable character"),
        ("? [a, b]\n: 1\n", "is broken YAML at line 1: found unhashable key"),
        (MINIMAL + "1: 2\n", "the preset has an unknown key 1"),
        # Values that PyYAML's own constructors stumble over.
        (MINIMAL.replace("name: a", "name: 2026-13-45"), "is broken YAML: month must be"),
        (MINIMAL.replace("name: a", "name: !!int x"), "is broken YAML: invalid literal"),
        (MINIMAL.replace("name: a", "name: !!bool x"), "is broken YAML"),
        (MINIMAL.replace("name: a", "name: !!int ''"), "is broken YAML"),
        (MINIMAL.replace("name: a", "name: !!timestamp x"), "is broken YAML"),
        (MINIMAL.replace("size: 1", "size: " + "1" * 5000), "is broken YAML"),
        (MINIMAL.replace("[]", "[[" + "1" * 30 + "]]"), "ladder: .* a rank above"),
    ],
)
def test_hostile_and_broken_yaml(text: str, message: str) -> None:
    refused(text, message)


def test_minimal_text_is_accepted() -> None:
    assert parse_preset(MINIMAL, "mine.yaml") == Preset("a", (), 1)


def test_anchors_without_aliases_are_harmless() -> None:
    assert parse_preset(MINIMAL.replace("name: a", "name: &x a"), "mine.yaml").name == "a"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda file: None, "cannot read .*mine.yaml: No such file"),
        (lambda file: file.mkdir(), "cannot read .*mine.yaml: Is a directory"),
        (lambda file: file.write_bytes(b"name: \xff"), r"mine.yaml is not UTF-8 text \(byte 6\)"),
        (lambda file: file.write_text("a: ["), "mine.yaml is broken YAML at line"),
    ],
)
def test_files_that_are_refused(
    tmp_path: Path, make: Callable[[Path], object], message: str
) -> None:
    make(tmp_path / "mine.yaml")
    with pytest.raises(PresetError, match=message):
        load_preset(tmp_path / "mine.yaml")


# The shipped presets.

MEDUSA = {
    "mc_sim_7b_63": ("medusa-mc-sim-7b-63", "7b"),
    "vicuna_7b_stage1": ("medusa-vicuna-7b-stage1", "7b"),
    "vicuna_7b_stage1_ablation": ("medusa-vicuna-7b-stage1-ablation", "7b"),
    "vicuna_7b_stage2": ("medusa-vicuna-7b-stage2", None),
    "vicuna_13b_stage1": ("medusa-vicuna-13b-stage1", "13b"),
    "vicuna_13b_stage2": ("medusa-vicuna-13b-stage2", None),
    "vicuna_33b_stage1": ("medusa-vicuna-33b-stage1", "33b"),
    "vicuna_33b_stage2": ("medusa-vicuna-33b-stage2", None),
    "zephyr_stage2": ("medusa-zephyr-stage2", None),
}


def test_shipped_names() -> None:
    assert {name for name, _ in MEDUSA.values()} <= set(shipped_presets())
    assert set(MEDUSA) == set(CHOICES)


@pytest.mark.parametrize("name", shipped_presets())
def test_shipped_presets_load(name: str) -> None:
    preset = load_preset(name)
    assert preset.name == name
    assert preset.tree.tree_size == preset.tree_size
    assert preset.to_yaml() == shipped_presets()[name].read_text(encoding="utf-8")
    assert preset.provenance or preset.imported


@pytest.mark.parametrize("choice", CHOICES)
def test_medusa_presets_are_the_released_lists(choice: str) -> None:
    preset = load_preset(MEDUSA[choice][0])
    assert preset.tree_size == 64
    assert [list(path) for path in preset.ladder] == CHOICES[choice]["paths"]
    assert preset.imported == {
        "source": "FasterDecoding/Medusa medusa/model/medusa_choices.py",
        "name": choice,
        "commit": "e2a5d20c048a9b0a4092e6933c34313687422518",
        "licence": "Apache-2.0",
    }
    # Nothing was calibrated, decoded or measured here.
    assert (preset.calibration, preset.backbone, preset.heads) == (None, None, None)
    assert preset.measured == ()


@pytest.mark.parametrize("choice", CHOICES)
def test_medusa_predictions_follow_from_the_published_accuracies(choice: str) -> None:
    name, backbone = MEDUSA[choice]
    predicted = load_preset(name).predicted
    if backbone is None:  # no accuracies of its heads were published
        assert predicted is None
        return
    accepted = 0.0
    for path in CHOICES[choice]["paths"]:
        product = 1.0
        for head, rank in enumerate(path):
            top = [0.0, *TOP_5[backbone][head]]
            product *= top[rank + 1] - top[rank] if rank < 5 else 0.0
        accepted += product
    assert predicted is not None
    assert predicted["acceptance_length"] == pytest.approx(1 + accepted, abs=1e-5)
    assert predicted["held_out"] is False
    assert "independence" in predicted["method"]


@pytest.mark.parametrize(
    ("asked", "close"),
    [
        ("medusa-zephyr", "medusa-zephyr-stage2"),
        ("medusa-vicuna-7b-stage3", "medusa-vicuna-7b-stage"),
        ("qqqq", "medusa-mc-sim-7b-63"),
    ],
)
def test_unknown_name(asked: str, close: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    message = f"no preset file or shipped preset {asked}; did you mean .*{close}"
    with pytest.raises(PresetError, match=message):
        load_preset(asked)


def test_a_changed_preset_is_checked_again() -> None:
    preset = load_preset("medusa-zephyr-stage2")
    assert replace(preset, tree_size=2).tree == Tree.from_paths([(0,)])
    with pytest.raises(PresetError, match="tree_size is 65; the ladder allows 1 to 64"):
        replace(preset, tree_size=65)


def test_point_is_that_of_the_nearest_context() -> None:
    row = FULL["curve"][0]
    rows = [{**row, "context": context, "batch": batch} for batch, context in
            ((1, 256), (1, 1024), (4, 256))]  # fmt: skip
    preset = parse_preset(changed("curve", to=rows), "mine.yaml")
    for context, nearest in ((0, 256), (639, 256), (641, 1024), (9999, 1024)):
        point = preset.point(4, 1, context)
        assert point is not None
        assert (point.batch, point.context) == (1, nearest)
    assert preset.point(8, 1, 256) is None
    assert preset.point(4, 2, 256) is None


def test_calibrations_of_other_models_are_refused(make_trace: Callable[..., RankTrace]) -> None:
    preset = parse_preset(yaml.safe_dump(FULL), "mine.yaml")
    same = {"backbone_sha256": SHA256, "heads_sha256": SHA256}
    preset.check_models_of(make_trace([[[0]] * 3], **same))
    for name in ("backbone", "heads"):
        other = make_trace([[[0]] * 3], **same | {name: "others", f"{name}_sha256": "f" * 64})
        with pytest.raises(PresetError) as caught:
            preset.check_models_of(other)
        ours = {"backbone": "tiny", "heads": "tiny-heads"}[name]
        assert str(caught.value) == (
            f"full was built for {name} {ours} (sha256 01234567), the calibration for others "
            "(ffffffff)"
        )
        Preset("list", ((0,),), 2).check_models_of(other)  # a published tree names no models


# Dynamic trees.


def test_a_dynamic_preset_drafts_from_its_whole_ladder() -> None:
    preset = parse_preset(yaml.safe_dump(FULL), "mine.yaml")
    assert isinstance(preset.draft_tree, DynamicTree)
    assert preset.draft_tree.universe == Tree.from_paths(preset.ladder)
    assert preset.draft_tree.tree_size == preset.tree.tree_size == 4
    assert preset.describe_dynamic() == (
        "each step chooses its 4 rows from 6, +0.031 [+0.021, +0.041] tokens a step over the "
        "static tree"
    )


def test_where_nothing_is_drafted_nothing_is_chosen() -> None:
    preset = parse_preset(changed("tree", "tree_size", to=1), "mine.yaml")
    assert preset.draft_tree is preset.tree


def test_without_the_section_the_static_tree_drafts() -> None:
    preset = parse_preset(changed("dynamic", to=REMOVE), "mine.yaml")
    assert preset.draft_tree is preset.tree
    assert preset.describe_dynamic() == ""
    assert "dynamic" not in preset.to_yaml()


@pytest.mark.parametrize(
    ("where", "to", "message"),
    [
        (("dynamic",), [], "dynamic must be a mapping, not \\[\\]"),
        (("dynamic", "maps"), REMOVE, "dynamic lacks the key 'maps'"),
        (("dynamic", "map"), [], "unknown key 'map'; did you mean maps"),
        (("dynamic", "maps"), 3, "dynamic.maps must be a list, not 3"),
        (("dynamic", "gain"), "much", "dynamic: gain cannot be 'much'"),
        (("dynamic", "maps", 1), 0.5, r"dynamic.maps\[1\] must be a mapping, not 0.5"),
        (("dynamic", "maps", 0, "head"), -1, r"dynamic.maps\[0\]: head cannot be -1"),
        (("dynamic", "maps", 0, "probs"), [0.1, 1.5], r"maps\[0\]: probs cannot be \[0.1, 1.5\]"),
        (("dynamic", "maps", 0, "probs"), [0.1, "x"], r"maps\[0\]: probs cannot be"),
        (("dynamic", "maps", 0, "chances"), REMOVE, r"maps\[0\] lacks the key 'chances'"),
        (("dynamic", "maps", 0, "chances"), [0.8, 0.05], "dynamic: .*head 1, rank 0.*not fall"),
        (("dynamic", "maps", 0, "chances"), [0.8], "dynamic: .*2 probs and 1 chances"),
        (("dynamic", "maps", 0, "chances"), [0.0, 0.8], "dynamic: .*holds 0.0"),
        (("dynamic", "maps", 0, "head"), 2, "dynamic: maps must be ordered by head"),
        (("dynamic", "maps"), [], "dynamic: there is no map of head 1, rank 0"),
        (("dynamic", "maps", 3), REMOVE, "dynamic: there is no map of head 3, rank 0"),
    ],
)
def test_dynamic_sections_that_cannot_be(where: Any, to: Any, message: str) -> None:
    refused(changed(*where, to=to), message)
