"""Training the backbone together with the heads, on tiny models."""

from __future__ import annotations

import math
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import (
    PROMPTS,
    own_answers,
    plain_answer,
    random_heads,
    tiny_backbone,
)
from torch import Tensor
from torch.nn import functional

from treeopt.errors import DataError, ModelError
from treeopt.formats.heads import SHARED
from treeopt.models.backbone import Backbone, load_backbone
from treeopt.models.heads import MedusaHeads, load_heads
from treeopt.training.distill import Distilled
from treeopt.training.loop import Plan, fit
from treeopt.training.losses import DECAY
from treeopt.training.medusa2 import HEADS_WEIGHT, Adapter, Answers, JointTask
from treeopt.training.processes import ALONE
from treeopt.training.run import Tuning, train_heads
from treeopt.training.states import compute_states

pytest.importorskip("peft", reason="peft is an optional extra")

NUM_HEADS = 2


def task_of(
    heads: MedusaHeads | None = None, backbone: Backbone | None = None, **options: Any
) -> JointTask:
    """Return a task on a backbone of its own, whose adapter drops nothing out."""
    backbone = backbone or tiny_backbone()
    rows = own_answers(backbone, PROMPTS[:5], 20)
    answers = Answers(rows, compute_states(backbone, rows, NUM_HEADS))
    settings = {"heads_rate": 0.02, "backbone_rate": 0.005, "seed": 0, **options}
    settings.setdefault("adapter", Adapter(rank=4, alpha=8, dropout=0.0))
    heads = heads or MedusaHeads(NUM_HEADS, 1, backbone, SHARED)
    return JointTask(backbone, heads, answers, answers, **settings)


def shaken(task: JointTask) -> JointTask:
    """Give the adapter random weights; a new one changes nothing."""
    generator = torch.Generator().manual_seed(3)
    for _, parameters in task.parameters[1:]:
        for parameter in parameters:
            parameter.data.normal_(0, 0.05, generator=generator)
    return task


def reference_loss(task: JointTask, rows: list[Distilled], scale: float) -> Tensor:
    """Return KL(original ‖ tuned) + scale · Σ 0.8^k CE_k from whole logits, one row at a time."""
    head_sum, kl, counts = 0.0, 0.0, torch.zeros(NUM_HEADS)
    losses: list[list[Tensor]] = [[] for _ in range(NUM_HEADS)]
    for row in rows:
        tokens = torch.tensor([row.prompt + row.answer[:-1]])
        states = task.backbone.model.model(tokens).last_hidden_state[0, len(row.prompt) - 1 :]
        with torch.no_grad(), task.tuned.disable_adapter():
            original = task.backbone.model(tokens).logits[0, len(row.prompt) - 1 :]
        tuned = task.backbone.lm_head(states).log_softmax(-1)
        kl = kl + functional.kl_div(tuned, original.softmax(-1), reduction="sum")
        for head in range(1, NUM_HEADS + 1):
            wanted = torch.tensor(row.answer[head:])
            guesses = task.heads.project(head, task.heads.hidden(head, states[: len(wanted)]))
            losses[head - 1].append(functional.cross_entropy(guesses, wanted, reduction="sum"))
            counts[head - 1] += len(wanted)
    for head in range(1, NUM_HEADS + 1):
        head_sum = head_sum + DECAY**head * sum(losses[head - 1]) / counts[head - 1]
    return kl / sum(len(row.answer) for row in rows) + scale * head_sum


def gradients(task: JointTask) -> list[Tensor]:
    found = [p.grad.clone() for _, parameters in task.parameters for p in parameters]
    for _, parameters in task.parameters:
        for parameter in parameters:
            parameter.grad = None
    return found


@pytest.mark.parametrize("forward_tokens", [40, 1024])
def test_the_loss_and_its_gradients_are_the_papers(forward_tokens):
    backbone = tiny_backbone()
    task = shaken(
        task_of(random_heads(backbone, NUM_HEADS), backbone, forward_tokens=forward_tokens)
    )
    batch = torch.tensor([4, 1, 2])
    loss = task.backward(batch, 0.5, ALONE)
    found = gradients(task)
    expected = reference_loss(task, [task.learned.rows[i] for i in batch], HEADS_WEIGHT)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    for ours, theirs in zip(found, gradients(task), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("progress", [0.0, 0.3, 1.0])
def test_new_heads_come_in_along_a_sine(progress):
    task = shaken(task_of())
    batch = torch.tensor([0, 1])
    scale = HEADS_WEIGHT * math.sin(math.pi / 2 * progress)
    expected = reference_loss(task, task.learned.rows[:2], scale)
    assert task.backward(batch, progress, ALONE) == pytest.approx(expected.item(), rel=1e-4)


def test_a_new_adapter_changes_nothing():
    score = task_of().score()
    assert score.kl == pytest.approx(0, abs=1e-5)
    assert score.agreement == 1


def test_training_makes_heads_better_and_says_how_far_the_backbone_went():
    epochs = list(fit(task_of(), Plan(epochs=15, batch_size=3)))
    first, last = epochs[0].score, epochs[-1].score
    assert all(b > a for a, b in zip(first.top1, last.top1, strict=True))
    assert last.kl > first.kl > 0
    assert 0.5 < last.agreement <= 1


def test_the_backbones_own_weights_and_its_lm_head_stay():
    task = task_of()
    before = {n: p.clone() for n, p in task.tuned.named_parameters() if not p.requires_grad}
    learned = [p.clone() for _, parameters in task.parameters for p in parameters]
    list(fit(task, Plan(epochs=1, batch_size=3)))
    assert any("lm_head" in name for name in before)
    for name, parameter in task.tuned.named_parameters():
        assert parameter.requires_grad == ("lora" in name)
        assert name not in before or torch.equal(parameter, before[name])
    after = [p for _, parameters in task.parameters for p in parameters]
    assert not all(map(torch.equal, learned, after))


def test_a_run_goes_on_where_ctrl_c_stopped_it(tmp_path, monkeypatch):
    plan = Plan(epochs=2, batch_size=2, checkpoint=tmp_path / "run")
    straight = task_of()
    expected = list(fit(straight, Plan(epochs=2, batch_size=2)))
    backward, calls = JointTask.backward, []

    def interrupting(*arguments: Any) -> float:
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return backward(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(JointTask, "backward", interrupting)
        with pytest.raises(KeyboardInterrupt):
            list(fit(task_of(), plan))
    resumed = task_of()
    assert list(fit(resumed, plan)) == expected
    for ours, theirs in zip(resumed.parameters, straight.parameters, strict=True):
        assert all(map(torch.equal, ours[1], theirs[1]))


def test_a_run_with_another_adapter_is_not_gone_on_with(tmp_path):
    plan = Plan(epochs=1, batch_size=2, checkpoint=tmp_path / "run")
    epochs = fit(task_of(), replace(plan, epochs=2))
    next(epochs), next(epochs)  # the checkpoint of the first epoch is written by now
    other = task_of(adapter=Adapter(rank=2, alpha=8, dropout=0.0))
    with pytest.raises(DataError, match="is of a run with another adapter"):
        list(fit(other, replace(plan, epochs=2)))


def saved(backbone: Backbone, directory: Path) -> Backbone:
    backbone.model.save_pretrained(directory)
    backbone.tokenizer.save_pretrained(directory)
    return load_backbone(str(directory), "cpu", "float32")


def test_the_tuned_backbone_loads_and_says_what_it_comes_from(tmp_path):
    from treeopt.training.distill import Recipe, distill

    backbone = saved(tiny_backbone(), tmp_path / "original")
    answers, out = tmp_path / "a.jsonl", tmp_path / "heads.safetensors"
    chats = [[{"role": "user", "content": f"t{n} t{n + 1}"}] for n in range(8)]
    distill(backbone, chats, answers, Recipe(max_new_tokens=12, batch_size=4))
    messages: list[str] = []
    train_heads(
        backbone,
        [answers],
        out,
        heads=MedusaHeads(2, 1, backbone, SHARED),
        plan=Plan(epochs=3, batch_size=2),
        learning_rate=0.02,
        held_out=0.3,
        tuning=Tuning(tmp_path / "tuned", 0.02),
        on_message=messages.append,
    )
    assert "KL 0." in messages[1]
    assert messages[-1].startswith(f"{tmp_path / 'tuned'} is lossy with respect to {backbone.id}:")
    names = {"a.jsonl", "original", "tuned", out.name, f"{out.name}.adapter"}
    assert {path.name for path in tmp_path.iterdir()} == names
    tuned = load_backbone(str(tmp_path / "tuned"), "cpu", "float32")
    assert tuned.tuned_from == backbone.id
    assert tuned.sha256 != backbone.sha256
    assert load_heads(out, tuned).num_heads == 2
    assert (tmp_path / f"{out.name}.adapter" / "adapter_model.safetensors").is_file()
    again = load_backbone(str(tmp_path / "original"), "cpu", "float32")
    assert again.tuned_from is None
    assert plain_answer(again, PROMPTS[0], 12) != []


def test_tuning_without_peft_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ModelError, match=r"needs peft; `pip install treeopt\[lora\]` brings it"):
        task_of()
