"""Medusa heads: residual SiLU blocks, each followed by a vocabulary projection.

Source: arXiv 2401.10774, section 2.1.1 (equation 1). Legend: ``K`` heads, ``L`` blocks per head,
``d`` hidden size, ``V`` vocabulary size.

Two layouts, both in the field's own key names:

- ``own_lm_head``: ``{head}.{block}.linear.weight``, ``….bias`` and ``{head}.{L}.weight`` [V, d];
- ``shared_lm_head``: the blocks only; every head projects with the backbone's LM head.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from importlib.resources import files
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from treeopt.errors import HeadsError
from treeopt.files import replacing, sha256_of_files, sort_safetensors_header
from treeopt.formats.heads import (
    CHECKPOINT,
    OWN,
    HeadWeights,
    checkpoint_files,
    find_checkpoint,
    read_heads,
)
from treeopt.models.backbone import Backbone


class ResidualBlock(nn.Module):
    """``x + SiLU(W x + b)``; a new block has W = b = 0 and so is the identity."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [..., d] for ``hidden`` [..., d]."""
        return hidden + functional.silu(self.linear(hidden))


class MedusaHeads(nn.Module):
    """K heads on one backbone; head k guesses the token k places after the one just emitted."""

    def __init__(self, num_heads: int, num_blocks: int, backbone: Backbone, layout: str) -> None:
        """Make new heads, which reproduce the backbone's own next token."""
        super().__init__()
        size = backbone.hidden_size
        self.id, self.sha256, self.layout = "new", "", layout
        self.num_blocks = num_blocks
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(size) for _ in range(num_blocks)))
            for _ in range(num_heads)
        )
        self.projections = nn.ModuleList()
        if layout == OWN:
            for _ in range(num_heads):
                projection = nn.Linear(size, backbone.vocab_size, bias=False)
                projection.weight.data.copy_(backbone.lm_head.weight)
                self.projections.append(projection)
        self._backbone = (backbone,)  # in a tuple, so that its weights are not the heads' own

    @property
    def num_heads(self) -> int:
        """K."""
        return len(self.blocks)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def backbone_sha256(self) -> str:
        """Digest of the backbone that these heads guess for."""
        return self._backbone[0].sha256

    def hidden(self, head: int, hidden: Tensor) -> Tensor:
        """Return what 1-based ``head`` projects: [..., d] for the backbone's states [..., d]."""
        return self.blocks[head - 1](hidden)

    def project(self, head: int, head_hidden: Tensor) -> Tensor:
        """Return the logits [..., V] of 1-based ``head`` for its own hidden states."""
        if self.layout == OWN:
            return self.projections[head - 1](head_hidden)
        return self._backbone[0].logits(head_hidden)

    def projection_weight(self, head: int) -> Tensor:
        """Return the weight [V, d] that 1-based ``head`` projects with; a shared one is frozen."""
        if self.layout == OWN:
            return self.projections[head - 1].get_parameter("weight")
        return self._backbone[0].lm_head.weight

    def logits(self, state: Tensor, num_heads: int) -> Tensor:
        """Return the logits [num_heads, ..., V] of the first heads at the states [..., d]."""
        states = [self.hidden(head, state) for head in range(1, num_heads + 1)]
        if self.layout == OWN:
            return torch.stack([self.project(k, s) for k, s in enumerate(states, 1)])
        return self._backbone[0].logits(torch.stack(states))  # one read of the LM head for all

    def with_blocks(self, num_blocks: int) -> MedusaHeads:
        """Return the same heads with new blocks behind theirs, which change no guess yet.

        Raises:
            HeadsError: they have more blocks already.
        """
        if num_blocks < self.num_blocks:
            raise HeadsError(f"the heads have {self.num_blocks} blocks, more than {num_blocks}")
        deeper = MedusaHeads(self.num_heads, num_blocks, self._backbone[0], self.layout)
        deeper.load_state_dict(self.state_dict(), strict=False)
        return deeper

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights under the field's key names."""
        weights: dict[str, Tensor] = {}
        for name, parameter in self.named_parameters():
            kind, _, key = name.partition(".")
            if kind == "projections":  # the projection follows the head's last block
                head = key.partition(".")[0]
                key = f"{head}.{self.num_blocks}.weight"
            weights[key] = parameter
        return weights

    def save(self, path: str | Path, **metadata: str) -> None:
        """Write the weights as float16 safetensors, whole or not at all."""
        weights = {name: t.detach().to("cpu", torch.float16) for name, t in self.tensors().items()}
        weights = {name: tensor.contiguous() for name, tensor in weights.items()}
        with replacing(path) as temporary:
            save_file(weights, temporary, {"format": "pt", "layout": self.layout, **metadata})
            sort_safetensors_header(temporary)


def load_heads(spec: str | Path, backbone: Backbone) -> MedusaHeads:
    """Return the heads in a file or directory of any known format, ready on ``backbone``.

    Raises:
        HeadsError: unreadable, a tensor is missing, extra, misshapen or not finite, or the file
            brings another LM head than the backbone's.
    """
    path = resolve_heads(spec)
    weights = read_heads(path)
    heads = MedusaHeads(weights.num_heads, weights.num_blocks, backbone, weights.layout)
    _copy(weights, heads, path)
    heads.id, heads.sha256 = str(spec), sha256_of_files(checkpoint_files(path))
    return heads.to(backbone.device, backbone.dtype).eval().requires_grad_(False)


def compile_models(
    backbone: Backbone,
    heads: MedusaHeads,
    tree_sizes: Iterable[int],
    num_heads: int,
    num_tokens: int,
    on_compile: Callable[[int], None] = lambda size: None,
) -> tuple[Backbone, MedusaHeads]:
    """Return ``backbone.compile(…)`` and the same heads, which project through it."""
    compiled = backbone.compile(tree_sizes, num_heads, num_tokens, on_compile)
    other = copy.copy(heads)
    other._backbone = (compiled,)
    return compiled, other


def resolve_heads(spec: str | Path) -> Path:
    """Return the checkpoint file that ``spec`` names: a file, a directory or shipped heads."""
    shipped = Path(str(files("presets"))) / f"{spec}-heads.safetensors"
    if found := find_checkpoint(Path(spec)):
        return found
    if shipped.is_file():
        return shipped
    raise HeadsError(
        f"no heads at {spec}: give a safetensors file, a directory with {CHECKPOINT}, "
        "or the name of a backbone that treeopt ships heads for"
    )


def offset_scores(heads: MedusaHeads, states: Tensor, tokens: Tensor) -> list[float]:
    """Return how often head 1's first guess is the token 0, 1, 2 and 3 places on.

    Args:
        states: [n, d], the states that emitted ``tokens`` int64 [n].

    Well-trained heads score best at 1; untrained ones at 0; heads of another convention at 2.
    """
    guesses = heads.project(1, heads.hidden(1, states)).argmax(-1)
    return [
        (guesses[: len(tokens) - offset] == tokens[offset:]).float().mean().item()
        for offset in range(4)
    ]


def offset_warning(scores: list[float]) -> str | None:
    """Return what looks wrong when head 1 is not best one place ahead, else None."""
    best = max(range(len(scores)), key=scores.__getitem__)
    if best == 1:
        return None
    shown = ", ".join(f"{offset}: {score:.0%}" for offset, score in enumerate(scores))
    reason = "look untrained" if best == 0 else f"look shifted by {best - 1}"
    return f"the heads {reason}: head 1 is right most often {best} places ahead ({shown})"


def _copy(weights: HeadWeights, heads: MedusaHeads, path: Path) -> None:
    for name, target in heads.tensors().items():
        if name not in weights.tensors:
            continue  # a bias that the format goes without; new heads have 0
        source = weights.tensors[name]
        if source.shape != target.shape:
            raise HeadsError(
                f"{path}: {name} has shape {list(source.shape)}, the backbone needs "
                f"{list(target.shape)}; these heads are for another hidden size or vocabulary"
            )
        if not torch.isfinite(source).all():
            raise HeadsError(f"{path}: {name} holds values that are not finite")
        target.data.copy_(source)
    if weights.lm_head is not None:
        ours = heads.projection_weight(1)
        theirs = weights.lm_head.to(ours)
        if theirs.shape != ours.shape or not torch.equal(theirs, ours):
            raise HeadsError(f"{path} brings an LM head that is not the backbone's")
