"""Medusa heads: what new ones say, their files in both layouts, and the offset check."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import (
    PROMPTS,
    VOCAB,
    own_answers,
    random_heads,
    shared_backbone,
    shared_heads,
    tiny_backbone,
    train_briefly,
)
from torch import Tensor

from treeopt.decoder.plain import answer_batch
from treeopt.errors import HeadsError
from treeopt.formats.heads import CHECKPOINT, OWN, SHARED
from treeopt.models.heads import (
    MedusaHeads,
    load_heads,
    offset_scores,
    offset_warning,
    resolve_heads,
)
from treeopt.training.loop import Plan, fit
from treeopt.training.medusa1 import HeadsTask
from treeopt.training.states import States

# The field's names, written out: 2 heads of 2 blocks.
BLOCK_KEYS = [
    "0.0.linear.bias",
    "0.0.linear.weight",
    "0.1.linear.bias",
    "0.1.linear.weight",
    "1.0.linear.bias",
    "1.0.linear.weight",
    "1.1.linear.bias",
    "1.1.linear.weight",
]
KEYS = {SHARED: BLOCK_KEYS, OWN: sorted([*BLOCK_KEYS, "0.2.weight", "1.2.weight"])}


def states(number: int = 5) -> Tensor:
    return torch.randn(number, 32, generator=torch.Generator().manual_seed(1))


def saved(path: Path, layout: str = SHARED, num_heads: int = 2) -> dict[str, Tensor]:
    """Write heads of two blocks to ``path`` and return the file's tensors."""
    random_heads(shared_backbone(), num_heads, layout, num_blocks=2).save(path)
    return load_file(path)


def refusal(path: Path) -> str:
    with pytest.raises(HeadsError) as caught:
        load_heads(path, shared_backbone())
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


@pytest.mark.parametrize("layout", [OWN, SHARED])
def test_new_heads_say_what_the_backbone_says(layout):
    backbone = shared_backbone()
    heads = MedusaHeads(3, 2, backbone, layout)
    expected = backbone.logits(states())
    for head in (1, 2, 3):
        found = heads.project(head, heads.hidden(head, states()))
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(heads.logits(states()[0], 2), expected[:1].expand(2, -1))


@pytest.mark.parametrize("layout", [OWN, SHARED])
def test_blocks_are_residual_silu(layout):
    heads = random_heads(shared_backbone(), 2, layout, num_blocks=2)
    tensors = heads.tensors()
    hidden = states()
    for block in (0, 1):
        linear = hidden @ tensors[f"1.{block}.linear.weight"].T + tensors[f"1.{block}.linear.bias"]
        hidden = hidden + linear / (1 + torch.exp(-linear))
    torch.testing.assert_close(heads.hidden(2, states()), hidden)
    expected = hidden @ shared_backbone().lm_head.weight.T
    torch.testing.assert_close(heads.project(2, hidden), expected)


@pytest.mark.parametrize("layout", [OWN, SHARED])
def test_save_and_load_round_trip_under_the_fields_names(tmp_path, layout):
    path = tmp_path / "heads.safetensors"
    heads = random_heads(shared_backbone(), 2, layout, num_blocks=2)
    heads.save(path, note="x")
    tensors = load_file(path)
    assert sorted(tensors) == KEYS[layout]
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    loaded = load_heads(path, shared_backbone())
    assert (loaded.num_heads, loaded.num_blocks, loaded.layout) == (2, 2, layout)
    assert (loaded.id, len(loaded.sha256)) == (str(path), 64)
    for name, tensor in heads.tensors().items():
        assert torch.equal(loaded.tensors()[name], tensor.half().float()), name
    found = loaded.logits(states()[0], 2)
    torch.testing.assert_close(found, heads.logits(states()[0], 2), rtol=0.02, atol=0.02)


def test_own_projections_are_used_and_not_the_backbones(tmp_path):
    path = tmp_path / "heads.safetensors"
    tensors = saved(path, OWN)
    tensors["1.2.weight"] = -tensors["1.2.weight"]
    save_file(tensors, path)
    heads = load_heads(path, shared_backbone())
    hidden = states()
    torch.testing.assert_close(heads.project(2, hidden), -heads.project(1, hidden))


def test_heads_follow_the_backbones_dtype(tmp_path):
    path = tmp_path / "heads.safetensors"
    saved(path)
    backbone = tiny_backbone()
    backbone.model.to(torch.bfloat16)
    heads = load_heads(path, backbone)
    assert {parameter.dtype for parameter in heads.parameters()} == {torch.bfloat16}
    assert heads.logits(states()[0].bfloat16(), 2).dtype == torch.bfloat16


def test_number_of_heads_comes_from_the_tensors(tmp_path):
    path = tmp_path / "heads.safetensors"
    tensors = saved(path, num_heads=3)
    save_file(tensors, path, {"medusa_num_heads": "5", "layout": OWN, "medusa_num_layers": "1"})
    heads = load_heads(path, shared_backbone())
    assert (heads.num_heads, heads.num_blocks, heads.layout) == (3, 2, SHARED)


def test_directory_with_a_checkpoint(tmp_path):
    saved(tmp_path / CHECKPOINT)
    assert CHECKPOINT == "medusa_lm_head.safetensors"
    assert load_heads(tmp_path, shared_backbone()).num_heads == 2


def test_nothing_there(tmp_path):
    missing = tmp_path / "none"
    assert refusal(missing).startswith(f"no heads at {missing}: give a safetensors file")
    assert "medusa_lm_head.safetensors" in refusal(tmp_path)


def test_heads_that_treeopt_ships_are_found_by_the_backbones_name(tmp_path, monkeypatch):
    shipped = tmp_path / "gryphon-heads.safetensors"
    saved(shipped)
    monkeypatch.setattr("treeopt.models.heads.files", lambda package: tmp_path)
    assert resolve_heads("gryphon") == shipped
    (tmp_path / "here" / "gryphon").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")  # a directory of that name, without heads
    assert resolve_heads("gryphon") == shipped
    with pytest.raises(HeadsError, match="no heads at griffin"):
        resolve_heads("griffin")


@pytest.mark.parametrize("content", [b"", b"PK\3\4 a pickle of the field", b"\x10" + b"\0" * 7])
def test_files_that_are_neither_pickle_nor_safetensors(tmp_path, content):
    path = tmp_path / "medusa_lm_head.pt"
    path.write_bytes(content)
    assert refusal(path) == f"{path} is not a torch file of plain tensors"
    path = path.with_suffix(".safetensors")
    path.write_bytes(content)
    assert refusal(path).startswith(f"{path} is not a safetensors file: ")


def test_safetensors_of_something_else(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"model.norm.weight": torch.zeros(3)}, path)
    assert refusal(path) == (
        f"{path} holds no Medusa heads: expected 0.0.linear.weight, found model.norm.weight"
    )
    save_file({}, path)
    assert refusal(path).endswith("found nothing")


@pytest.mark.parametrize(
    "name", ["0.0.linear.weight", "1.0.linear.bias", "1.1.linear.weight", "0.2.weight"]
)
def test_missing_tensor_is_named(tmp_path, name):
    path = tmp_path / "heads.safetensors"
    tensors = saved(path, OWN)
    del tensors[name]
    save_file(tensors, path)
    assert refusal(path) == f"{path} lacks the tensor {name}"


def test_missing_head_in_the_middle(tmp_path):
    path = tmp_path / "heads.safetensors"
    tensors = saved(path, num_heads=3)
    save_file({k: t for k, t in tensors.items() if not k.startswith("1.")}, path)
    assert refusal(path) == f"{path} lacks the tensor 1.0.linear.weight"


def test_a_head_far_away_is_refused_before_memory_is_taken_for_it(tmp_path):
    path = tmp_path / "heads.safetensors"
    tensors = saved(path)
    tensors["999999999.0.linear.weight"] = torch.zeros(32, 32)
    save_file(tensors, path)
    assert refusal(path) == f"{path} lacks the tensor 2.0.linear.weight"


@pytest.mark.parametrize("name", ["medusa_head.0.weight", "0.1.weight", "2.2.weight"])
def test_extra_tensor_is_named(tmp_path, name):
    path = tmp_path / "heads.safetensors"
    tensors = {**saved(path, OWN), name: torch.zeros(VOCAB, 32)}
    save_file(tensors, path)
    assert refusal(path) == f"{path} has a tensor {name} that 2 heads do not need"


@pytest.mark.parametrize(
    ("name", "shape", "needed"),
    [
        ("1.0.linear.weight", (32, 31), [32, 32]),
        ("0.1.linear.bias", (33,), [32]),
        ("1.2.weight", (VOCAB - 1, 32), [VOCAB, 32]),
    ],
)
def test_misshapen_tensor_is_named(tmp_path, name, shape, needed):
    path = tmp_path / "heads.safetensors"
    tensors = {**saved(path, OWN), name: torch.zeros(shape)}
    save_file(tensors, path)
    message = refusal(path)
    assert f"{name} has shape {list(shape)}, the backbone needs {needed}" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_tensor_that_is_not_finite_is_named(tmp_path, value):
    path = tmp_path / "heads.safetensors"
    tensors = saved(path)
    tensors["1.0.linear.bias"][7] = value
    save_file(tensors, path)
    assert refusal(path) == f"{path}: 1.0.linear.bias holds values that are not finite"


def test_heads_for_another_backbone(tmp_path):
    path = tmp_path / "heads.safetensors"
    random_heads(tiny_backbone(hidden_size=64, head_dim=16), 2).save(path)
    assert "another hidden size or vocabulary" in refusal(path)
    random_heads(tiny_backbone(vocab_size=40), 2, OWN).save(path)
    assert f"has shape [40, 32], the backbone needs [{VOCAB}, 32]" in refusal(path)
    random_heads(tiny_backbone(vocab_size=40), 2, SHARED).save(path)
    assert load_heads(path, shared_backbone()).num_heads == 2  # the file cannot tell


def test_failed_save_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    path = tmp_path / "heads.safetensors"
    saved(path)
    before = path.read_bytes()
    monkeypatch.setattr(
        "treeopt.models.heads.save_file", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        random_heads(shared_backbone(), 2, seed=9).save(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["heads.safetensors"]


# Where head 1 looks


def answer_states(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return the states and tokens of the longest answer."""
    answers = [a for ended in answer_batch(shared_backbone(), prompts, 40) for a in ended]
    best = max(answers, key=lambda answer: len(answer.tokens))
    assert best.hidden is not None
    return best.hidden, torch.tensor(best.tokens)


def test_offset_scores_by_hand():
    heads = MedusaHeads(1, 1, shared_backbone(), SHARED)
    hidden = states(8)
    own = shared_backbone().logits(hidden).argmax(-1)
    for offset in range(4):
        tokens = torch.full((8,), VOCAB - 1)
        assert VOCAB - 1 not in own
        tokens[offset:] = own[: 8 - offset]
        scores = offset_scores(heads, hidden, tokens)
        assert scores[offset] == 1.0
        assert offset_warning(scores) is None if offset == 1 else offset_warning(scores)


def test_trained_heads_are_best_one_place_ahead():
    assert offset_warning(offset_scores(shared_heads(), *answer_states(PROMPTS[:1]))) is None


def test_new_heads_look_untrained():
    heads = MedusaHeads(2, 1, shared_backbone(), SHARED).requires_grad_(False)
    scores = offset_scores(heads, *answer_states(PROMPTS[:1]))
    assert scores[0] == 1.0
    warning = offset_warning(scores)
    assert warning is not None
    assert warning.startswith("the heads look untrained: head 1 is right most often 0 places ahead")
    assert "(0: 100%, 1: " in warning


def test_heads_of_another_convention_look_shifted():
    hidden, tokens = answer_states(PROMPTS[:1])
    shifted = torch.cat([tokens[2:], torch.tensor([-1, -1])])[:, None]
    heads = MedusaHeads(1, 2, shared_backbone(), SHARED)
    data = States(hidden, shifted)
    for _ in fit(HeadsTask(heads, data, data, 0.02), Plan(epochs=150, batch_size=64)):
        pass
    warning = offset_warning(offset_scores(heads.requires_grad_(False), hidden, tokens))
    assert warning is not None
    assert warning.startswith("the heads look shifted by 1: head 1 is right most often 2 places")


def test_heads_trained_with_own_projections_guess_as_well():
    heads = train_briefly(shared_backbone(), PROMPTS[:2], layout=OWN, num_heads=1, epochs=60)
    rows = own_answers(shared_backbone(), PROMPTS[:2], 40)
    assert len(rows) == 2
    assert offset_warning(offset_scores(heads, *answer_states(PROMPTS[:1]))) is None
