"""A GGUF file as an ordinary transformers directory, converted once into the user cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from treeopt.errors import ModelError
from treeopt.files import cached, sha256_of_file

CONVERTED = "treeopt.json"  # marks a directory that this module wrote
_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types that text never spells


def convert_gguf(path: Path) -> Path:
    """Return a directory with the weights of ``path`` as bfloat16 safetensors and its tokenizer.

    Named by the file's sha256 in the user cache, so a second call costs one read of the file.
    """
    digest = sha256_of_file(path)
    return cached(f"models/{digest}", lambda directory: _convert(path, digest, directory))


def _convert(path: Path, digest: str, directory: Path) -> None:
    import gguf

    try:
        fields = gguf.GGUFReader(path).fields
    except (ValueError, IndexError, OSError) as error:
        raise ModelError(f"{path} is not a GGUF file: {error}") from error
    directory.mkdir()
    try:
        tokenizer = _tokenizer(path, {name: field.contents() for name, field in fields.items()})
        model = _dequantised(path)
    except (KeyError, IndexError, RuntimeError, ValueError) as error:
        raise ModelError(f"{path} cannot be converted: {error}") from error
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
    (directory / CONVERTED).write_text(json.dumps({"source": path.name, "sha256": digest}))


def _dequantised(path: Path) -> Any:
    """Return the model in bfloat16 as if it had never been quantised.

    transformers keeps a quantiser mark on what it unpacked and then refuses to save it; moving the
    weights into a fresh model of the same configuration leaves the mark behind.
    """
    import torch
    import transformers

    unpacked: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # releases that would keep the weights packed
        unpacked["quantization_config"] = transformers.GgufConfig(dequantize=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, **unpacked
    )
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    return plain.to(torch.bfloat16)


def _tokenizer(path: Path, fields: dict[str, Any]) -> Any:
    """Return a fast tokenizer built from the file's own vocabulary, merges and end token.

    transformers' own reading of a GGUF vocabulary may miss the pre-tokenizer (single digits) and
    the end token; llama.cpp's ids are the reference.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokens = fields["tokenizer.ggml.tokens"]
    named = {
        f"{name}_token": tokens[fields[key]]
        for name, key in (
            ("bos", "tokenizer.ggml.bos_token_id"),
            ("eos", "tokenizer.ggml.eos_token_id"),
            ("unk", "tokenizer.ggml.unknown_token_id"),
            ("pad", "tokenizer.ggml.padding_token_id"),
        )
        if key in fields
    }
    if (
        fields.get("tokenizer.ggml.model") == "gpt2"
        and fields.get("tokenizer.ggml.pre") == "smollm"
    ):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=_smollm_bpe(fields), **named)
    else:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        tokenizer.add_special_tokens(named)
    tokenizer.chat_template = fields.get("tokenizer.chat_template")
    return tokenizer


def _smollm_bpe(fields: dict[str, Any]) -> Any:
    """Return byte-level BPE with single digits, the pre-tokenizer that GGUF names ``smollm``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    special = [
        t for t, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _USER_DEFINED)
    ]
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return bpe
