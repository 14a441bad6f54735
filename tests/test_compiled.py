"""Compiled forward calls give what eager ones give, and are compiled once per machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import PROMPTS, TREES, plain_answer, random_heads, tiny_backbone, tree_answer

from treeopt.decoder.tree import TreeDecoder
from treeopt.errors import ModelError
from treeopt.models import compiled
from treeopt.models.compiled import capacity_for

TREE = TREES["gaps"]


@pytest.fixture
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TREEOPT_CACHE", str(tmp_path))
    monkeypatch.setattr(compiled, "_SMALLEST", 64)
    return tmp_path


@pytest.mark.slow
def test_answers_are_the_eager_ones_and_the_second_run_compiles_nothing(cache_directory: Path):
    backbone = tiny_backbone()
    asked: list[int] = []
    fast = backbone.compile((TREE.tree_size,), TREE.depth, 60, asked.append)
    assert asked == [1, TREE.tree_size, 1, TREE.depth, TREE.tree_size]  # forward, then LM head
    assert fast.compiled.compile_s > 0
    assert fast.machine()["compiled_rows"] == [1, TREE.tree_size]
    decoder = TreeDecoder(fast, random_heads(fast, 4), TREE)
    used: list[int] = []
    calls = {size: counted(call, size, used) for size, call in fast.compiled.calls.items()}
    fast.compiled.calls.update(calls)
    for prompt in PROMPTS[:4]:
        expected = plain_answer(backbone, prompt, 30)
        assert plain_answer(fast, prompt, 30) == expected
        assert tree_answer(decoder, prompt, 30)[0] == expected
    assert set(used) == {1, TREE.tree_size}
    again = backbone.compile((TREE.tree_size,), TREE.depth, 60, asked.append)
    assert len(asked) == 5
    assert again.compiled.compile_s == 0
    long = plain_answer(fast, PROMPTS[0], 100)  # beyond the compiled capacity: eager
    assert long == plain_answer(backbone, PROMPTS[0], 100)
    assert [file.name for file in (cache_directory / "compiled").iterdir() if file.is_file()] == []


def counted(call: Any, size: int, used: list[int]) -> Any:
    def run(*arguments: Any) -> Any:
        used.append(size)
        return call(*arguments)

    return run


def test_what_cannot_be_compiled_is_said_and_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("TREEOPT_CACHE", str(tmp_path))

    def fail(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("No C++ compiler found\nand a long trace")

    monkeypatch.setattr(torch.export, "export", fail)
    with pytest.raises(ModelError, match="cannot be compiled: No C.. compiler found; a C"):
        tiny_backbone().compile((4,), 2, 60)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_capacities_are_few():
    assert [capacity_for(n) for n in (1, 512, 513, 1024, 5000)] == [512, 512, 1024, 1024, 8192]
