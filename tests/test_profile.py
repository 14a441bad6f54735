"""Measured step costs: every situation, in turns, each step where it should be."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import CONTEXT, VOCAB, random_heads, shared_backbone, tiny_backbone
from torch import Tensor

from calibration.profile import num_steps, profile, profile_tree
from treeopt.cost import StepCost
from treeopt.decoder.tree import TreeDecoder
from treeopt.errors import CostError
from treeopt.models.backbone import Backbone

SIZES, CONTEXTS = (1, 2, 6), (16, 40)


def measured(**options: Any) -> tuple[StepCost, int]:
    calls: list[None] = []
    settings = {"sizes": SIZES, "contexts": CONTEXTS, "rounds": 3, **options}
    backbone = settings.pop("backbone", shared_backbone())
    cost = profile(
        backbone, random_heads(backbone, 3), on_step=lambda: calls.append(None), **settings
    )
    return cost, len(calls)


def test_every_situation_is_measured_plain_first():
    cost, calls = measured()
    assert [(t.batch, t.context, t.tree_size) for t in cost.times] == [
        (1, context, size) for context in CONTEXTS for size in (0, *SIZES)
    ]
    assert all(0 < t.low_ms <= t.step_ms <= t.high_ms for t in cost.times)
    assert {t.repeats for t in cost.times} == {3}
    assert calls == num_steps(SIZES, CONTEXTS, (1,), 3) == 32
    assert cost.measured
    assert cost.machine["backbone_sha256"] == shared_backbone().sha256
    assert cost.machine["dtype"] == "float32"
    assert cost.machine["threads"] >= 1


def test_batches_are_measured_too_and_cost_more_rows():
    cost, calls = measured(batches=(1, 3), contexts=(16,))
    assert [(t.batch, t.context, t.tree_size) for t in cost.times] == [
        (batch, 16, size) for batch in (1, 3) for size in (0, *SIZES)
    ]
    assert calls == num_steps(SIZES, (16,), (1, 3), 3)
    assert cost.situations() == [(1, 16), (3, 16)]


def test_sizes_take_turns_at_the_same_place(monkeypatch):
    seen: list[tuple[int, int]] = []
    forward = Backbone.forward

    def watched(
        self: Backbone, ids: Tensor, cache: Any, where: Any = None, mask: Any = None
    ) -> Any:
        seen.append((cache.length, ids.shape[1]))
        return forward(self, ids, cache, where, mask)

    monkeypatch.setattr(Backbone, "forward", watched)
    measured(contexts=(16,), rounds=2)
    # both sides' prefill, then three rounds (the first warms up) of plain, 1, 2 and 6 rows
    assert seen == [(0, 16)] * 2 + [(16, 1), (16, 1), (16, 2), (16, 6)] * 3


def test_cost_file_round_trip(tmp_path):
    cost, _ = measured(rounds=1)
    cost.save(tmp_path / "cost.json")
    assert StepCost.load(tmp_path / "cost.json") == cost


def test_contexts_without_room_for_the_largest_tree_are_refused():
    measured(contexts=(CONTEXT - 6,), rounds=1)
    with pytest.raises(CostError, match=f"^context {CONTEXT - 5} and a tree of 6 exceed the"):
        measured(contexts=(16, CONTEXT - 5))
    with pytest.raises(CostError, match="exceed the backbone's 30"):
        measured(backbone=tiny_backbone("mistral", sliding_window=30))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 12, VOCAB])
@pytest.mark.parametrize("num_heads", [1, 3, 5])
def test_profile_trees_have_the_size_asked_for_and_use_every_head(size, num_heads):
    tree = profile_tree(size, num_heads)
    assert tree.tree_size == size
    assert tree.depth == min(num_heads, size - 1)
    TreeDecoder(shared_backbone(), random_heads(shared_backbone(), num_heads), tree)
