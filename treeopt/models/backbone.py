"""The backbone: a transformers causal LM whose output treeopt preserves.

Legend: ``B`` rows, ``n`` new tokens, ``d`` hidden size, ``V`` vocabulary size.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treeopt.errors import ModelError
from treeopt.files import sha256_of_file
from treeopt.models import embedded
from treeopt.models.cache import KVCache, RaggedCache
from treeopt.models.compiled import CompiledForwards, capacity_for, compile_forwards
from treeopt.models.gguf import convert_gguf
from treeopt.models.packed import packed_twin
from treeopt.provenance import library_versions

Message = dict[str, str]


@dataclass(frozen=True)
class Backbone:
    """A loaded model, its tokenizer, and the few facts about them that decoding needs.

    ``id`` is what the user named; ``sha256`` identifies the weights and goes into presets.
    ``packed`` is a faster twin of ``model``, see ``treeopt.models.packed``; ``compiled`` are calls
    of a few shapes that are faster still, see ``treeopt.models.compiled``.
    """

    id: str
    sha256: str
    model: Any
    tokenizer: Any
    eos_ids: frozenset[int]
    packed: Any = None
    compiled: CompiledForwards | None = None

    @property
    def runner(self) -> Any:
        """What computes: the packed twin of ``model`` where there is one."""
        return self.model if self.packed is None else self.packed

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are."""
        return self.model.dtype

    @property
    def hidden_size(self) -> int:
        """Length of the vector that heads and LM head read."""
        return self.lm_head.weight.shape[1]

    @property
    def vocab_size(self) -> int:
        """Number of logits, padding rows of the LM head included."""
        return self.lm_head.weight.shape[0]

    @property
    def context_length(self) -> int:
        """Most tokens, prompt and answer together, that the model was made for."""
        return self.model.config.max_position_embeddings

    @property
    def lm_head(self) -> torch.nn.Linear:
        """The vocabulary projection."""
        return self.model.get_output_embeddings()

    @property
    def tuned_from(self) -> str | None:
        """What this backbone was before `treeopt train --tune-backbone`, if it was."""
        return getattr(self.model.config, "treeopt", {}).get("tuned_from")

    def machine(self) -> dict[str, Any]:
        """Return what a measured time depends on, beside the work: for cost files and reports."""
        return {
            "device": _device_name(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "linear_layers": "as loaded" if self.packed is None else "packed",
            "compiled_rows": sorted(self.compiled.calls) if self.compiled else [],
            "compile_s": round(self.compiled.compile_s, 1) if self.compiled else 0.0,
            "backbone": self.id,
            "backbone_sha256": self.sha256,
            **library_versions(),
        }

    def new_cache(self, capacity: int) -> KVCache:
        """Return an empty cache for ``capacity`` tokens."""
        return KVCache(self.model.config.num_hidden_layers, self._capacity(capacity))

    def new_ragged_cache(self, capacity: int, num_rows: int) -> RaggedCache:
        """Return an empty cache of ``num_rows`` rows, each for ``capacity`` tokens of its own."""
        layers = self.model.config.num_hidden_layers
        return RaggedCache(layers, self._capacity(capacity), num_rows, self.device)

    def _capacity(self, num_tokens: int) -> int:
        fixed = self.compiled.capacity if self.compiled else 0
        return fixed if num_tokens <= fixed else num_tokens

    def compile(
        self,
        tree_sizes: Iterable[int],
        num_heads: int,
        num_tokens: int,
        on_compile: Callable[[int], None] = lambda size: None,
    ) -> Backbone:
        """Return the same backbone with plain steps and those of some tree sizes compiled.

        Compiling takes minutes per size; what was compiled once on a machine is loaded from disk.

        Args:
            tree_sizes: rows of the verify calls.
            num_heads: how many heads the trees draft with; they share the LM head.
            num_tokens: the longest text, scratch rows of a verify call included.
            on_compile: called with each size that has to be compiled now.

        Raises:
            ModelError: not on a CPU, or the model or machine cannot do it.
        """
        if self.device.type != "cpu":
            raise ModelError(
                f"compiling ahead of time is for CPUs; the backbone is on {self.device}"
            )
        probe = replace(self, compiled=None).new_cache(capacity_for(num_tokens))
        with torch.inference_mode():
            self.forward(torch.zeros((1, 1), dtype=torch.int64), probe)
        assert probe.buffer is not None
        sizes = sorted({1, *tree_sizes})
        projected = sorted({*sizes, num_heads} - {0})
        forwards = compile_forwards(
            without_lm_head(self.model),
            self.lm_head,
            f"{self.sha256} {type(self.model).__name__} {self.model.config.to_dict()}",
            probe.buffer,
            self.masked,
            sizes,
            projected,
            on_compile,
        )
        return replace(self, compiled=forwards)

    def forward(
        self,
        input_ids: Tensor,
        cache: KVCache,
        position_ids: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Return the final hidden states [B, n, d] of ``input_ids`` [B, n], appended to ``cache``.

        position_ids: int64 [B, n]; by default the next positions after the cache.
        mask: additive [B or 1, 1, n, cache.length + n], 0 where visible; by default causal.
        """
        if self.compiled and self.compiled.serves(input_ids, cache):
            return self.compiled.run(input_ids, cache, position_ids, mask)
        return cache.run(
            without_lm_head(self.runner), input_ids, position_ids=position_ids, attention_mask=mask
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] of final hidden states [..., d], scaled as the model does."""
        logits = self.compiled.project(hidden) if self.compiled else None
        if logits is None:
            logits = self.runner.get_output_embeddings()(hidden)
        config = self.model.config
        if scale := getattr(config, "logit_scale", None):  # Cohere
            logits = logits * scale
        if divisor := getattr(config, "logits_scaling", None):  # Granite
            logits = logits / divisor
        if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
            logits = cap * torch.tanh(logits / cap)
        return logits

    @cached_property
    def masked(self) -> float:
        """The additive mask value of an invisible position."""
        return torch.finfo(self.dtype).min

    def encode(self, messages: list[Message]) -> list[int]:
        """Return the token ids of a chat up to where the model's answer starts."""
        if self.tokenizer.chat_template is None:
            text = "\n\n".join(message["content"] for message in messages)
            return self.tokenizer(text)["input_ids"]
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of ``token_ids`` without special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)


def load_backbone(
    spec: str = embedded.NAME, device: str | None = None, dtype: str | None = None
) -> Backbone:
    """Return the backbone that ``spec`` names, ready to decode.

    Args:
        spec: ``smollm2-135m`` (the embedded default), a local directory, a GGUF file or a hub id.
        device: ``cpu``, ``cuda``, …; by default CUDA when present.
        dtype: ``bfloat16``, ``float16`` or ``float32``; by default the fastest one at hand.

    Raises:
        ModelError: it cannot be read, or a tree mask cannot verify it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    chosen_device = _device(device)
    chosen_dtype = _dtype(dtype, chosen_device)
    _quiet_transformers()
    source = _resolve(spec)
    with _explained(f"cannot load backbone {spec}"):
        check_verifiable(AutoConfig.from_pretrained(source))  # before the weights are read
        model, found = AutoModelForCausalLM.from_pretrained(
            source, dtype=chosen_dtype, output_loading_info=True
        )
    if missing := sorted(found["missing_keys"]):  # transformers fills these with random numbers
        raise ModelError(f"backbone {spec} lacks {len(missing)} weights, among them {missing[0]}")
    with _explained(f"cannot load the tokenizer of {spec}"):
        tokenizer = AutoTokenizer.from_pretrained(source)
    model = model.to(chosen_device).eval().requires_grad_(False)
    eos_ids = _eos_ids(model, tokenizer)
    backbone = Backbone(spec, _digest(source), model, tokenizer, eos_ids, packed_twin(model))
    check_rows(backbone)
    return backbone


def check_verifiable(config: Any) -> None:
    """Raise ModelError if ``config`` tells that a tree mask cannot verify what the model emits."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    recurrent = sorted(kinds - {"full_attention", "sliding_attention"})
    states = hasattr(config, "ssm_cfg") or hasattr(config, "state_size")
    if recurrent or states or config.model_type in ("rwkv", "xlstm"):
        raise ModelError(
            f"{config.model_type} has {', '.join(recurrent) or 'recurrent'} layers: they read the "
            "tree's rows as one sequence, so a tree mask cannot verify it; full attention is needed"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{config.model_type} is an encoder-decoder; a decoder-only LM is needed")


def check_rows(backbone: Backbone) -> None:
    """Raise ModelError unless the model lets treeopt place and cache rows and read its states."""
    config = backbone.model.config
    parameters = inspect.signature(type(without_lm_head(backbone.model)).forward).parameters
    if "position_ids" not in parameters or getattr(config, "alibi", False):
        raise ModelError(
            f"{config.model_type} takes no position ids; the siblings of a tree share a position"
        )
    cache, token = backbone.new_cache(1), torch.zeros((1, 1), dtype=torch.long).to(backbone.device)
    with torch.inference_mode(), _explained(f"{config.model_type} cannot be decoded with a tree"):
        ours = backbone.logits(backbone.forward(token, cache)).float()
        theirs = backbone.model(token).logits.float()
    if cache.buffer is None or not hasattr(config, "max_position_embeddings"):
        raise ModelError(f"{config.model_type} has no key-value cache or no context length")
    if (ours - theirs).abs().max() > 0.05 * theirs.abs().max():
        raise ModelError(f"{config.model_type} does more to its logits than its LM head")


def without_lm_head(model: Any) -> Any:
    """Return the part of ``model`` that ends with hidden states."""
    base = model.base_model
    # Gemma 3's text model names a part that it lacks before transformers 5.
    return model.model if base is model else base


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn whatever is raised, transformers' own errors included, into a ModelError."""
    try:
        yield
    except Exception as error:
        raise ModelError(f"{what}: {_first_line(error)}") from error


def attention_limit(config: Any) -> int:
    """Return how many tokens a row may see before a sliding window would cut what it sees."""
    limit = config.max_position_embeddings
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    if window and slides and getattr(config, "use_sliding_window", True):
        limit = min(limit, window)
    return limit


def _device_name(device: torch.device) -> str:
    """Return the device's product name, which times depend on, or its type."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"cpu {platform.machine()} {_cpu_model()}".strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "")


def _resolve(spec: str) -> str:
    if spec == embedded.NAME:
        return str(embedded.embedded_directory())
    path = Path(spec)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"no GGUF file at {spec}")
        return str(convert_gguf(path))
    if not path.exists() and (path.is_absolute() or spec.startswith(".") or spec.count("/") > 1):
        raise ModelError(f"no model directory at {spec}")
    return spec


def _device(name: str | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {name!r} cannot be used: {_first_line(error)}") from error


_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def _dtype(name: str | None, device: torch.device) -> torch.dtype:
    if name is None:
        fast = device.type == "cuda" or torch.cpu._is_amx_tile_supported()
        return torch.bfloat16 if fast else torch.float32
    if name not in _DTYPES:
        raise ModelError(f"unknown dtype {name!r}; choose one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    ids = model.generation_config.eos_token_id
    if ids is None:
        ids = model.config.eos_token_id if model.config.eos_token_id is not None else []
    if ids == [] and tokenizer.eos_token_id is not None:
        ids = tokenizer.eos_token_id
    return id_set(ids)


def id_set(ids: int | Iterable[int] | None) -> frozenset[int]:
    """Return the token ids of a configuration's entry: one, several or none."""
    return frozenset([ids] if isinstance(ids, int) else ids or ())


def _digest(source: str) -> str:
    """Return a digest of the weight files, or of the hub id when there are none at hand."""
    files = sorted(Path(source).glob("*.safetensors"))
    digest = hashlib.sha256(source.encode() if not files else b"")
    for file in files:
        digest.update(sha256_of_file(file).encode())
    return digest.hexdigest()


def _quiet_transformers() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
