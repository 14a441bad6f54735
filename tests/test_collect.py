"""Calibration: the trace against a slow recomputation, and its independence of how it was run."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import (
    CONTEXT,
    PROMPT_END,
    PROMPTS,
    TEMPLATE,
    counting_backbone,
    counting_heads,
    dataset_of,
    plain_answer,
    random_heads,
    shared_backbone,
    shared_heads,
    tiny_backbone,
    with_eos,
)

from calibration.collect import NUM_RANKS, collect
from calibration.data import Dataset, Prompt
from treeopt.errors import DataError, TraceError
from treeopt.formats.heads import OWN, SHARED
from treeopt.models.backbone import Backbone
from treeopt.models.heads import MedusaHeads
from treeopt.trace import MISSED, RankTrace

USED = PROMPTS[:7]
TOKENS = 20


def ending() -> Backbone:
    """Return the shared backbone with end tokens, so that documents differ in length."""
    return with_eos(shared_backbone(), 3, 28)


def trace_of(
    backbone: Backbone, heads: MedusaHeads, dataset: Dataset | None = None, **options: Any
) -> RankTrace:
    settings = {"max_new_tokens": TOKENS, "batch_size": 3, **options}
    return collect(backbone, heads, dataset or dataset_of(USED), **settings)


def assert_same(found: RankTrace, expected: RankTrace) -> None:
    assert np.array_equal(found.doc_start, expected.doc_start)
    assert np.array_equal(found.ranks, expected.ranks)
    for name in ("probs", "target_probs", "entropy"):
        np.testing.assert_allclose(
            getattr(found, name), getattr(expected, name), rtol=2e-3, atol=1e-4
        )


@pytest.mark.parametrize("layout", [SHARED, OWN])
def test_trace_equals_a_slow_recomputation(layout):
    backbone, heads = ending(), random_heads(shared_backbone(), 3, layout)
    trace = trace_of(backbone, heads)
    position, missed, past_end = 0, 0, 0
    for document, prompt in enumerate(USED):
        tokens = plain_answer(backbone, prompt, TOKENS)
        assert trace.doc_start[document] == position
        with torch.inference_mode():
            states = backbone.forward(torch.tensor([prompt + tokens[:-1]]), backbone.new_cache(99))[
                0, len(prompt) - 1 :
            ]
            own = (states @ backbone.lm_head.weight.T).double().softmax(-1).numpy()
            said = [heads.project(k, heads.hidden(k, states)).tolist() for k in (1, 2, 3)]
        for place, token in enumerate(tokens):
            np.testing.assert_allclose(trace.target_probs[position], own[place, token], rtol=2e-3)
            entropy = -sum(p * np.log(p) for p in own[place] if p > 0)
            np.testing.assert_allclose(trace.entropy[position], entropy, rtol=2e-3, atol=1e-4)
            for head in (1, 2, 3):
                logits = said[head - 1][place]
                order = sorted(range(len(logits)), key=lambda t: (-logits[t], t))
                rank = trace.ranks[position, head - 1]
                if place + head >= len(tokens):
                    assert rank == MISSED
                    past_end += 1
                else:
                    expected = order.index(tokens[place + head])
                    assert rank == (expected if expected < NUM_RANKS else MISSED)
                    missed += expected >= NUM_RANKS
                exact = np.exp(np.array(logits) - np.logaddexp.reduce(logits))
                np.testing.assert_allclose(
                    trace.probs[position, head - 1], exact[order[:NUM_RANKS]], rtol=2e-3, atol=1e-6
                )
            position += 1
    assert trace.num_positions == position
    assert missed > 0
    assert past_end > 0


@pytest.mark.parametrize("eos", [(), (31,)], ids=["no end", "end"])
def test_perfect_heads_have_rate_one_at_every_depth(eos):
    # Medusa divides the hits of every head by the trials of head 0, so that even perfect heads
    # seem to fade with their depth.
    backbone = counting_backbone(eos)
    prompts = [Prompt([{"role": "user", "content": f"t{token}"}]) for token in (0, 9, 20, 27)]
    dataset = Dataset("counts", "2" * 64, prompts)
    trace = trace_of(backbone, counting_heads(backbone, [1, 2, 3, 4, 5]), dataset)
    lengths = [TOKENS, TOKENS, 11, 4] if eos else [TOKENS] * 4
    assert np.diff(trace.doc_start).tolist() == lengths
    assert trace.trials().tolist() == [sum(max(0, n - k) for n in lengths) for k in range(1, 6)]
    assert (trace.hits()[:, 0] == trace.trials()).all()
    assert (trace.hits()[:, 1:] == 0).all()


def test_heads_that_look_one_place_too_far_are_reported_once():
    backbone = counting_backbone()
    prompts = [Prompt([{"role": "user", "content": f"t{token}"}]) for token in range(8)]
    dataset, warnings = Dataset("counts", "2" * 64, prompts), []
    trace_of(backbone, counting_heads(backbone, [1, 2]), dataset, on_warning=warnings.append)
    assert warnings == []
    trace = trace_of(
        backbone, counting_heads(backbone, [2, 3]), dataset, on_warning=warnings.append
    )
    assert len(warnings) == 1
    assert warnings[0].startswith("the heads look shifted by 1: ")
    assert trace.hits()[:, 0].sum() == 0
    trace_of(backbone, counting_heads(backbone, [0, 1]), dataset, on_warning=warnings.append)
    assert warnings[1].startswith("the heads look untrained: ")


def test_batch_size_changes_nothing():
    alone = trace_of(ending(), shared_heads(), batch_size=1)
    assert len(set(np.diff(alone.doc_start))) > 3
    for batch_size in (2, 100):
        assert_same(trace_of(ending(), shared_heads(), batch_size=batch_size), alone)


def test_shards_are_the_documents_of_the_whole():
    whole = trace_of(ending(), shared_heads())
    part = trace_of(ending(), shared_heads(), dataset_of(USED[2:5]))
    assert_same(part, whole.documents([2, 3, 4]))


def test_teacher_forced_answers_give_the_trace_of_generation():
    backbone = ending()
    generated = trace_of(backbone, shared_heads())
    answers = [plain_answer(backbone, prompt, TOKENS) for prompt in USED]
    prompts = [
        replace(prompt, answer_ids=answer)
        for prompt, answer in zip(dataset_of(USED).prompts, answers, strict=True)
    ]
    forced = trace_of(
        backbone,
        shared_heads(),
        replace(dataset_of(USED), prompts=prompts),
        teacher_forced=True,
    )
    assert_same(forced, generated)
    assert (generated.provenance["mode"], forced.provenance["mode"]) == (
        "generate",
        "teacher-forced",
    )


def test_teacher_forced_text_gets_the_end_token():
    backbone = with_eos(shared_backbone(), 3)
    answers = [plain_answer(backbone, prompt, 200) for prompt in USED]
    prompts = [
        replace(prompt, answer=" ".join(f"t{token}" for token in answer[:-1]))
        for prompt, answer in zip(dataset_of(USED).prompts, answers, strict=True)
    ]
    dataset = replace(dataset_of(USED), prompts=prompts)
    options = {"max_new_tokens": 170, "batch_size": 3}
    forced = trace_of(backbone, shared_heads(), dataset, teacher_forced=True, **options)
    assert_same(forced, trace_of(backbone, shared_heads(), **options))


def test_teacher_forced_answers_are_cut_at_the_limit():
    prompts = [replace(dataset_of(USED[:1]).prompts[0], answer_ids=list(range(50)))]
    dataset = replace(dataset_of(USED), prompts=prompts)
    trace = trace_of(shared_backbone(), shared_heads(), dataset, teacher_forced=True)
    assert trace.num_positions == TOKENS


def test_missing_answer_is_named():
    prompts = dataset_of(USED).prompts
    prompts[0] = replace(prompts[0], answer="t5 t6")
    dataset = replace(dataset_of(USED), prompts=prompts)
    with pytest.raises(DataError, match=r"^tiny.jsonl row \d has no answer; teacher-forced mode"):
        trace_of(shared_backbone(), shared_heads(), dataset, teacher_forced=True)


def test_provenance_names_everything_that_the_ranks_depend_on():
    backbone, heads = shared_backbone(), shared_heads()
    assert trace_of(backbone, heads).provenance == {
        "backbone": "tiny-llama-0",
        "backbone_sha256": backbone.sha256,
        "heads": "new",
        "heads_sha256": "",
        "heads_layout": "shared_lm_head",
        "data": "tiny.jsonl",
        "data_sha256": "0" * 64,
        "decoding": {"rule": "greedy"},
        "mode": "generate",
        "max_new_tokens": TOKENS,
        "dtype": "float32",
        "template_sha256": hashlib.sha256(TEMPLATE.encode()).hexdigest(),
    }


def test_progress_counts_every_document_and_token_once():
    seen: list[tuple[int, int]] = []
    trace = trace_of(ending(), shared_heads(), on_progress=lambda *counts: seen.append(counts))
    assert [sum(column) for column in zip(*seen, strict=True)] == [7, trace.num_positions]


def test_prompt_that_does_not_fit_is_refused_before_any_work(monkeypatch):
    monkeypatch.setattr(Backbone, "forward", None)
    long = dataset_of([*USED, [5] * CONTEXT + PROMPT_END])
    with pytest.raises(DataError, match=f"{CONTEXT + 2} tokens; the context holds {CONTEXT}"):
        trace_of(shared_backbone(), shared_heads(), long)


@pytest.mark.parametrize("teacher_forced", [False, True])
def test_documents_end_where_the_context_ends(teacher_forced):
    backbone = tiny_backbone(max_position_embeddings=30)
    heads = random_heads(backbone, 2)
    prompts = [
        replace(prompt, answer_ids=[5] * 50)
        for prompt in dataset_of([[4] * 20 + PROMPT_END, [4] * 9 + PROMPT_END]).prompts
    ]
    dataset = Dataset("tiny", "0" * 64, prompts)
    trace = trace_of(backbone, heads, dataset, max_new_tokens=99, teacher_forced=teacher_forced)
    assert np.diff(trace.doc_start).tolist() == [9, 20]


def test_answers_of_one_token_are_nothing_to_calibrate():
    firsts = [plain_answer(shared_backbone(), prompt, 1)[0] for prompt in USED]
    with pytest.raises(TraceError, match="every answer ended with its first token"):
        trace_of(with_eos(shared_backbone(), *firsts), shared_heads())
    some = trace_of(with_eos(shared_backbone(), firsts[0]), shared_heads())
    assert np.diff(some.doc_start)[0] == 1
    assert some.num_documents == len(USED)
