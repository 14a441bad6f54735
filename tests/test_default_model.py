"""The default backbone with its shipped heads: the real thing, in small portions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from calibration.collect import collect
from calibration.data import Dataset, held_out_prompts, read_dataset
from treeopt.build import Request, preset_from_trace
from treeopt.decoder.plain import decode_plain
from treeopt.decoder.tree import StepLog, TreeDecoder
from treeopt.models.backbone import Backbone, load_backbone
from treeopt.models.heads import MedusaHeads, load_heads, offset_scores
from treeopt.preset import load_preset
from treeopt.replay import replay

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return load_backbone(dtype="float32")


@pytest.fixture(scope="module")
def heads(backbone: Backbone) -> MedusaHeads:
    return load_heads("smollm2-135m", backbone)


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return read_dataset(held_out_prompts(), limit=6)


def test_tokenizer_and_end_token(backbone: Backbone) -> None:
    assert backbone.eos_ids == {2}
    ids = backbone.encode([{"role": "user", "content": "Add 12345 and 7."}])
    text = backbone.tokenizer.decode(ids)
    assert text.endswith("<|im_start|>user\nAdd 12345 and 7.<|im_end|>\n<|im_start|>assistant\n")
    digits = [backbone.tokenizer.decode([i]) for i in backbone.tokenizer("12345")["input_ids"]]
    assert digits == ["1", "2", "3", "4", "5"]
    assert backbone.decode(backbone.tokenizer("naïve café ☕")["input_ids"]) == "naïve café ☕"


def test_answers_make_sense(backbone: Backbone) -> None:
    prompt = backbone.encode([{"role": "user", "content": "What is the capital of France?"}])
    answer = list(decode_plain(backbone, backbone.new_cache(200), prompt, 40))
    assert "Paris" in backbone.decode(answer)
    assert answer[-1] == 2


def test_heads_look_one_place_ahead(
    backbone: Backbone, heads: MedusaHeads, dataset: Dataset
) -> None:
    trace = collect(backbone, heads, dataset, max_new_tokens=48, batch_size=6)
    top1 = trace.hits()[:, 0] / trace.trials()
    assert top1[0] > 0.25
    assert (top1[:-1] > top1[1:]).all()


def test_replay_and_decoder_agree_step_for_step(
    backbone: Backbone, heads: MedusaHeads, dataset: Dataset, tmp_path: Path
) -> None:
    trace = collect(backbone, heads, dataset, max_new_tokens=48, batch_size=6)
    trace.save(tmp_path / "trace.safetensors")
    request = Request(16)
    preset = preset_from_trace(
        trace, tmp_path / "trace.safetensors", request, name="test", command="test"
    )
    decoder = TreeDecoder(backbone, heads, preset.tree)
    decoded: list[int] = []
    for prompt in dataset.prompts:
        encoded = backbone.encode(prompt.messages)
        log = StepLog()
        cache = backbone.new_cache(len(encoded) + 48)
        tree = [t for tokens in decoder.decode(encoded, 48, log) for t in tokens]
        assert tree == list(decode_plain(backbone, cache, encoded, 48))
        decoded += log.num_accepted
    assert decoded == replay(trace, preset.tree).num_accepted.tolist()


def test_offset_self_check(backbone: Backbone, heads: MedusaHeads, dataset: Dataset) -> None:
    prompt = backbone.encode(dataset.prompts[0].messages)
    answer = list(decode_plain(backbone, backbone.new_cache(300), prompt, 64))
    with torch.inference_mode():
        tokens = torch.tensor([prompt + answer[:-1]])
        states = backbone.forward(tokens, backbone.new_cache(tokens.shape[1]))[0]
    scores = offset_scores(heads, states[len(prompt) - 1 :], torch.tensor(answer))
    assert max(range(4), key=scores.__getitem__) == 1


def test_shipped_preset_fits_the_shipped_heads(backbone: Backbone, heads: MedusaHeads) -> None:
    preset = load_preset("smollm2-135m")
    assert preset.heads is not None
    assert preset.backbone is not None
    assert preset.heads["sha256"] == heads.sha256
    assert preset.backbone["sha256"] == backbone.sha256
    assert preset.measured
    assert preset.measured[0]["equal"]
