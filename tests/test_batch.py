"""Many prompts at once: every one gets what it gets alone, whatever its neighbours do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import (
    CONTEXT,
    PROMPTS,
    TREES,
    plain_answer,
    random_heads,
    shared_backbone,
    shared_heads,
    tiny_backbone,
    tree_answer,
    with_eos,
)

from treeopt.decoder.rules import Sampling, Typical
from treeopt.decoder.tree import Emitted, StepLog, TreeDecoder
from treeopt.errors import DataError
from treeopt.models.backbone import Backbone


def together(
    decoder: TreeDecoder, prompts: list[list[int]], limit: int, batch_size: int, **options: Any
) -> tuple[list[list[int]], dict[int, Exception], list[Emitted]]:
    """Return the answers in order of the prompts, the errors, and everything as it came."""
    answers: list[list[int]] = [[] for _ in prompts]
    errors: dict[int, Exception] = {}
    everything = list(decoder.decode_many(prompts, limit, batch_size, **options))
    for emitted in everything:
        answers[emitted.prompt] += emitted.tokens
        if emitted.error:
            errors[emitted.prompt] = emitted.error
    ended = [emitted.prompt for emitted in everything if emitted.ended]
    assert sorted(ended) == list(range(len(prompts)))  # everyone ends, once
    return answers, errors, everything


@pytest.mark.parametrize("batch_size", [1, 2, 5, 50])
@pytest.mark.parametrize("name", ["root only", "chain", "gaps", "wide"])
def test_every_row_equals_its_plain_decode(name, batch_size):
    backbone = with_eos(shared_backbone(), 3, 28)  # rows end at unlike steps and are refilled
    decoder = TreeDecoder(backbone, shared_heads(), TREES[name])
    prompts = PROMPTS[:11]
    answers, errors, _ = together(decoder, prompts, 30, batch_size)
    assert not errors
    assert answers == [plain_answer(backbone, prompt, 30) for prompt in prompts]
    assert len({len(answer) for answer in answers}) > 3


def test_rows_end_at_the_contexts_end_as_plain_decoding_does():
    backbone = tiny_backbone(max_position_embeddings=40)
    decoder = TreeDecoder(backbone, random_heads(backbone, 4), TREES["wide"])
    prompts = [(PROMPTS[0] * 9)[:length] for length in (39, 30, 5, 12, 38, 7, 9)]
    answers, _, _ = together(decoder, prompts, 99, 3)
    assert answers == [plain_answer(backbone, prompt, 99) for prompt in prompts]


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "qwen3", "gpt_neox"])
def test_other_architectures(kind):
    changes = {"gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4}, "qwen3": {"head_dim": 8}}
    backbone = tiny_backbone(kind, **changes.get(kind, {}))
    decoder = TreeDecoder(backbone, random_heads(backbone, 3), TREES["gaps"])
    answers, _, _ = together(decoder, PROMPTS[:6], 15, 4)
    assert answers == [plain_answer(backbone, prompt, 15) for prompt in PROMPTS[:6]]


def test_a_place_is_refilled_while_its_neighbours_go_on():
    backbone = with_eos(shared_backbone(), 3, 28)
    decoder = TreeDecoder(backbone, shared_heads(), TREES["example"])
    *_, everything = together(decoder, PROMPTS[:9], 30, 3)
    order = [emitted.prompt for emitted in everything]
    first_end = next(i for i, emitted in enumerate(everything) if emitted.ended)
    assert set(order[: first_end + 1]) == {0, 1, 2}
    # the next prompt starts before the other two end
    ends = {emitted.prompt: i for i, emitted in enumerate(everything) if emitted.ended}
    assert order.index(3) < max(ends[prompt] for prompt in (0, 1, 2))


def test_one_bad_prompt_does_not_take_the_others_down():
    decoder = TreeDecoder(shared_backbone(), shared_heads(), TREES["example"])
    prompts = [PROMPTS[0], [], PROMPTS[1], [1] * CONTEXT, PROMPTS[2]]
    answers, errors, _ = together(decoder, prompts, 12, 2)
    assert {index: str(error) for index, error in errors.items()} == {
        1: "the prompt is empty",
        3: f"the prompt has {CONTEXT} tokens; the context holds {CONTEXT}",
    }
    for index in (0, 2, 4):
        assert answers[index] == plain_answer(shared_backbone(), prompts[index], 12)


@pytest.mark.parametrize("when", ["prompt", "step"])
def test_logits_that_are_not_numbers_end_their_row_only(when, monkeypatch):
    backbone = shared_backbone()
    whole = plain_answer(backbone, PROMPTS[1], 12)
    bad = PROMPTS[1][-1] if when == "prompt" else whole[4]
    plain_rows = [plain_answer(backbone, prompt, 12) for prompt in PROMPTS[:3]]
    forward = Backbone.forward

    def damaged(self: Backbone, ids: Any, cache: Any, *rest: Any) -> Any:
        hidden = forward(self, ids, cache, *rest)
        if when == "prompt":
            hit = ids.shape[1] == len(PROMPTS[1]) and ids[0].tolist() == PROMPTS[1]
            return hidden * float("nan") if hit else hidden
        hidden = hidden.clone()
        if len(ids) > 1:
            hidden[1][ids[1] == bad] = float("nan")
        return hidden

    monkeypatch.setattr(Backbone, "forward", damaged)
    decoder = TreeDecoder(backbone, shared_heads(), TREES["example"])
    answers, errors, _ = together(decoder, PROMPTS[:3], 12, 3)
    assert list(errors) == [1]
    assert isinstance(errors[1], DataError)
    assert "logits are not numbers" in str(errors[1])
    assert answers[1] == whole[: len(answers[1])]
    assert [answers[0], answers[2]] == [plain_rows[0], plain_rows[2]]


@pytest.mark.parametrize("candidates", ["top", "sampled"])
def test_sampled_tokens_depend_on_the_seed_and_the_prompts_place_only(candidates):
    rule = Sampling(temperature=1.3, top_p=0.95, candidates=candidates)
    backbone, heads = shared_backbone(), shared_heads()
    found = {}
    for seed, batch_size in ((0, 1), (0, 4), (0, 50), (1, 4)):
        decoder = TreeDecoder(backbone, heads, TREES["gaps"], rule, seed)
        found[seed, batch_size], _, _ = together(decoder, PROMPTS[:7], 20, batch_size)
    assert found[0, 1] == found[0, 4] == found[0, 50]
    assert found[0, 4] != found[1, 4]
    assert found[0, 1] != [plain_answer(backbone, prompt, 20) for prompt in PROMPTS[:7]]


@pytest.mark.parametrize("rule", [Sampling(1e-4), Sampling(top_k=1), Sampling(1.0, top_p=1e-6)])
@pytest.mark.parametrize("candidates", ["top", "sampled"])
def test_sampling_without_freedom_is_greedy(rule, candidates):
    rule = Sampling(rule.temperature, rule.top_p, rule.top_k, candidates)
    decoder = TreeDecoder(shared_backbone(), shared_heads(), TREES["wide"], rule)
    for prompt in PROMPTS[:3]:
        answer, log = tree_answer(decoder, prompt, 30)
        assert answer == plain_answer(shared_backbone(), prompt, 30)
        assert max(log.num_accepted) > 0


def test_typical_acceptance_of_the_likeliest_tokens_only_is_greedy():
    backbone, heads = shared_backbone(), shared_heads()
    strict = TreeDecoder(backbone, heads, TREES["wide"], Typical(1.0, 1e6, temperature=1e-4))
    lax = TreeDecoder(backbone, heads, TREES["wide"], Typical(1e-6, 1e-6, temperature=2.0))
    for prompt in PROMPTS[:3]:
        expected = plain_answer(backbone, prompt, 30)
        assert tree_answer(strict, prompt, 30)[0][0] == expected[0]
        answer, log = tree_answer(lax, prompt, 30)
        assert len(answer) == 30
        assert set(log.num_accepted[:-1]) == {TREES["wide"].depth}  # everything is accepted


def test_stop_ends_an_answer_with_the_token_it_is_called_for():
    backbone = shared_backbone()
    decoder = TreeDecoder(backbone, shared_heads(), TREES["wide"])
    plain_rows = [plain_answer(backbone, prompt, 30) for prompt in PROMPTS[:4]]
    seen: list[list[int]] = [[] for _ in plain_rows]

    def stop(prompt: int, token: int) -> bool:
        seen[prompt].append(token)
        return len(seen[prompt]) == 5 + prompt

    answers, _, _ = together(decoder, PROMPTS[:4], 30, 3, stop=stop)
    assert answers == seen == [row[: 5 + index] for index, row in enumerate(plain_rows)]


def test_logs_tell_what_each_prompts_steps_did():
    decoder = TreeDecoder(shared_backbone(), shared_heads(), TREES["gaps"])
    logs = [StepLog() for _ in range(5)]
    answers, _, _ = together(decoder, PROMPTS[:5], 25, 2, logs=logs)
    for prompt, answer, log in zip(PROMPTS[:5], answers, logs, strict=True):
        alone = tree_answer(decoder, prompt, 25)[1]
        assert (log.num_accepted, log.nodes) == (alone.num_accepted, alone.nodes)
        assert len(log.step_s) == len(log.nodes) == len(log.num_accepted)
        assert sum(log.phase_s.values()) == pytest.approx(sum(log.step_s))
        assert 24 <= sum(log.num_accepted) + len(log.num_accepted) <= 25
        assert len(answer) == 25


def test_no_prompts_is_no_work():
    decoder = TreeDecoder(shared_backbone(), shared_heads(), TREES["example"])
    assert list(decoder.decode_many([], 5, 4)) == []


def test_sampled_text_has_the_backbones_own_distribution():
    """The second and third token of many answers, against the exact probabilities."""
    backbone = tiny_backbone(vocab_size=12, initializer_range=0.25)
    rule_of = {name: Sampling(0.8, candidates=name) for name in ("top", "sampled")}
    prompt, draws = [3, 1, 4], 4000
    with torch.inference_mode():
        exact = torch.zeros(12, 12)
        first = _next(backbone, [prompt], 0.8)[0]
        for token in range(12):
            exact[token] = first[token] * _next(backbone, [[*prompt, token]], 0.8)[0]
    for rule in rule_of.values():
        decoder = TreeDecoder(backbone, random_heads(backbone, 2), TREES["star"], rule)
        answers, _, _ = together(decoder, [prompt] * draws, 2, 500)
        counts = torch.zeros(12, 12)
        for a, b in answers:
            counts[a, b] += 1
        expected = exact * draws
        many = expected >= 5
        statistic = ((counts - expected)[many] ** 2 / expected[many]).sum()
        rest = (counts[~many].sum() - expected[~many].sum()) ** 2 / expected[~many].sum()
        freedom = int(many.sum())
        p_value = torch.special.gammaincc(torch.tensor(freedom / 2), (statistic + rest) / 2)
        assert p_value > 1e-3


def _next(backbone: Backbone, prompts: list[list[int]], temperature: float) -> torch.Tensor:
    """Return the distribution of the next token after each prompt."""
    logits = backbone.model(torch.tensor(prompts)).logits[:, -1]
    return (logits / temperature).softmax(-1)
