"""Replaying a trace predicts the tree decoder's steps exactly, not only on average."""

from __future__ import annotations

import pytest
from tiny import PROMPTS, TREES, dataset_of, shared_backbone, shared_heads, tree_answer, with_eos

from calibration.collect import collect
from treeopt.decoder.tree import TreeDecoder
from treeopt.dynamic import DynamicTree, fit_maps
from treeopt.models.backbone import Backbone
from treeopt.replay import replay
from treeopt.trace import RankTrace
from treeopt.tree import Tree

TOKENS = 24
USED = PROMPTS[:8]


def trace_of(backbone: Backbone) -> RankTrace:
    return collect(backbone, shared_heads(), dataset_of(USED), max_new_tokens=TOKENS, batch_size=5)


def decoded(backbone: Backbone, tree: Tree | DynamicTree) -> tuple[list[list[int]], int]:
    """Return what the decoder accepted in every step of every prompt, and the tokens of steps."""
    decoder = TreeDecoder(backbone, shared_heads(), tree)
    accepted, num_tokens = [], 0
    for prompt in USED:
        answer, log = tree_answer(decoder, prompt, TOKENS)
        accepted.append(log.num_accepted)
        num_tokens += len(answer) - 1
    return accepted, num_tokens


@pytest.mark.parametrize("eos", [(), (3,), (19, 57, 28)], ids=["no end", "one end", "three ends"])
@pytest.mark.parametrize("name", TREES)
def test_replay_predicts_every_step(name, eos):
    backbone = with_eos(shared_backbone(), *eos)
    compare(backbone, trace_of(backbone), TREES[name])


@pytest.mark.parametrize("tree_size", [1, 2, 4, 16, 50])
@pytest.mark.parametrize("eos", [(), (19, 57, 28)], ids=["no end", "three ends"])
def test_replay_predicts_every_step_of_dynamic_trees(tree_size, eos):
    backbone = with_eos(shared_backbone(), *eos)
    trace = trace_of(backbone)
    compare(backbone, trace, DynamicTree(TREES["wide"], tree_size, fit_maps(trace)))


def compare(backbone: Backbone, trace: RankTrace, tree: Tree | DynamicTree) -> None:
    predicted = replay(trace, tree)
    accepted, num_tokens = decoded(backbone, tree)
    assert predicted.num_accepted.tolist() == [count for counts in accepted for count in counts]
    assert predicted.steps.tolist() == [len(counts) for counts in accepted]
    assert predicted.tokens.sum() == num_tokens
    steps = sum(map(len, accepted))
    assert predicted.acceptance_length == num_tokens / steps
