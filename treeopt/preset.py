"""Presets: a ladder of trees with where it came from, what it promises and what was measured.

YAML, schema ``treeopt.preset/1``. Loading is safe: a preset from a stranger can at worst be
refused. Unknown keys are errors, so a mistyped key cannot be ignored.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from treeopt.curve import NO_SPECULATION, SizePoint
from treeopt.dynamic import ChanceMap, DynamicTree
from treeopt.errors import PresetError, TableError, TreeError
from treeopt.files import read_text, write_text
from treeopt.trace import RankTrace
from treeopt.tree import Path as TreePath
from treeopt.tree import Tree

SCHEMA = "treeopt.preset/1"

Section = dict[str, Any]
Check = Callable[[Any], bool]

_TEXT: Check = lambda value: isinstance(value, str)  # noqa: E731
_COUNT: Check = lambda value: type(value) is int and value >= 0  # noqa: E731
_NUMBER: Check = lambda value: type(value) in (int, float)  # noqa: E731
_POSITIVE: Check = lambda value: _NUMBER(value) and 1e-9 < value < 1e9  # noqa: E731
_BOOL: Check = lambda value: isinstance(value, bool)  # noqa: E731
_ANY: Check = lambda value: True  # noqa: E731

# Key -> what its value must be. A key that ends in "?" may be absent.
_SECTIONS: dict[str, dict[str, Check]] = {
    "backbone": {"id": _TEXT, "sha256": _TEXT, "tuned_from?": _TEXT},
    "heads": {"id": _TEXT, "sha256": _TEXT, "num_heads": _COUNT, "layout": _TEXT},
    "decoding": {
        "rule": _TEXT,
        **{f"{name}?": _NUMBER for name in ("temperature", "top_p", "top_k", "epsilon", "delta")},
        "candidates?": _TEXT,
    },
    "calibration": {
        "sha256": _TEXT,
        "data": _TEXT,
        "documents": _COUNT,
        "positions": _COUNT,
        "num_ranks": _COUNT,
        "template_sha256?": _TEXT,
        "data_sha256?": _TEXT,
        "max_new_tokens?": _COUNT,
    },
    "cost": {
        "device?": _TEXT,
        "dtype?": _TEXT,
        "threads?": _COUNT,
        "compiled": _BOOL,
        "measured": _BOOL,
    },
    "predicted": {
        "acceptance_length": _NUMBER,
        "low?": _NUMBER,
        "high?": _NUMBER,
        "method": _TEXT,
        "held_out": _BOOL,
    },
    "dynamic": {
        "maps": _ANY,
        "gain?": _NUMBER,
        "gain_low?": _NUMBER,
        "gain_high?": _NUMBER,
    },
    "imported": {"source": _TEXT, "name": _TEXT, "commit?": _TEXT, "licence?": _TEXT},
    "provenance": {
        "treeopt": _TEXT,
        "torch?": _TEXT,
        "transformers?": _TEXT,
        "command": _TEXT,
        "seed": _COUNT,
        "created": _TEXT,
    },
}
_MAP: dict[str, Check] = {
    "head": _COUNT,
    "first_rank": _COUNT,
    "probs": lambda value: _is_probs(value),
    "chances": lambda value: _is_probs(value),
}
_SIZE: dict[str, Check] = {
    "batch": _COUNT,
    "context": _COUNT,
    "tree_size": _COUNT,
    "modelled?": _TEXT,  # the device whose step times were modelled, not measured
}
_POINT: dict[str, Check] = {
    "batch": _COUNT,
    "context": _COUNT,
    "tree_size": _COUNT,
    **{
        key: _POSITIVE
        for key in ("acceptance_length", "low", "high", "step_ms", "step_low_ms", "step_high_ms")
    },
}
_MEASURED: dict[str, Check] = {
    "tree_size": _COUNT,
    "acceptance_length": _NUMBER,
    "num_accepted_mean": _NUMBER,
    **{
        f"{ratio}{bound}": _NUMBER
        for ratio in ("overhead", "speedup_vs_plain", "speedup_vs_generate")
        for bound in ("", "_low", "_high")
    },
    "tokens_per_s": _NUMBER,
    "plain_tokens_per_s": _NUMBER,
    "generate_tokens_per_s": _NUMBER,
    "equal": _BOOL,
    "first_mismatch": _ANY,
    "near_ties": _COUNT,
    "documents": _COUNT,
    "tokens": _COUNT,
    "device": _TEXT,
    "dtype": _TEXT,
    "threads": _COUNT,
    "data": _TEXT,
    "treeopt": _TEXT,
    "torch": _TEXT,
    "transformers": _TEXT,
    "created": _TEXT,
}
_LISTS = {"sizes": _SIZE, "curve": _POINT, "measured": _MEASURED}


@dataclass(frozen=True)
class Preset:
    """A ladder of trees and the size to use.

    ladder: paths below the root in best-first order; ``tree`` is the first ``tree_size - 1``.
    path_probs: the acceptance model's probability of each path on the ladder.
    sizes: the cut table, ``{batch, context, tree_size}`` per measured situation.
    curve: what each measured size gives; ``cost``: the machine it was measured on.
    dynamic: set when each step chooses ``tree_size`` nodes from the whole ladder, by these maps
        from the heads' probabilities to chances; ``gain`` is the replayed acceptance length that
        this adds to ``tree``'s. ``predicted`` and ``measured`` are then of the dynamic tree.
    imported: set when another project published the tree.
    The other sections are as the schema names them; ``None`` where unknown.
    """

    name: str
    ladder: tuple[TreePath, ...]
    tree_size: int
    path_probs: tuple[float, ...] | None = None
    decoding: Section = field(default_factory=lambda: {"rule": "greedy"})
    backbone: Section | None = None
    heads: Section | None = None
    sizes: tuple[Section, ...] = ()
    curve: tuple[SizePoint, ...] = ()
    cost: Section | None = None
    calibration: Section | None = None
    predicted: Section | None = None
    dynamic: Section | None = None
    imported: Section | None = None
    measured: tuple[Section, ...] = ()
    provenance: Section | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.tree_size <= len(self.ladder) + 1:
            raise PresetError(
                f"tree_size is {self.tree_size}; the ladder allows 1 to {len(self.ladder) + 1}"
            )
        try:
            whole = Tree.from_paths(self.ladder)
        except TreeError as error:
            raise PresetError(f"ladder: {error}") from error
        _check_parents_first(self.ladder)
        if self.path_probs is not None and len(self.path_probs) != len(self.ladder):
            raise PresetError(
                f"path_probs has {len(self.path_probs)} entries for {len(self.ladder)} paths"
            )
        if self.heads and whole.depth > self.heads["num_heads"]:
            raise PresetError(
                f"the ladder is {whole.depth} deep, heads.num_heads is {self.heads['num_heads']}"
            )
        if self.calibration and whole.num_ranks > self.calibration["num_ranks"]:
            raise PresetError(
                f"the ladder uses rank {whole.num_ranks - 1}, calibration.num_ranks is "
                f"{self.calibration['num_ranks']}"
            )
        try:
            self.draft_tree  # noqa: B018
        except TableError as error:
            raise PresetError(f"dynamic: {error}") from error

    @cached_property
    def tree(self) -> Tree:
        """The tree that ``tree_size`` cuts from the ladder."""
        return Tree.from_paths(self.ladder[: self.tree_size - 1])

    @cached_property
    def draft_tree(self) -> Tree | DynamicTree:
        """What each step drafts: ``tree``, or the likeliest nodes of the ladder where dynamic."""
        if self.dynamic is None:
            return self.tree
        maps = tuple(ChanceMap(**row) for row in self.dynamic["maps"])
        tree = DynamicTree(Tree.from_paths(self.ladder), self.tree_size, maps)
        return self.tree if self.tree_size == NO_SPECULATION else tree

    @property
    def node_probs(self) -> list[float] | None:
        """Return the path probability of each node of ``tree``, in node order, when known."""
        if self.path_probs is None:
            return None
        prob_of = dict(zip(self.ladder, self.path_probs, strict=True))
        return [prob_of.get(path, 1.0) for path in self.tree.paths]

    def describe_backbone(self) -> str | None:
        """Return what the backbone is, where known, and whether it is lossy."""
        if not self.backbone:
            return None
        name = self.backbone["id"]
        origin = self.backbone.get("tuned_from")
        return f"{name} (tuned, lossy with respect to {origin})" if origin else name

    def describe_rule(self) -> str:
        """Return the acceptance rule with its options, and whether it is lossy."""
        options = [f"{key} {value}" for key, value in self.decoding.items() if key != "rule"]
        text = ", ".join([self.decoding["rule"], *options])
        lossy = self.decoding["rule"] == "typical"
        return f"{text} (lossy: answers differ from the backbone's own)" if lossy else text

    def describe_dynamic(self) -> str:
        """Return what a dynamic tree chooses from and gains; empty where the tree is static."""
        if self.dynamic is None:
            return ""
        text = f"each step chooses its {self.tree_size} rows from {len(self.ladder) + 1}"
        if "gain" not in self.dynamic:
            return text
        gain, low, high = (self.dynamic[f"gain{bound}"] for bound in ("", "_low", "_high"))
        return f"{text}, {gain:+.3f} [{low:+.3f}, {high:+.3f}] tokens a step over the static tree"

    def describe_sizes(self) -> list[str]:
        """Return the cut table, a text per situation; sizes that were modelled say so."""
        return [
            f"batch {row['batch']}, context {row['context']}: {describe_size(row['tree_size'])}"
            + (f" (modelled for {row['modelled']})" if "modelled" in row else "")
            for row in self.sizes
        ]

    def describe_cost(self) -> str:
        """Return the machine that the curve speaks of."""
        cost = self.cost or {}
        known = [cost.get("device", "an unknown machine"), cost.get("dtype", "")]
        if "threads" in cost:
            known.append(f"{cost['threads']} threads")
        known.append("compiled" if cost.get("compiled") else "")
        known.append("" if cost.get("measured", True) else "modelled, not measured")
        return ", ".join(text for text in known if text)

    def point(self, tree_size: int, batch: int, context: float) -> SizePoint | None:
        """Return the curve's point of a size at this batch and the nearest context, if any."""
        points = [p for p in self.curve if (p.batch, p.tree_size) == (batch, tree_size)]
        return min(points, key=lambda point: abs(point.context - context), default=None)

    def check_models_of(self, trace: RankTrace) -> None:
        """Raise PresetError when ``trace`` was made with another backbone or heads than this.

        What only one of the two names is not compared.
        """
        for name in ("backbone", "heads"):
            ours: Section = getattr(self, name) or {}
            found, wanted = ours.get("sha256"), trace.provenance.get(f"{name}_sha256")
            if None not in (found, wanted) and found != wanted:
                raise PresetError(
                    f"{self.name} was built for {name} {ours['id']} (sha256 {str(found)[:8]}), the "
                    f"calibration for {trace.provenance.get(name)} ({str(wanted)[:8]})"
                )

    def with_measured(self, measured: Section) -> Preset:
        """Return the preset with one more validation result."""
        return replace(self, measured=(*self.measured, measured))

    def save(self, path: str | Path) -> None:
        """Write the preset as YAML, whole or not at all."""
        write_text(path, self.to_yaml())

    def to_yaml(self) -> str:
        """Return the preset as YAML; equal presets give equal text."""
        value: Section = {"schema": SCHEMA, "name": self.name}
        for key in ("backbone", "heads", "decoding"):
            value[key] = getattr(self, key)
        value["tree"] = {"tree_size": self.tree_size, "ladder": [list(p) for p in self.ladder]}
        if self.path_probs is not None:
            value["tree"]["path_probs"] = list(self.path_probs)
        value["sizes"], value["cost"] = list(self.sizes), self.cost
        value["curve"] = [point.as_row() for point in self.curve]
        for key in ("calibration", "predicted", "dynamic", "imported"):
            value[key] = getattr(self, key)
        value["measured"], value["provenance"] = list(self.measured), self.provenance
        present = {key: section for key, section in value.items() if section not in (None, [])}
        return yaml.dump(
            present,
            Dumper=yaml.SafeDumper,
            sort_keys=False,
            default_flow_style=None,
            width=100,
            allow_unicode=True,
        )


def describe_size(tree_size: int) -> str:
    """Return a size in words where it is no tree."""
    return "no speculation" if tree_size == NO_SPECULATION else str(tree_size)


def load_preset(name_or_path: str | Path) -> Preset:
    """Return the preset in a YAML file, or the shipped preset of that name.

    Raises:
        PresetError: no such file or name, broken YAML, or a value the schema does not allow.
    """
    path = Path(name_or_path)
    shipped = shipped_presets()
    if path.suffix not in (".yaml", ".yml") and not path.exists():
        if str(name_or_path) not in shipped:
            close = difflib.get_close_matches(str(name_or_path), shipped, n=3) or sorted(shipped)
            raise PresetError(
                f"no preset file or shipped preset {name_or_path}; did you mean {', '.join(close)}?"
            )
        path = shipped[str(name_or_path)]
    return parse_preset(read_text(path, PresetError), source=str(name_or_path))


def shipped_presets() -> dict[str, Path]:
    """Return the presets that come with treeopt: name -> file."""
    folder = Path(str(files("presets")))
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def parse_preset(text: str, source: str) -> Preset:
    """Return the preset in YAML ``text``; ``source`` names it in errors."""
    try:
        value = yaml.load(text, Loader=_SafeLoader)
    except _YAML_ERRORS as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise PresetError(f"{source} is broken YAML{where}: {problem}") from error
    try:
        return _from_value(value)
    except PresetError as error:
        raise PresetError(f"{source}: {error}") from error


def _from_value(value: Any) -> Preset:
    _check_keys(
        "the preset",
        value,
        {
            "schema": lambda schema: schema == SCHEMA,
            "name": _TEXT,
            "tree": _ANY,
            "decoding": _ANY,
            **{f"{key}?": _ANY for key in (*_SECTIONS, *_LISTS) if key != "decoding"},
        },
    )
    _check_keys(
        "tree", value["tree"], {"tree_size": _COUNT, "ladder": _is_paths, "path_probs?": _is_probs}
    )
    for key, section in value.items():
        if key in _SECTIONS:
            _check_keys(key, section, _SECTIONS[key])
        elif key in _LISTS:
            if not isinstance(section, list):
                raise PresetError(f"{key} must be a list, not {section!r}")
            for index, row in enumerate(section):
                _check_keys(f"{key}[{index}]", row, _LISTS[key])
    _check_maps(value.get("dynamic"))
    tree = value["tree"]
    sections = {key: value.get(key) for key in _SECTIONS}
    return Preset(
        name=value["name"],
        ladder=tuple(tuple(path) for path in tree["ladder"]),
        tree_size=tree["tree_size"],
        path_probs=tuple(tree["path_probs"]) if "path_probs" in tree else None,
        sizes=tuple(value.get("sizes", ())),
        curve=tuple(map(SizePoint.from_row, value.get("curve", ()))),
        measured=tuple(value.get("measured", ())),
        **sections,
    )


def _check_maps(dynamic: Section | None) -> None:
    """Raise PresetError unless the maps of a ``dynamic`` section have the keys that they need."""
    if dynamic is None:
        return
    if not isinstance(dynamic["maps"], list):
        raise PresetError(f"dynamic.maps must be a list, not {dynamic['maps']!r}")
    for index, row in enumerate(dynamic["maps"]):
        _check_keys(f"dynamic.maps[{index}]", row, _MAP)


def _check_parents_first(ladder: tuple[TreePath, ...]) -> None:
    """Raise PresetError unless every leading slice of ``ladder`` is a tree, as its whole is."""
    seen: set[TreePath] = {()}
    for path in ladder:
        if path[:-1] not in seen:
            raise PresetError(
                f"ladder is not parents-first: {list(path)} comes before {list(path[:-1])}"
            )
        seen.add(path)


def _is_paths(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(path, list) for path in value)


def _is_probs(value: Any) -> bool:
    return isinstance(value, list) and all(_NUMBER(prob) and 0 <= prob <= 1 for prob in value)


def _check_keys(where: str, section: Any, checks: dict[str, Check]) -> None:
    if not isinstance(section, dict):
        raise PresetError(f"{where} must be a mapping, not {section!r}")
    known = {key.rstrip("?"): check for key, check in checks.items()}
    for key in section:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"
            raise PresetError(f"{where} has an unknown key {key!r}{hint}")
    for key in checks:
        if not key.endswith("?") and key not in section:
            raise PresetError(f"{where} lacks the key {key!r}")
    for key, value in section.items():
        if not known[key](value):
            raise PresetError(f"{where}: {key} cannot be {value!r}")


# PyYAML's own constructors let the latter four escape for values such as ``!!int x``.
_YAML_ERRORS = (yaml.YAMLError, RecursionError, ValueError, LookupError, AttributeError)


class _SafeLoader(yaml.SafeLoader):
    """A safe loader that refuses repeated keys and aliases (which can grow without bound)."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "aliases are not used", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} appears twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)
