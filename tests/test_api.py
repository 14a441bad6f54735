"""The decoder for library users: presets and prompts in, texts out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny import TREES, plain_answer, shared_backbone, shared_heads, with_eos

from treeopt.decoder.api import Decoder
from treeopt.decoder.rules import Greedy, Sampling
from treeopt.errors import DataError, PresetError, TreeError
from treeopt.preset import Preset

PRESET = Preset("tiny", tuple(TREES["gaps"].paths[1:]), TREES["gaps"].tree_size)
BACKBONE = with_eos(shared_backbone(), 28)


def text_of(prompt: list[int], limit: int) -> str:
    return BACKBONE.decode(plain_answer(BACKBONE, prompt, limit))


def test_texts_and_chats_are_answered_in_order():
    decoder = Decoder(PRESET, BACKBONE, shared_heads())
    chat = [{"role": "user", "content": "t7"}, {"role": "user", "content": "t9"}]
    answers = decoder.generate(["t5 t6", chat, "t5"], max_new_tokens=20, batch_size=2)
    assert answers == [text_of(p, 20) for p in ([5, 6, 1, 2], [7, 1, 9, 1, 2], [5, 1, 2])]
    assert "".join(decoder.stream("t5", 20)) == answers[2]
    assert decoder.generate([]) == []


def test_the_rule_is_the_presets_unless_one_is_given():
    sampled = {"rule": "sampling", "temperature": 0.5, "top_p": 0.9}
    preset = replace(PRESET, decoding=sampled)
    assert Decoder(preset, BACKBONE, shared_heads()).rule == Sampling(0.5, 0.9)
    assert Decoder(preset, BACKBONE, shared_heads(), rule=Greedy()).rule == Greedy()


def test_refusals():
    decoder = Decoder(PRESET, BACKBONE, shared_heads())
    with pytest.raises(DataError, match="the context holds"):
        decoder.generate(["t5", "t5 " * 300])
    with pytest.raises(PresetError, match="preset tiny names no backbone; pass backbone="):
        Decoder(PRESET)
    with pytest.raises(PresetError, match="preset tiny names no heads; pass heads="):
        Decoder(PRESET, BACKBONE)
    deep = Preset("deep", tuple((0,) * depth for depth in range(1, 8)), 8)
    with pytest.raises(TreeError, match="7 deep but there are only 4 heads"):
        Decoder(deep, BACKBONE, shared_heads())
