"""Self-distillation on tiny models, and the prompts that come with treeopt to train on."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import (
    CONTEXT,
    ENDING,
    PROMPTS,
    TEMPLATE,
    TREES,
    VOCAB,
    dataset_of,
    plain_answer,
    shared_backbone,
    shared_heads,
    tiny_backbone,
    with_eos,
)

from calibration.data import held_out_prompts, read_dataset, shipped_prompts
from calibration.synthetic import training_prompts
from treeopt.decoder.plain import prefill
from treeopt.decoder.rules import Sampling, section_of, target_probs
from treeopt.errors import DataError
from treeopt.models.backbone import Backbone
from treeopt.training.distill import Recipe, distill, distill_invented, read_distilled

CHATS = [prompt.messages for prompt in dataset_of(PROMPTS[:10]).prompts]


def recipe_of(**options: Any) -> Recipe:
    return Recipe(**{"max_new_tokens": 12, "batch_size": 4, **options})


def distilled(out: Path, backbone: Backbone | None = None, **options: Any) -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []
    conversations = options.pop("conversations", CHATS)
    distill(
        backbone or with_eos(shared_backbone(), *ENDING),
        conversations,
        out,
        recipe_of(**options),
        on_answers=lambda *counts: seen.append(counts),
    )
    return seen


def test_distill_writes_the_backbones_own_answers(tmp_path):
    out = tmp_path / "new" / "answers.jsonl"
    seen = distilled(out)
    conditions, rows = read_distilled(out)
    backbone = with_eos(shared_backbone(), *ENDING)
    assert conditions["backbone_sha256"] == backbone.sha256
    assert conditions["max_new_tokens"] == 12
    assert {tuple(row.prompt) for row in rows} == {tuple(prompt) for prompt in PROMPTS[:10]}
    for row in rows:
        assert row.answer == plain_answer(backbone, row.prompt, 12)
    assert [sum(column) for column in zip(*seen, strict=True)] == [
        10,
        sum(len(row.answer) for row in rows),
    ]
    first = json.loads(out.read_text().splitlines()[1])
    assert first["messages"][-1] == {
        "role": "assistant",
        "content": " ".join(f"t{token}" for token in first["answer_ids"]),
    }
    assert read_dataset(out).prompts[0].answer_ids == first["answer_ids"]


def test_distill_with_a_tree_writes_the_same_text(tmp_path):
    plain, tree = tmp_path / "plain.jsonl", tmp_path / "tree.jsonl"
    distilled(plain, shared_backbone())
    drafts = (shared_heads(), TREES["example"])
    calls = distilled(tree, shared_backbone(), drafts=drafts)
    assert sorted(tree.read_text().splitlines()) == sorted(plain.read_text().splitlines())
    assert sum(answers for answers, _ in calls) == 10


@pytest.mark.parametrize("drafts", [None, (shared_heads(), TREES["example"])])
def test_distill_samples_several_answers_to_a_prompt(tmp_path, drafts):
    out = tmp_path / "answers.jsonl"
    options = {"rule": Sampling(temperature=0.8), "samples": 3, "drafts": drafts}
    distilled(out, shared_backbone(), **options, conversations=CHATS[:4])
    conditions, rows = read_distilled(out)
    assert conditions["decoding"] == section_of(Sampling(temperature=0.8))
    assert Counter(tuple(row.prompt) for row in rows) == {tuple(p): 3 for p in PROMPTS[:4]}
    assert len({tuple(row.answer) for row in rows}) > 8
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:6]))
    distilled(out, shared_backbone(), **options, conversations=CHATS[:4])
    _, again = read_distilled(out)
    assert again[:5] == rows[:5]
    assert Counter(tuple(row.prompt) for row in again) == {tuple(p): 3 for p in PROMPTS[:4]}
    assert not {tuple(row.answer) for row in again[5:]} & {tuple(row.answer) for row in again[:5]}


def test_distill_samples_from_the_targets_own_distribution(tmp_path):
    out = tmp_path / "answers.jsonl"
    rule = Sampling(temperature=0.7, top_p=0.8)
    options = {"rule": rule, "samples": 400, "batch_size": 100, "max_new_tokens": 2}
    distilled(out, shared_backbone(), **options, conversations=CHATS[:1])
    _, rows = read_distilled(out)
    backbone = shared_backbone()
    logits = backbone.logits(prefill(backbone, backbone.new_cache(CONTEXT), PROMPTS[0]))
    probs = target_probs(logits, 0.7, 0.8, 0)
    counts = torch.bincount(torch.tensor([row.answer[0] for row in rows]), minlength=VOCAB)
    assert counts[probs == 0].sum() == 0
    expected = 400 * probs[probs > 0]
    assert ((counts[probs > 0] - expected).abs() < 4 * expected.sqrt() + 1).all()


def test_several_greedy_answers_are_refused():
    with pytest.raises(DataError, match="2 greedy answers to a prompt would be the same"):
        recipe_of(samples=2)


def inventive() -> Backbone:
    """A backbone whose template says "t3 <user> t1 t2", and which soon ends a turn with t1."""
    backbone = tiny_backbone(eos=ENDING)
    backbone.tokenizer.chat_template = "t3 " + TEMPLATE
    return backbone


def invented(out: Path, number: int, backbone: Backbone | None = None, **options: Any) -> None:
    distill_invented(backbone or inventive(), number, out, recipe_of(**options))


def test_prompts_can_be_the_backbones_own(tmp_path):
    out = tmp_path / "answers.jsonl"
    invented(out, 9)
    backbone = inventive()
    _, rows = read_distilled(out)
    messages = [json.loads(line)["messages"] for line in out.read_text().splitlines()[1:]]
    assert len({tuple(row.prompt) for row in rows}) == len(rows) == 9
    for row, chat in zip(rows, messages, strict=True):
        assert row.prompt == backbone.encode(chat[:1])
        assert row.answer == plain_answer(backbone, row.prompt, 12)
        assert chat[0]["role"] == "user"
        assert not {f"t{token}" for token in ENDING} & set(chat[0]["content"].split()[:-1])


def test_inventing_goes_on_where_it_stopped_and_shares_a_file(tmp_path):
    out = tmp_path / "answers.jsonl"
    recipe = {"rule": Sampling(), "samples": 2}
    invented(out, 5, **recipe)
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:-1]) + lines[-1][:9])
    invented(out, 8, **recipe)
    distilled(out, inventive(), conversations=CHATS[:2], **recipe)
    _, rows = read_distilled(out)
    assert out.read_text().splitlines(keepends=True)[:-7][: len(lines) - 1] == lines[:-1]
    assert set(Counter(tuple(row.prompt) for row in rows).values()) == {2}
    assert len(rows) == 20


def test_a_backbone_that_ends_no_turn_cannot_invent_prompts(tmp_path):
    with pytest.raises(DataError, match="ended no new user's turn within 192 tokens in 32 trials"):
        invented(tmp_path / "answers.jsonl", 2, with_eos(inventive()))
    backbone = inventive()
    for template, reason in (
        (None, "has no chat template"),
        ("t1 t2", "does not mark where a user speaks"),
        (TEMPLATE, "does not mark where a user speaks"),
    ):
        backbone.tokenizer.chat_template = template
        with pytest.raises(DataError, match=reason):
            invented(tmp_path / "other.jsonl", 2, backbone)
        assert len((tmp_path / "other.jsonl").read_text().splitlines()) == 1
        (tmp_path / "other.jsonl").unlink()


def test_distill_goes_on_where_a_kill_stopped_it(tmp_path):
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    distilled(whole)
    text = whole.read_text()
    lines = text.splitlines(keepends=True)
    for keep in (
        len(text) - 1,
        len("".join(lines[:6])) - 20,
        len("".join(lines[:3])),
        len(lines[0]),
    ):
        cut.write_text(text[:keep])
        remaining = 11 - text[:keep].count("\n")
        assert sum(answers for answers, _ in distilled(cut)) == remaining
        assert sorted(cut.read_text().splitlines()) == sorted(text.splitlines())
    assert distilled(cut) == []


def test_distill_answers_a_repeated_prompt_once(tmp_path):
    out = tmp_path / "answers.jsonl"
    assert sum(a for a, _ in distilled(out, conversations=[*CHATS[:2], CHATS[0]])) == 2
    assert sum(a for a, _ in distilled(out, conversations=CHATS[:3])) == 1
    assert len(out.read_text().splitlines()) == 4


@pytest.mark.parametrize("change", ["limit", "backbone", "template"])
def test_distill_refuses_a_file_made_under_other_conditions(tmp_path, change):
    out = tmp_path / "answers.jsonl"
    distilled(out)
    before = out.read_bytes()
    backbone, options = tiny_backbone(eos=ENDING), {}
    if change == "limit":
        options = {"max_new_tokens": 13}
    elif change == "backbone":
        backbone = tiny_backbone(seed=1)
    else:
        backbone.tokenizer.chat_template = TEMPLATE + " "
    with pytest.raises(DataError, match=f"^{out} was made under other conditions; this run has"):
        distilled(out, backbone, **options)
    assert out.read_bytes() == before
    out.write_text("my notes\n")
    with pytest.raises(DataError, match="other conditions"):
        distilled(out)
    assert out.read_text() == "my notes\n"


def test_distill_refuses_a_prompt_that_does_not_fit_before_it_answers_any(tmp_path):
    out = tmp_path / "answers.jsonl"
    long = [{"role": "user", "content": "t5 " * CONTEXT}]
    with pytest.raises(DataError, match=f"{CONTEXT + 2} tokens; the context holds {CONTEXT}"):
        distilled(out, conversations=[*CHATS, long])
    assert len(out.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}\n",
        '{"prompt": "a"}\n',
        "no json\n",
        '{"distilled": {}}\n{"prompt_ids": []}\n',
        "[]\n",
    ],
)
def test_other_files_are_not_read_as_answers(tmp_path, text):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=r"was not written by `treeopt distill`"):
        read_distilled(path)


# Prompts to train on


def test_training_prompts_are_distinct_and_fixed_by_the_seed():
    first, again = list(islice(training_prompts(), 3000)), list(islice(training_prompts(0), 3000))
    assert first == again
    assert len(set(first)) == 3000
    assert list(islice(training_prompts(1), 50)) != first[:50]
    assert not any("{" in prompt or "}" in prompt for prompt in first)
    assert all(prompt == prompt.strip() and prompt for prompt in first)
    for path in (shipped_prompts(), held_out_prompts()):
        known = {prompt.messages[0]["content"] for prompt in read_dataset(path).prompts}
        assert known.isdisjoint(first)
