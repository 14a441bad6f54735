"""Forward calls compiled ahead of time for this CPU, for a few fixed shapes, kept on disk.

transformers' eager forward spends as long between kernels as in them when a call has few rows.
``torch.export`` and AOTInductor turn the whole backbone into one library with its weights packed
inside. That takes minutes per shape, so only the first run on a machine pays; later ones load it in
a second. A library holds the weights once more, on disk and in memory.

Legend: ``n`` new tokens, ``C`` capacity of the cache, ``L`` layers, ``d`` hidden size.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from treeopt.errors import ModelError
from treeopt.files import cached
from treeopt.models.cache import KVCache, cache_argument, static_adapter

_FILE = "forward.pt2"
_SMALLEST = 512  # capacities are this, doubled until the text fits: few shapes, few compilations


@dataclass(frozen=True)
class CompiledForwards:
    """Compiled calls of one row, for caches of one capacity.

    calls: the backbone without its LM head, by number of new tokens.
    projections: the LM head, by number of rows.
    compile_s: seconds that compiling took in this run; 0 when everything was on disk.
    """

    capacity: int
    masked: float
    calls: dict[int, Callable[..., Tensor]]
    projections: dict[int, Callable[..., Tensor]]
    compile_s: float

    def serves(self, input_ids: Tensor, cache: KVCache) -> bool:
        """Return whether this call's shape was compiled; prompts, for one, are read eagerly."""
        rows, num_new = input_ids.shape
        return (
            rows == 1
            and num_new in self.calls
            and cache.capacity == self.capacity
            and cache.buffer is not None
        )

    def run(
        self,
        input_ids: Tensor,
        cache: KVCache,
        position_ids: Tensor | None,
        mask: Tensor | None,
    ) -> Tensor:
        """Return the hidden states [1, n, d] of ``input_ids`` [1, n], as ``KVCache.run`` does."""
        assert cache.buffer is not None
        num_new = input_ids.shape[1]
        cache.check_room(num_new)
        slots = cache.length + torch.arange(num_new)
        if position_ids is None:
            position_ids = slots[None]
        if mask is None:  # causal
            visible = torch.arange(self.capacity) <= slots[:, None]
            mask = torch.where(visible, 0.0, self.masked).to(cache.buffer.dtype)[None, None]
        else:
            mask = functional.pad(mask, (0, self.capacity - mask.shape[-1]), value=self.masked)
        keys, values = cache.buffer
        hidden = self.calls[num_new](input_ids, position_ids, slots, mask, list(keys), list(values))
        cache.advance(num_new)
        return hidden

    def project(self, hidden: Tensor) -> Tensor | None:
        """Return the LM head's output [..., V] for ``hidden`` [..., d]; None where not compiled."""
        rows = hidden.flatten(0, -2) if hidden.dim() > 1 else hidden[None]
        if call := self.projections.get(len(rows)):
            return call(rows.contiguous()).view(*hidden.shape[:-1], -1)
        return None


def capacity_for(num_tokens: int) -> int:
    """Return the capacity that texts of ``num_tokens`` are compiled for."""
    capacity = _SMALLEST
    while capacity < num_tokens:
        capacity *= 2
    return capacity


def compile_forwards(
    base: nn.Module,
    lm_head: nn.Linear,
    identity: str,
    buffer: Tensor,
    masked: float,
    sizes: Iterable[int],
    projected: Iterable[int],
    on_compile: Callable[[int], None] = lambda size: None,
) -> CompiledForwards:
    """Return forward calls of ``sizes`` new tokens, from disk where they were compiled before.

    Args:
        base: the transformers model without its LM head, on a CPU.
        lm_head: the LM head.
        identity: what tells these weights and their configuration from others.
        buffer: a cache's block [2, L, 1, H, C, D]; its capacity is what is compiled for.
        projected: numbers of rows to compile the LM head for.
        on_compile: called with each size that has to be compiled now.

    Raises:
        ModelError: the model cannot be exported, or this machine has no C++ compiler.
    """
    spent = [0.0]

    def library(module: nn.Module, size: int, *arguments: Any) -> Callable[..., Tensor]:
        def make(directory: Path) -> None:
            on_compile(size)
            start = time.perf_counter()
            _compile(module, arguments, directory)
            spent[0] += time.perf_counter() - start

        shapes = (type(module).__name__, size, tuple(buffer.shape), buffer.dtype)
        directory = cached(f"compiled/{_key(identity, *shapes)}", make)
        return torch._inductor.aoti_load_package(str(directory / _FILE))

    forward = _Forward(base).eval()
    calls = {size: library(forward, size, *_arguments(buffer, masked, size)) for size in sizes}
    width = lm_head.weight.shape[1]
    projections = {
        rows: library(lm_head, rows, torch.zeros((rows, width), dtype=buffer.dtype))
        for rows in projected
    }
    return CompiledForwards(buffer.shape[-2], masked, calls, projections, spent[0])


class _Forward(nn.Module):
    """The backbone without its LM head, as a function of tensors alone."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        slots: Tensor,
        mask: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> Tensor:
        """Return hidden states [1, n, d]; ``slots`` int64 [n] say where the new entries go."""
        cache = {cache_argument(type(self.base)): static_adapter(keys, values, slots)}
        return self.base(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=mask,
            use_cache=True,
            **cache,
        ).last_hidden_state


def _arguments(buffer: Tensor, masked: float, size: int) -> tuple[Any, ...]:
    """Return example arguments of ``_Forward``."""
    capacity, layers = buffer.shape[-2], buffer.shape[1]
    slots = torch.arange(size)
    mask = torch.zeros((1, 1, size, capacity), dtype=buffer.dtype)
    mask[..., size:] = masked
    sides = [[torch.zeros_like(buffer[0, layer]) for layer in range(layers)] for _ in range(2)]
    return torch.zeros((1, size), dtype=torch.int64), slots[None], slots, mask, *sides


def _compile(module: nn.Module, arguments: tuple[Any, ...], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    quiet = logging.getLogger("torch")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        # autotuning tells stderr about every kernel it tries
        quiet_stderr = contextlib.redirect_stderr(io.StringIO())
        with torch.no_grad(), warnings.catch_warnings(), quiet_stderr:
            warnings.simplefilter("ignore")
            program = torch.export.export(module, arguments, strict=False)
            torch._inductor.aoti_compile_and_package(
                program,
                package_path=str(directory / _FILE),
                inductor_configs={
                    "freezing": True,  # weights become constants, laid out for the kernels
                    "max_autotune": True,
                    "max_autotune_gemm_backends": "CPP,ATEN",
                    "autotune_num_choices_displayed": 0,
                },
            )
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"the backbone cannot be compiled: {reason}; a C++ compiler is needed, or decode "
            "without compiling"
        ) from error
    finally:
        quiet.setLevel(level)


def _key(identity: str, *shapes: Any) -> str:
    """Return what a compiled library depends on, as a name."""
    import transformers

    parts = (
        identity, *shapes, torch.__version__, transformers.__version__, torch.get_num_threads(),
        torch.backends.cpu.get_cpu_capability(),
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]
