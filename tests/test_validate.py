"""Validation: right decoders pass with right counts, and a wrong one is caught."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import (
    PROMPTS,
    TREES,
    plain_answer,
    random_heads,
    shared_backbone,
    shared_heads,
    tiny_model,
    tiny_tokenizer,
    tree_answer,
    with_eos,
)
from torch import Tensor

from treeopt.decoder.rules import Accepted
from treeopt.decoder.tree import TreeDecoder
from treeopt.decoder.validate import validate
from treeopt.errors import DataError
from treeopt.models.backbone import Backbone
from treeopt.report import DecodeReport

USED, TOKENS = PROMPTS[:5], 20


def report_of(backbone: Backbone, prompts: list[list[int]] = USED, **options: Any) -> DecodeReport:
    decoder = TreeDecoder(backbone, shared_heads(), TREES["example"])
    return validate(backbone, decoder, prompts, **{"max_new_tokens": TOKENS, **options})


@pytest.mark.parametrize("eos", [(), (3, 28)], ids=["no end", "ends"])
def test_counts_are_those_of_the_decoders(eos):
    backbone, seen = with_eos(shared_backbone(), *eos), []
    report = report_of(backbone, on_prompt=lambda: seen.append(None))
    assert report.equal
    assert report.mismatches == ()
    assert len(seen) == len(USED)
    decoder = TreeDecoder(backbone, shared_heads(), TREES["example"])
    answers = [plain_answer(backbone, prompt, TOKENS) for prompt in USED]
    logs = [tree_answer(decoder, prompt, TOKENS)[1].num_accepted for prompt in USED]
    kept = [index for index, answer in enumerate(answers) if len(answer) > 1]
    assert len(report.prompts) == len(kept)
    for decoded, index in zip(report.prompts, kept, strict=True):
        rest = len(answers[index]) - 1
        assert (decoded.num_tokens, decoded.num_plain, decoded.num_generate) == (rest,) * 3
        assert decoded.num_accepted == tuple(logs[index])
        assert min(decoded.tree_s, decoded.plain_s, decoded.generate_s, decoded.prefill_s) > 0
        assert 0 < sum(decoded.phase_s.values()) <= decoded.tree_s
    value = report.as_dict()
    tokens, steps = sum(len(answers[i]) - 1 for i in kept), sum(len(logs[i]) for i in kept)
    assert value["equal"] is True
    assert value["first_mismatch"] is None
    assert value["near_ties"] == 0
    assert (value["documents"], value["tokens"]) == (len(kept), tokens)
    assert value["acceptance_length"] == round(tokens / steps, 4)
    assert value["tree_size"] == 6
    assert value["dtype"] == "float32"


def accept_node_1(decoder: TreeDecoder, tokens: Tensor, logits: Tensor, *rest: Any) -> Accepted:
    """Accept the first guess of head 1, whatever the backbone says."""
    return Accepted(torch.tensor([1]), logits[:, 1].argmax(-1))


def test_a_decoder_that_accepts_wrong_tokens_is_caught(monkeypatch):
    backbone = shared_backbone()
    monkeypatch.setattr(TreeDecoder, "accept", accept_node_1)
    decoder = TreeDecoder(backbone, shared_heads(), TREES["example"])
    report = report_of(backbone)
    assert not report.equal
    assert [mismatch.document for mismatch in report.mismatches] == list(range(len(USED)))
    positions = set()
    for mismatch, prompt in zip(report.mismatches, USED, strict=True):
        plain = plain_answer(backbone, prompt, TOKENS)
        wrong = tree_answer(decoder, prompt, TOKENS)[0]
        position = [a == b for a, b in zip(plain, wrong, strict=True)].index(False)
        with torch.inference_mode():
            ids = torch.tensor([prompt + plain[:position]])
            logits = backbone.model(ids).logits[0, -1]
        assert mismatch.position == position
        assert (mismatch.expected, mismatch.got) == (plain[position], wrong[position])
        gap = float(logits[plain[position]] - logits[wrong[position]])
        assert mismatch.gap == pytest.approx(gap, abs=1e-3)
        assert mismatch.gap > 0
        assert not mismatch.is_near_tie
        positions.add(position)
    assert len(positions) > 1
    value = report.as_dict()
    assert value["equal"] is False
    assert value["near_ties"] == 0
    assert value["first_mismatch"] == vars(report.mismatches[0])


def test_one_wrong_answer_among_right_ones_is_caught(monkeypatch):
    backbone = shared_backbone()
    right = TreeDecoder.accept
    wanted = plain_answer(backbone, USED[2], 1)[0]
    assert wanted not in {plain_answer(backbone, USED[i], 1)[0] for i in (0, 1, 3, 4)}
    wrong: list[int] = []

    def wrong_once(decoder: TreeDecoder, tokens: Tensor, logits: Tensor, *rest: Any) -> Accepted:
        root, node = int(tokens[0, 0]), int(tokens[0, 2])
        if root == wanted and not wrong and node != int(logits[0, 0].argmax()):
            wrong.append(node)
            return Accepted(torch.tensor([2]), logits[:, 2].argmax(-1))
        return right(decoder, tokens, logits, *rest)

    monkeypatch.setattr(TreeDecoder, "accept", wrong_once)
    report = report_of(backbone)
    assert len(wrong) == 1
    assert not report.equal
    (mismatch,) = report.mismatches
    assert mismatch.got == wrong[0]
    assert plain_answer(backbone, USED[mismatch.document], TOKENS)[mismatch.position] == (
        mismatch.expected
    )


def last_of_the_largest(logits: Tensor) -> Tensor:
    """Choose among equal logits what plain decoding does not: the largest token id."""
    return logits.shape[-1] - 1 - logits.flip(-1).max(-1).indices


def test_equal_logits_are_near_ties_and_no_failure(monkeypatch):
    model = tiny_model()
    model.lm_head.weight[40:60] = model.lm_head.weight[:20]
    backbone = Backbone("ties", "", model, tiny_tokenizer(), frozenset())
    monkeypatch.setattr("treeopt.decoder.tree.greedy", last_of_the_largest)
    decoder = TreeDecoder(backbone, random_heads(backbone, 3), TREES["example"])
    report = validate(backbone, decoder, USED, max_new_tokens=TOKENS)
    assert report.equal
    assert len(report.mismatches) > 2
    for mismatch in report.mismatches:
        assert mismatch.got == mismatch.expected + 40
        assert mismatch.gap == 0
        assert mismatch.is_near_tie
    assert report.as_dict()["first_mismatch"] is None
    assert report.as_dict()["near_ties"] == len(report.mismatches)


def test_answers_of_one_token_have_no_step_to_time():
    first = plain_answer(shared_backbone(), USED[0], 1)[0]
    report = report_of(with_eos(shared_backbone(), first))
    assert 0 < len(report.prompts) < len(USED)
    with pytest.raises(DataError, match="every answer ended with its first token"):
        report_of(with_eos(shared_backbone(), first), USED[:1])
    with pytest.raises(DataError, match="every answer ended with its first token"):
        report_of(shared_backbone(), max_new_tokens=1)
