"""The tree decoder inside transformers' ``generate``: the same tokens, or a refusal by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import PROMPTS, TREES, shared_backbone, shared_heads, tiny_model
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from treeopt.decoder.custom_generate import treeopt_decoder
from treeopt.errors import DataError, TreeoptError
from treeopt.preset import Preset

PRESET = Preset("tiny", tuple(TREES["gaps"].paths[1:]), TREES["gaps"].tree_size)


@pytest.fixture
def decoder(tmp_path: Path) -> Any:
    shared_heads().save(tmp_path / "heads.safetensors")
    return treeopt_decoder(PRESET, heads=tmp_path / "heads.safetensors")


def generate(prompts: list[list[int]], **options: Any) -> Any:
    """Call ``generate`` on ``prompts``, padded on the left with token 0."""
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    settings = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, **options}
    return shared_backbone().model.generate(padded, attention_mask=mask, **settings)


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.values: list[list[int]] = []
        self.ended = 0

    def put(self, value: Any) -> None:
        self.values.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


class StopAfter(StoppingCriteria):
    """Stop once a row's last token is ``token``."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] == self.token


@pytest.mark.parametrize("eos", [None, 3, [3, 28]], ids=str)
def test_tokens_are_those_of_generate(decoder, eos):
    lengths = set()
    for prompt in PROMPTS[:4]:
        ours = generate([prompt], custom_generate=decoder, eos_token_id=eos)
        assert torch.equal(ours, generate([prompt], eos_token_id=eos))
        lengths.add(ours.shape[1] - len(prompt))
    assert len(lengths) > 1 or eos is None


@pytest.mark.parametrize("eos", [None, [3, 28]], ids=str)
def test_padded_batches(decoder, eos):
    options = {"eos_token_id": eos}
    ours = generate(PROMPTS[:5], custom_generate=decoder, **options)
    assert torch.equal(ours, generate(PROMPTS[:5], **options))


def test_a_generation_config_and_the_dictionary_form(decoder):
    config = shared_backbone().model.generation_config.__class__(
        max_new_tokens=7, pad_token_id=0, return_dict_in_generate=True
    )
    tokens = torch.tensor([PROMPTS[0]])
    model = shared_backbone().model
    expected = model.generate(tokens, generation_config=config)
    found = model.generate(tokens, generation_config=config, custom_generate=decoder)
    assert torch.equal(found.sequences, expected.sequences)
    assert found.sequences.shape[1] == len(PROMPTS[0]) + 7


def test_streamers_get_every_token_and_the_end(decoder):
    ours, theirs = Recorder(), Recorder()
    generate([PROMPTS[0]], custom_generate=decoder, streamer=ours)
    generate([PROMPTS[0]], streamer=theirs)
    assert ours.values == theirs.values
    assert ours.ended == theirs.ended == 1


def test_stopping_criteria_see_every_token(decoder):
    answer = generate([PROMPTS[0]])[0, len(PROMPTS[0]) :].tolist()
    for token in answer[3:9]:
        options = {"stopping_criteria": [StopAfter(token)]}
        ours = generate([PROMPTS[0]], custom_generate=decoder, **options)
        assert torch.equal(ours, generate([PROMPTS[0]], **options))
        assert ours[0, -1] == token


def test_sampling_is_seeded_and_follows_the_settings(decoder):
    options = {"custom_generate": decoder, "do_sample": True, "temperature": 1.5}
    first, second = generate([PROMPTS[0]], **options), generate([PROMPTS[0]], **options)
    assert torch.equal(first, second)
    assert not torch.equal(first, generate([PROMPTS[0]]))
    narrow = generate([PROMPTS[0]], **{**options, "top_k": 1})
    assert torch.equal(narrow, generate([PROMPTS[0]]))


class Favour(LogitsProcessor):
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences=2"),
        ({"repetition_penalty": 1.3}, "RepetitionPenaltyLogitsProcessor"),
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor"),
        ({"min_new_tokens": 3, "eos_token_id": 3}, "MinLengthLogitsProcessor"),
        ({"logits_processor": [Favour()]}, "Favour"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores=True"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_honoured_is_refused_by_name(decoder, options, named):
    with pytest.raises(DataError, match=f"tree decoding cannot honour .*{named}"):
        generate([PROMPTS[0]], custom_generate=decoder, **options)


def test_a_streamer_shows_one_answer(decoder):
    with pytest.raises(DataError, match="a streamer shows one answer; 2 prompts were given"):
        generate(PROMPTS[:2], custom_generate=decoder, streamer=Recorder())


def test_heads_are_needed_and_must_fit(tmp_path):
    with pytest.raises(DataError, match="preset tiny names no heads; pass heads="):
        treeopt_decoder(PRESET)
    shared_heads().save(tmp_path / "heads.safetensors")
    other = tiny_model(hidden_size=64)
    decoder = treeopt_decoder(PRESET, heads=tmp_path / "heads.safetensors")
    with pytest.raises(TreeoptError, match="for another hidden size"):
        other.generate(torch.tensor([[1, 2]]), max_new_tokens=3, custom_generate=decoder)
