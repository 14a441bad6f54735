"""Head training on tiny models."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tiny import (
    ENDING,
    PROMPTS,
    VOCAB,
    dataset_of,
    own_answers,
    random_heads,
    shared_backbone,
    tiny_backbone,
    with_eos,
)
from torch import Tensor
from torch.nn import functional

from treeopt.errors import DataError
from treeopt.formats.heads import OWN, SHARED
from treeopt.models.backbone import Backbone
from treeopt.models.heads import MedusaHeads, load_heads
from treeopt.training.distill import Distilled, Recipe, distill
from treeopt.training.loop import Epoch, Plan, fit
from treeopt.training.losses import DECAY, cross_entropy, divergence
from treeopt.training.medusa1 import HeadsTask
from treeopt.training.run import train_heads
from treeopt.training.states import States, compute_states

# The losses


def random_states(rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return states [rows, 12], a projection [VOCAB, 12], targets [rows], a teacher's states."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, 12, generator=generator).requires_grad_(True),
        torch.randn(VOCAB, 12, generator=generator).requires_grad_(True),
        torch.randint(VOCAB, (rows,), generator=generator),
        torch.randn(rows, 12, generator=generator),
    )


def torchs_divergence(states: Tensor, weight: Tensor, teacher: Tensor) -> Tensor:
    student = (states @ weight.T).log_softmax(-1)
    wanted = (teacher @ weight.detach().T).softmax(-1)
    return functional.kl_div(student, wanted, reduction="sum")


@pytest.mark.parametrize("rows", [1, 7, 256, 700])
def test_cross_entropy_equals_torchs(rows):
    states, weight, targets, _ = random_states(rows)
    expected = functional.cross_entropy(states @ weight.T, targets, reduction="sum")
    found = cross_entropy(states, weight, targets, torch.float32)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(
        torch.autograd.grad(0.7 * found, (states, weight)),
        torch.autograd.grad(0.7 * expected, (states, weight)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 7, 256, 700])
def test_divergence_equals_torchs(rows):
    states, weight, _, teacher = random_states(rows)
    expected = torchs_divergence(states, weight, teacher)
    found = divergence(states, weight, teacher, torch.float32)
    torch.testing.assert_close(found, expected)
    (ours,) = torch.autograd.grad(0.7 * found, states)
    (theirs,) = torch.autograd.grad(0.7 * expected, states)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_model_does_not_diverge_from_itself():
    states, weight, _, _ = random_states(9)
    found = divergence(states, weight, states.detach().clone(), torch.float32)
    found.backward()
    assert abs(found.item()) < 1e-5
    assert states.grad.abs().max() < 1e-6


def test_a_frozen_projection_stays_as_it_is():
    states, weight, targets, _ = random_states(9)
    before, weight = weight.detach().clone(), weight.detach()
    cross_entropy(states, weight, targets, torch.float32).backward()
    assert torch.equal(weight, before)
    assert weight.grad is None


def test_cross_entropy_survives_large_logits():
    states, weight, targets, _ = random_states(5)
    large = (states.detach() * 1000).requires_grad_(True)
    loss = cross_entropy(large, weight, targets, torch.float32)
    loss.backward()
    expected = functional.cross_entropy(large @ weight.T, targets, reduction="sum")
    torch.testing.assert_close(loss, expected)
    assert torch.isfinite(large.grad).all()


def test_cross_entropy_in_bfloat16_is_close():
    states, weight, targets, _ = random_states(300)
    expected = functional.cross_entropy(states @ weight.T, targets)
    (expected_gradient,) = torch.autograd.grad(expected, states)
    loss = cross_entropy(states, weight, targets, torch.bfloat16) / 300
    loss.backward()
    assert states.grad.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=0.01, atol=0.01)
    torch.testing.assert_close(states.grad, expected_gradient, rtol=0.05, atol=3e-4)


# States and targets


def answered(num_prompts: int = 6) -> list[Distilled]:
    """Return answers of unlike length: some end, some are cut."""
    return own_answers(with_eos(shared_backbone(), *ENDING), PROMPTS[:num_prompts], 12)


def test_head_k_learns_the_token_k_places_after_the_emitted_one():
    rows = answered()
    assert len({len(row.answer) for row in rows}) > 2
    found = compute_states(shared_backbone(), rows, 3)
    assert len(found.hidden) == len(found.targets) == sum(len(row.answer) for row in rows)
    position = 0
    for row in rows:
        with torch.inference_mode():
            cache = shared_backbone().new_cache(99)
            states = shared_backbone().forward(torch.tensor([row.prompt + row.answer]), cache)[0]
        for place, emitted in enumerate(row.answer):
            state = states[len(row.prompt) - 1 + place]
            assert int(shared_backbone().logits(state).argmax()) == emitted
            after = (row.answer + 3 * [-1])[place + 1 : place + 4]
            torch.testing.assert_close(found.hidden[position], state, rtol=1e-3, atol=1e-3)
            assert found.targets[position].tolist() == after
            position += 1


def test_batches_of_states_change_nothing():
    rows = answered()
    whole = compute_states(shared_backbone(), rows, 2)
    parts = compute_states(shared_backbone(), rows, 2, batch_tokens=40)
    torch.testing.assert_close(parts.hidden, whole.hidden, rtol=1e-3, atol=1e-3)
    assert torch.equal(parts.targets, whole.targets)


def test_states_in_a_file_are_computed_once(tmp_path, monkeypatch):
    rows, file = answered(), tmp_path / "new" / "states"
    expected = compute_states(shared_backbone(), rows, 2)
    first = compute_states(shared_backbone(), rows, 2, file)
    assert file.stat().st_size == first.hidden.numel() * 4
    monkeypatch.setattr(Backbone, "forward", None)
    again = compute_states(shared_backbone(), rows, 2, file)
    for found in (first, again):
        assert torch.equal(found.hidden, expected.hidden)
        assert torch.equal(found.targets, expected.targets)


def test_a_disk_too_small_for_the_states_is_refused(tmp_path, monkeypatch):
    rows = answered()
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(DataError, match=r"0\.0 GB are free; --max-tokens 7 would fit"):
        compute_states(shared_backbone(), rows, 2, tmp_path / "states")
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_train_on_is_refused():
    with pytest.raises(DataError, match="there are no answers to train on"):
        compute_states(shared_backbone(), [], 2)


# Training


def trained(
    heads: MedusaHeads, states: States, epochs: int, learning_rate: float = 0.02, **options: Any
) -> list[Epoch]:
    plan = Plan(**{"epochs": epochs, "batch_size": 64, **options})
    return list(fit(HeadsTask(heads, states, states, learning_rate), plan))


def some_states(num_heads: int = 3) -> States:
    rows = own_answers(shared_backbone(), PROMPTS[:4], 30)
    return compute_states(shared_backbone(), rows, num_heads)


@pytest.mark.parametrize("layout", [SHARED, OWN])
def test_training_lowers_the_loss_and_raises_every_heads_rate(layout):
    states = some_states()
    heads = random_heads(shared_backbone(), 3, layout)
    projections = [heads.projection_weight(head).clone() for head in (1, 2, 3)]
    epochs = trained(heads, states, 25)
    assert [epoch.number for epoch in epochs] == list(range(1, 26))
    assert epochs[-1].loss < 0.6 * epochs[0].loss
    first, last = epochs[0].score, epochs[-1].score
    for head in range(3):
        assert last.top1[head] > first.top1[head] + 0.2
        assert last.top5[head] >= last.top1[head]
        same = torch.equal(heads.projection_weight(head + 1), projections[head])
        assert same == (layout == SHARED)  # own projections learn, the backbone's does not


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
    *_, epoch = fit(HeadsTask(heads, states, held_out, 0.02), Plan(epochs=3, batch_size=64))
    for head in (1, 2, 3):
        hits = {1: 0, 5: 0}
        scored = 0
        for hidden, targets in zip(held_out.hidden, held_out.targets.tolist(), strict=True):
            if targets[head - 1] >= 0:
                best = heads.project(head, heads.hidden(head, hidden)).topk(5).indices.tolist()
                scored += 1
                hits[1] += targets[head - 1] == best[0]
                hits[5] += targets[head - 1] in best
        assert epoch.score.top1[head - 1] == pytest.approx(hits[1] / scored)
        assert epoch.score.top5[head - 1] == pytest.approx(hits[5] / scored)


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
    backward, calls = HeadsTask.backward, []

    def interrupting(*arguments: Any) -> float:
        calls.append(1)
        if len(calls) == at_batch:
            signal.raise_signal(signal.SIGINT)
        return backward(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(HeadsTask, "backward", interrupting)
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
    states = compute_states(shared_backbone(), rows, 3)
    epochs = trained(random_heads(shared_backbone(), 3), states, 20)
    lengths = [epoch.score.acceptance_length for epoch in epochs]
    assert 1 <= lengths[0] < lengths[-1] <= 4
    best = [number for number, epoch in enumerate(epochs) if epoch.best]
    assert best == [n for n in range(20) if lengths[n] > max(lengths[:n], default=0)]


# From files of answers to a checkpoint


def answers_file(path: Path, number: int = 10) -> Path:
    """Write the shared backbone's answers to the first prompts."""
    chats = [prompt.messages for prompt in dataset_of(PROMPTS[:number]).prompts]
    distill(shared_backbone(), chats, path, Recipe(max_new_tokens=12, batch_size=4))
    return path


def run(
    files: list[Path], out: Path, backbone: Backbone | None = None, **options: Any
) -> list[str]:
    messages: list[str] = []
    settings = {
        "heads": MedusaHeads(2, 2, backbone or shared_backbone(), SHARED),
        "plan": Plan(epochs=2, batch_size=32),
        "learning_rate": 0.02,
        "held_out": 0.2,
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
    answers_file(answers)
    answers_file(more, 2)
    messages = run([answers, more], out)
    assert sorted(path.name for path in out.parent.iterdir()) == ["heads.safetensors"]
    assert messages[0] == f"computing states of {12 * 12} answer tokens"
    assert [message.split(":")[0] for message in messages[1:]] == ["epoch 1", "epoch 2"]
    heads = load_heads(out, shared_backbone())
    assert (heads.num_heads, heads.num_blocks) == (2, 2)
    assert heads.layout == SHARED
    assert any(block.abs().max() > 0 for block in heads.blocks.parameters())
    with safe_open(out, "pt") as file:
        metadata = file.metadata()
    assert metadata["trained_on_sha256"] == shared_backbone().sha256
    assert (metadata["answers"], metadata["tokens"], metadata["epoch"]) == ("10", "120", "2")


def test_train_heads_is_deterministic(tmp_path):
    answers = tmp_path / "a.jsonl"
    answers_file(answers)
    for name in "xy":
        run([answers], tmp_path / name)
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


def test_train_heads_refuses_the_answers_of_another_backbone(tmp_path):
    answers, out = tmp_path / "a.jsonl", tmp_path / "heads.safetensors"
    answers_file(answers)
    with pytest.raises(DataError, match=r"a\.jsonl holds the answers of tiny-llama-0, not these"):
        run([answers], out, tiny_backbone(seed=1))
    assert not out.exists()


@pytest.mark.parametrize(("number", "held_out"), [(0, 0.2), (1, 0.2), (2, 1.0)])
def test_train_heads_refuses_too_few_answers(tmp_path, number, held_out):
    answers, out = tmp_path / "a.jsonl", tmp_path / "heads.safetensors"
    answers_file(answers, number)
    with pytest.raises(DataError, match=f"^{number} answers are too few to train on"):
        run([answers], out, held_out=held_out)
    assert not out.exists()
