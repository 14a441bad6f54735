"""Self-distillation and head training on tiny models."""

from __future__ import annotations

import json
import signal
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tiny import (
    CONTEXT,
    PROMPTS,
    TEMPLATE,
    TREES,
    VOCAB,
    dataset_of,
    own_answers,
    plain_answer,
    random_heads,
    shared_backbone,
    shared_heads,
    tiny_backbone,
    with_eos,
)
from torch import Tensor
from torch.nn import functional

from calibration.data import held_out_prompts, read_dataset, shipped_prompts
from calibration.synthetic import training_prompts
from treeopt.decoder.plain import prefill
from treeopt.decoder.rules import Sampling, section_of, target_probs
from treeopt.errors import DataError
from treeopt.formats.heads import OWN, SHARED
from treeopt.models.backbone import Backbone
from treeopt.models.heads import MedusaHeads, load_heads
from treeopt.training.distill import Distilled, Recipe, distill, distill_invented, read_distilled
from treeopt.training.run import train_heads
from treeopt.training.train import (
    DECAY,
    States,
    _FrozenCrossEntropy,
    compute_states,
    concatenate,
    train,
)

# The loss


def random_states(rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return states [rows, 12], a projection [VOCAB, 12] and targets [rows]."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, 12, generator=generator).requires_grad_(True),
        torch.randn(VOCAB, 12, generator=generator),
        torch.randint(VOCAB, (rows,), generator=generator),
    )


@pytest.mark.parametrize("rows", [1, 7, 256, 700])
def test_frozen_cross_entropy_equals_torchs(rows):
    states, weight, targets = random_states(rows)
    expected = functional.cross_entropy(states @ weight.T, targets)
    (expected_gradient,) = torch.autograd.grad(0.7 * expected, states)
    loss = _FrozenCrossEntropy.apply(states, weight, targets)
    (gradient,) = torch.autograd.grad(0.7 * loss, states)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient)


def test_frozen_cross_entropy_leaves_the_projection_as_it_is():
    states, weight, targets = random_states(9)
    before, weight = weight.clone(), weight.requires_grad_(True)
    _FrozenCrossEntropy.apply(states, weight, targets).backward()
    assert torch.equal(weight.detach(), before)
    assert weight.grad is None


def test_frozen_cross_entropy_survives_large_logits():
    states, weight, targets = random_states(5)
    large = (states.detach() * 1000).requires_grad_(True)
    loss = _FrozenCrossEntropy.apply(large, weight, targets)
    loss.backward()
    torch.testing.assert_close(loss, functional.cross_entropy(large @ weight.T, targets))
    assert torch.isfinite(large.grad).all()


def test_frozen_cross_entropy_of_a_bfloat16_projection_is_close():
    states, weight, targets = random_states(300)
    expected = functional.cross_entropy(states @ weight.T, targets)
    (expected_gradient,) = torch.autograd.grad(expected, states)
    loss = _FrozenCrossEntropy.apply(states, weight.bfloat16(), targets)
    loss.backward()
    assert states.grad.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=0.01, atol=0.01)
    torch.testing.assert_close(states.grad, expected_gradient, rtol=0.05, atol=3e-4)


# States and targets


ENDING = (3, 28)


def answered(num_prompts: int = 6) -> list[Distilled]:
    """Return answers of unlike length: some end, some are cut."""
    return own_answers(with_eos(shared_backbone(), *ENDING), PROMPTS[:num_prompts], 12)


def test_head_k_learns_the_token_k_places_after_the_emitted_one():
    rows = answered()
    assert len({len(row.answer) for row in rows}) > 2
    hidden, expected = [], []
    for row in rows:
        with torch.inference_mode():
            cache = shared_backbone().new_cache(99)
            states = shared_backbone().forward(torch.tensor([row.prompt + row.answer]), cache)[0]
        for place, emitted in enumerate(row.answer):
            state = states[len(row.prompt) - 1 + place]
            assert int(shared_backbone().logits(state).argmax()) == emitted
            targets = []
            for head in (1, 2, 3):
                after = place + head
                targets.append(row.answer[after] if after < len(row.answer) else -1)
            hidden.append(state)
            expected.append(targets)
    found = concatenate(list(compute_states(shared_backbone(), rows, 3)))
    assert len(found.hidden) == len(found.targets) == sum(len(row.answer) for row in rows)
    distance, same = torch.cdist(found.hidden, torch.stack(hidden)).min(1)
    assert distance.max() < 1e-2
    assert sorted(same.tolist()) == list(range(len(hidden)))
    assert found.targets.tolist() == [expected[index] for index in same.tolist()]


def test_batches_of_states_change_nothing():
    rows = answered()
    whole = list(compute_states(shared_backbone(), rows, 2))
    parts = list(compute_states(shared_backbone(), rows, 2, batch_tokens=40))
    assert len(whole) == 1
    assert len(parts) > 2
    torch.testing.assert_close(
        concatenate(parts).hidden, concatenate(whole).hidden, rtol=1e-3, atol=1e-3
    )
    assert torch.equal(concatenate(parts).targets, concatenate(whole).targets)


def test_nothing_to_train_on_is_refused():
    assert list(compute_states(shared_backbone(), [], 2)) == []
    with pytest.raises(DataError, match="there are no answers to train on"):
        concatenate([])


# Training


def trained(
    heads: MedusaHeads, states: States, epochs: int, learning_rate: float = 0.02, **options: Any
) -> list[Any]:
    settings = {"batch_size": 64, "seed": 0, **options}
    return list(
        train(heads, states, states, epochs=epochs, learning_rate=learning_rate, **settings)
    )


def some_states(num_heads: int = 3) -> States:
    rows = own_answers(shared_backbone(), PROMPTS[:4], 30)
    return concatenate(list(compute_states(shared_backbone(), rows, num_heads)))


@pytest.mark.parametrize("layout", [SHARED, OWN])
def test_training_lowers_the_loss_and_raises_every_heads_rate(layout):
    states = some_states()
    heads = random_heads(shared_backbone(), 3, layout)
    projections = [heads.frozen_projection(head).clone() for head in (1, 2, 3)]
    epochs = trained(heads, states, 25)
    assert [epoch.number for epoch in epochs] == list(range(1, 26))
    assert epochs[-1].loss < 0.6 * epochs[0].loss
    for head in range(3):
        assert epochs[-1].top1[head] > epochs[0].top1[head] + 0.2
        assert epochs[-1].top5[head] >= epochs[-1].top1[head]
    for head in (1, 2, 3):
        assert torch.equal(heads.frozen_projection(head), projections[head - 1])


def test_loss_is_the_decayed_sum_of_the_heads_losses():
    states = some_states()
    heads = random_heads(shared_backbone(), 3)
    (epoch,) = trained(heads, states, 1, learning_rate=0.0, batch_size=len(states.targets))
    expected = 0.0
    for head in (1, 2, 3):
        scored = states.targets[:, head - 1] >= 0
        assert not scored.all()
        logits = heads.project(head, heads.hidden(head, states.hidden[scored]))
        loss = functional.cross_entropy(logits, states.targets[scored, head - 1])
        expected += 0.8**head * loss.item()
    assert DECAY == 0.8
    assert epoch.loss == pytest.approx(expected, rel=1e-4)


def test_rates_are_counted_on_the_held_out_answers():
    states, held_out = some_states(), States(*(t[:60] for t in vars(some_states()).values()))
    heads = random_heads(shared_backbone(), 3)
    *_, epoch = train(heads, states, held_out, epochs=3, learning_rate=0.02, batch_size=64, seed=0)
    for head in (1, 2, 3):
        hits = {1: 0, 5: 0}
        scored = 0
        for hidden, targets in zip(held_out.hidden, held_out.targets.tolist(), strict=True):
            if targets[head - 1] >= 0:
                best = heads.project(head, heads.hidden(head, hidden)).topk(5).indices.tolist()
                scored += 1
                hits[1] += targets[head - 1] == best[0]
                hits[5] += targets[head - 1] in best
        assert epoch.top1[head - 1] == pytest.approx(hits[1] / scored)
        assert epoch.top5[head - 1] == pytest.approx(hits[5] / scored)


def test_the_seed_fixes_the_result():
    states = some_states()
    results = []
    for seed in (0, 0, 1):
        heads = random_heads(shared_backbone(), 2)
        trained(heads, States(states.hidden, states.targets[:, :2]), 2, seed=seed)
        results.append(heads.blocks[0][0].linear.weight.detach().clone())
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def weights_of(heads: MedusaHeads) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in heads.parameters()]


def interrupted_run(states: States, checkpoint: Path, monkeypatch, at_batch: int) -> None:
    """Train with the settings of ``trained`` until Ctrl-C comes in the ``at_batch``-th batch."""
    from treeopt.training import train as module

    backward, calls = module._backward, []

    def interrupting(*arguments: Any) -> float:
        calls.append(1)
        if len(calls) == at_batch:
            signal.raise_signal(signal.SIGINT)
        return backward(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_backward", interrupting)
        with pytest.raises(KeyboardInterrupt):
            trained(random_heads(shared_backbone(), 3), states, 3, checkpoint=checkpoint)
    assert len(calls) == at_batch  # the batch was finished, and none after it begun


@pytest.mark.parametrize("at_batch", [1, 2, 3])
def test_a_run_goes_on_where_ctrl_c_stopped_it(tmp_path, monkeypatch, at_batch):
    states, checkpoint = some_states(), tmp_path / "run"
    straight, resumed = (random_heads(shared_backbone(), 3) for _ in range(2))
    expected = trained(straight, states, 3)
    handler = signal.getsignal(signal.SIGINT)
    interrupted_run(states, checkpoint, monkeypatch, at_batch)
    assert signal.getsignal(signal.SIGINT) is handler
    assert checkpoint.exists()
    epochs = trained(resumed, states, 3, checkpoint=checkpoint)
    assert epochs == expected[-len(epochs) :]
    assert all(map(torch.equal, weights_of(straight), weights_of(resumed)))
    assert not checkpoint.exists()


def test_a_checkpoint_of_another_run_is_refused(tmp_path, monkeypatch):
    states, checkpoint = some_states(), tmp_path / "run"
    interrupted_run(states, checkpoint, monkeypatch, 2)
    heads = random_heads(shared_backbone(), 3)
    with pytest.raises(DataError, match="another seed: 0, not 1; repeat that run's command"):
        trained(heads, states, 3, checkpoint=checkpoint, seed=1)
    checkpoint.write_bytes(b"no checkpoint")
    with pytest.raises(DataError, match="is not a checkpoint of `treeopt train`"):
        trained(heads, states, 3, checkpoint=checkpoint)


def test_a_loss_that_is_no_number_stops_before_the_weights_change():
    states = some_states()
    broken = States(states.hidden.clone(), states.targets)
    broken.hidden[:] = torch.nan
    heads = random_heads(shared_backbone(), 3)
    before = weights_of(heads)
    with pytest.raises(DataError, match="the loss is nan at epoch 1, batch 1"):
        trained(heads, broken, 1)
    assert all(map(torch.equal, before, weights_of(heads)))


def test_answers_too_short_for_a_head_are_refused():
    states = some_states()
    short = States(states.hidden, states.targets.clone())
    short.targets[:, 2] = -1
    with pytest.raises(DataError, match="long enough for head 3, which needs 4 tokens"):
        trained(random_heads(shared_backbone(), 3), short, 1)


def test_epochs_are_told_apart_by_what_decoding_would_accept():
    rows = own_answers(shared_backbone(), PROMPTS[:8], 20)
    states = concatenate(list(compute_states(shared_backbone(), rows, 3)))
    epochs = trained(random_heads(shared_backbone(), 3), states, 20)
    lengths = [epoch.acceptance_length for epoch in epochs]
    assert 1 <= lengths[0] < lengths[-1] <= 4
    best = [number for number, epoch in enumerate(epochs) if epoch.best]
    assert best == [n for n in range(20) if lengths[n] > max(lengths[:n], default=0)]


# Distillation


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


# From files of answers to a checkpoint


def run(
    files: list[Path], out: Path, backbone: Backbone | None = None, **options: Any
) -> list[str]:
    messages: list[str] = []
    settings = {
        "heads": MedusaHeads(2, 2, backbone or shared_backbone(), SHARED),
        "epochs": 2,
        "learning_rate": 0.02,
        "batch_size": 32,
        "held_out": 0.2,
        "seed": 0,
        **options,
    }
    train_heads(backbone or shared_backbone(), files, out, on_message=messages.append, **settings)
    return messages


def test_train_heads_writes_a_checkpoint_that_loads(tmp_path):
    answers, more, out = (
        tmp_path / "a.jsonl",
        tmp_path / "b.jsonl",
        tmp_path / "x" / "heads.safetensors",
    )
    distilled(answers, shared_backbone())
    distilled(more, shared_backbone(), conversations=CHATS[:2])
    messages = run([answers, more], out)
    assert messages[0] == f"computing states of {12 * 12} answer tokens"
    assert [message.split(":")[0] for message in messages[1:]] == ["epoch 1", "epoch 2"]
    heads = load_heads(out, shared_backbone())
    assert (heads.num_heads, heads.num_blocks) == (2, 2)
    assert heads.layout == SHARED
    assert any(block.abs().max() > 0 for block in heads.blocks.parameters())
    with safe_open(out, "pt") as file:
        metadata = file.metadata()
    assert metadata["backbone_sha256"] == shared_backbone().sha256
    assert (metadata["answers"], metadata["tokens"], metadata["epoch"]) == ("10", "120", "2")


def test_train_heads_is_deterministic(tmp_path):
    answers = tmp_path / "a.jsonl"
    distilled(answers, shared_backbone())
    for name in "xy":
        run([answers], tmp_path / name)
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


def test_train_heads_refuses_the_answers_of_another_backbone(tmp_path):
    answers, out = tmp_path / "a.jsonl", tmp_path / "heads.safetensors"
    distilled(answers, shared_backbone())
    with pytest.raises(DataError, match=r"a\.jsonl holds the answers of tiny-llama-0, not these"):
        run([answers], out, tiny_backbone(seed=1))
    assert not out.exists()


@pytest.mark.parametrize(("number", "held_out"), [(0, 0.2), (1, 0.2), (2, 1.0)])
def test_train_heads_refuses_too_few_answers(tmp_path, number, held_out):
    answers, out = tmp_path / "a.jsonl", tmp_path / "heads.safetensors"
    distilled(answers, shared_backbone(), conversations=CHATS[:number])
    with pytest.raises(DataError, match=f"^{number} answers are too few to train on"):
        run([answers], out, held_out=held_out)
    assert not out.exists()
