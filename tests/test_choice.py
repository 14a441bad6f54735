"""Dynamic trees in the decoder: the choice of ``DynamicTree``, and the output of plain decoding."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache

import numpy as np
import pytest
import torch
from tiny import (
    PROMPTS,
    TREES,
    dataset_of,
    plain_answer,
    random_heads,
    shared_backbone,
    shared_heads,
    tiny_backbone,
    tree_answer,
    with_eos,
)

from calibration.collect import collect
from treeopt.decoder.api import Decoder
from treeopt.decoder.choice import NO_TOKEN, Choice, Chooser
from treeopt.decoder.rules import Rule, Sampling, Typical
from treeopt.decoder.tree import TreeDecoder
from treeopt.dynamic import ChanceMap, DynamicTree, fit_maps
from treeopt.errors import DataError, TreeError
from treeopt.models.candidates import top_candidates
from treeopt.preset import Preset

UNIVERSE = TREES["wide"]
SIZES = [1, 2, 5, 16, UNIVERSE.tree_size]


@cache
def maps() -> tuple[ChanceMap, ...]:
    """Return maps of the shared heads."""
    data = dataset_of(PROMPTS[:12])
    trace = collect(shared_backbone(), shared_heads(), data, max_new_tokens=30, batch_size=12)
    return fit_maps(trace)


def dynamic_decoder(tree_size: int, rule: Rule | None = None, seed: int = 0) -> TreeDecoder:
    tree = DynamicTree(UNIVERSE, tree_size, maps())
    return TreeDecoder(shared_backbone(), shared_heads(), tree, rule, seed)


# The choice


@pytest.mark.parametrize("tree_size", SIZES)
def test_the_device_chooses_what_numpy_chooses(tree_size):
    tree = DynamicTree(UNIVERSE, tree_size, maps())
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn((30, UNIVERSE.depth, 61), generator=generator) * 4
    flat = logits.flatten(0, 1)
    best, _ = top_candidates(flat, tree.num_ranks)
    choice = Chooser(tree, torch.device("cpu")).choose(flat, best)
    probs = logits.softmax(-1).sort(-1, descending=True).values.half().numpy()
    chosen = tree.chosen(probs)
    assert choice.nodes.tolist() == [row.nonzero()[0].tolist() for row in chosen]
    if 2 < tree_size < UNIVERSE.tree_size:
        assert len(np.unique(chosen, axis=0)) > 5


def test_places_and_values_by_hand():
    choice = Choice.of(torch.tensor([[0, 1, 4], [0, 2, 3]]), 5)
    assert choice.places.tolist() == [[0, 1, 0, 0, 2], [0, 0, 1, 2, 0]]
    assert choice.place_of(torch.tensor([[4, 1], [2, 3]])).tolist() == [[2, 1], [1, 2]]
    spread = choice.spread(torch.tensor([[7, 8, 9], [7, 8, 9]]))
    assert [spread[0, [0, 1, 4]].tolist(), spread[1, [0, 2, 3]].tolist()] == [[7, 8, 9]] * 2
    tokens = torch.arange(10).view(2, 5)
    assert choice.without_others(tokens).tolist() == [
        [0, 1, NO_TOKEN, NO_TOKEN, 4],
        [5, NO_TOKEN, 7, 8, NO_TOKEN],
    ]


def test_mask_shows_each_row_its_own_ancestors():
    """Row 1 holds two tokens more than row 0, whose columns there are not its own yet."""
    decoder = TreeDecoder(shared_backbone(), shared_heads(), TREES["example"])
    batch = decoder.new_batch(20, 2)
    with torch.inference_mode():
        for row, prompt in enumerate([[4], [4, 5, 6]]):
            decoder.fill(batch, row, prompt, torch.Generator())
    batch.cache.length = 3
    chain, star = [0, 1, 3, 5], [0, 1, 2, 4]
    decoder.tree_size = 4
    mask = decoder.mask(batch.cache, Choice.of(torch.tensor([chain, star]), 6))
    pictures = [["".join("1" if v == 0 else "." for v in row) for row in m[0]] for m in mask]
    assert pictures == [
        ["11.....", "111....", "1111...", "11111.."],
        ["1111...", "11111..", "1111.1.", "11111.1"],
    ]


# Equality


@pytest.mark.parametrize("tree_size", SIZES)
def test_dynamic_trees_equal_plain_decoding(tree_size):
    decoder = dynamic_decoder(tree_size)
    accepted: list[int] = []
    for prompt in PROMPTS[:10]:
        answer, log = tree_answer(decoder, prompt, 40)
        assert answer == plain_answer(shared_backbone(), prompt, 40)
        accepted += log.num_accepted
    assert {0, 1} <= set(accepted) or tree_size == 1
    assert max(accepted) >= min(tree_size - 1, 3)


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "mistral"])
def test_other_architectures_equal_plain_decoding(kind):
    backbone = tiny_backbone(kind, sliding_window=64) if kind != "gpt2" else tiny_backbone(kind)
    tree = DynamicTree(UNIVERSE, 12, maps())
    decoder = TreeDecoder(backbone, random_heads(backbone, 4), tree)
    for prompt in PROMPTS[:2]:
        assert tree_answer(decoder, prompt, 24)[0] == plain_answer(backbone, prompt, 24)


@pytest.mark.parametrize("batch_size", [2, 5])
def test_rows_of_a_batch_choose_for_themselves(batch_size):
    backbone = with_eos(shared_backbone(), 3, 28)
    decoder = TreeDecoder(backbone, shared_heads(), DynamicTree(UNIVERSE, 6, maps()))
    answers: list[list[int]] = [[] for _ in PROMPTS[:9]]
    for emitted in decoder.decode_many(PROMPTS[:9], 30, batch_size):
        assert emitted.error is None
        answers[emitted.prompt] += emitted.tokens
    assert answers == [plain_answer(backbone, prompt, 30) for prompt in PROMPTS[:9]]


def test_sampling_through_a_dynamic_tree_is_repeatable_and_varied():
    rule = Sampling(temperature=1.5)
    answers = [
        [tree_answer(dynamic_decoder(8, rule, seed), prompt, 20)[0] for prompt in PROMPTS[:4]]
        for seed in (0, 0, 1)
    ]
    assert answers[0] == answers[1] != answers[2]


def test_almost_greedy_sampling_is_greedy():
    decoder = dynamic_decoder(8, Sampling(temperature=1e-4))
    for prompt in PROMPTS[:4]:
        assert tree_answer(decoder, prompt, 30)[0] == plain_answer(shared_backbone(), prompt, 30)


def test_presets_fall_back_on_their_static_tree_where_a_rule_needs_one():
    ladder = UNIVERSE.paths[1:]
    section = {"maps": [asdict(chance_map) for chance_map in maps()]}
    preset = Preset("mine", ladder, 8, dynamic=section)
    models = shared_backbone(), shared_heads()
    for rule in (None, Sampling()):
        decoder = Decoder(preset, *models, rule=rule).tree_decoder
        assert (decoder.tree_size, decoder.tree) == (8, UNIVERSE)
    for rule in (Typical(), Sampling(candidates="sampled")):
        decoder = Decoder(preset, *models, rule=rule).tree_decoder
        assert (decoder.tree_size, decoder.tree) == (8, preset.tree)


# Bad input


@pytest.mark.parametrize("rule", [Typical(), Sampling(candidates="sampled")])
def test_rules_that_need_a_static_tree(rule):
    with pytest.raises(DataError, match="typical acceptance and sampled candidates need a static"):
        dynamic_decoder(8, rule)


def test_too_few_heads():
    tree = DynamicTree(UNIVERSE, 8, maps())
    with pytest.raises(TreeError, match="4 deep but there are only 2 heads"):
        TreeDecoder(shared_backbone(), random_heads(shared_backbone(), 2), tree)


def test_logits_that_are_not_numbers_end_the_answer():
    backbone, heads = shared_backbone(), random_heads(shared_backbone(), 4)
    for block in heads.blocks.parameters():
        block.data.fill_(float("nan"))
    decoder = TreeDecoder(backbone, heads, DynamicTree(UNIVERSE, 8, maps()))
    answer, log = tree_answer(decoder, PROMPTS[0], 12)  # the heads' own do no harm
    assert answer == plain_answer(backbone, PROMPTS[0], 12)
    assert sum(log.num_accepted) <= 2
