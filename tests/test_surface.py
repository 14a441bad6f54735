"""What the package shows the world, and that documents name only what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import treeopt

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_all_is_sorted_and_complete() -> None:
    public = {name for name in vars(treeopt) if not name.startswith("_")}
    modules = {name for name in public if f"treeopt.{name}" in __import__("sys").modules}
    functions = {"replay"}  # shares its name with its module
    assert treeopt.__all__ == sorted(treeopt.__all__)
    assert set(treeopt.__all__) == (public - modules) | functions


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_documents_name_exist(document: Path) -> None:
    named = re.findall(r"`([\w./-]+/[\w.-]*|[\w/-]+\.(?:py|md|yaml|jsonl))`", document.read_text())
    places = [ROOT, ROOT / "treeopt", ROOT / "calibration", ROOT / "presets"]
    elsewhere = {"answers.jsonl", "treeopt-demo/", "assets/medusa_acc.csv"}  # made, or Medusa's
    for name in set(named) - elsewhere:
        if name.startswith(("presets/vicuna", "alpaca")):
            continue  # what the user writes
        assert any((place / name).exists() for place in places), f"{document.name} names {name}"


def test_version_is_in_one_place() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    declared = re.search(r'^version = "(.+)"$', project, re.MULTILINE)
    assert declared is not None
    from importlib.metadata import version

    assert version("treeopt") == declared[1]


def test_changelog_has_an_unreleased_section() -> None:
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text()
