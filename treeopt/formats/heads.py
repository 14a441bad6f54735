"""Checkpoints of Medusa heads as other projects write them.

All hold the same tensors under other names, so a conversion is a renaming and keeps every byte.
What differs beyond names is the vocabulary projection: heads own theirs (Medusa v1), or share the
backbone's LM head, which a file leaves out (Medusa v2) or brings along once (vLLM).

Legend: ``h`` head, ``l`` block, ``L`` blocks per head, ``d`` hidden size, ``V`` vocabulary size.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from treeopt.errors import HeadsError
from treeopt.files import read_json, replacing, sort_safetensors_header, write_text

OWN, SHARED = "own_lm_head", "shared_lm_head"
CHECKPOINT = "medusa_lm_head.safetensors"  # the file's name in a checkpoint directory
_LM_HEAD = "lm_head.weight"
_INDEX = "model.safetensors.index.json"  # of a whole model in several files
_PICKLES = (".pt", ".bin", ".pth")


@dataclass(frozen=True)
class HeadWeights:
    """What a checkpoint holds, under Medusa's own names.

    tensors: ``{h}.{l}.linear.weight`` [d, d], ``….bias`` [d] (some files have none),
        ``{h}.{L}.weight`` [V, d] where heads own their projections, and ``lm_head.weight`` [V, d]
        where they share one that the file brings along.
    metadata: of a safetensors file; it stays with the weights.
    """

    num_heads: int
    num_blocks: int
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def layout(self) -> str:
        """``OWN`` or ``SHARED``."""
        return OWN if f"0.{self.num_blocks}.weight" in self.tensors else SHARED

    @property
    def lm_head(self) -> Tensor | None:
        """The shared projection, where the file brings it along."""
        return self.tensors.get(_LM_HEAD)

    def with_own_projections(self, lm_head: Tensor) -> HeadWeights:
        """Return heads that each own a copy of the shared ``lm_head`` [V, d]; they guess alike."""
        own = {f"{head}.{self.num_blocks}.weight": lm_head for head in range(self.num_heads)}
        return replace(self, tensors={**self._blocks(), **own})

    def with_shared_projection(self, lm_head: Tensor, keep: bool) -> HeadWeights:
        """Return heads that share ``lm_head`` [V, d]; ``keep`` it in the file or leave it out.

        Raises:
            HeadsError: a head's own projection differs from it.
        """
        for name, tensor in self.tensors.items():
            if name.endswith(".linear.weight") or name.endswith(".linear.bias"):
                continue
            if tensor.shape != lm_head.shape or not torch.equal(tensor, lm_head.to(tensor)):
                raise HeadsError(
                    f"the heads' projection {name} is not the backbone's LM head, so they cannot "
                    "share it; convert to a format where heads own their projections"
                )
        return replace(self, tensors={**self._blocks(), **({_LM_HEAD: lm_head} if keep else {})})

    def _blocks(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.tensors.items() if ".linear." in name}


@dataclass(frozen=True)
class HeadFormat:
    """How a project writes heads.

    block, projection: names of the tensors, with ``{h}``, ``{l}`` and ``{part}`` left open.
    shared: name of a shared projection, where the format has one.
    file: what the checkpoint is called.
    layout: the only one that the format knows; None for either.
    """

    block: str
    projection: str
    file: str = CHECKPOINT
    shared: str | None = None
    layout: str | None = None

    def name_of(self, ours: str, num_blocks: int) -> str:
        """Return this format's name of the tensor that is ``ours`` in Medusa's."""
        if ours == _LM_HEAD:
            assert self.shared
            return self.shared
        head, block, *part = ours.split(".")
        if int(block) == num_blocks:
            return self.projection.format(h=head, l=block)
        return self.block.format(h=head, l=block, part=part[-1])


_MEDUSA = ("{h}.{l}.linear.{part}", "{h}.{l}.weight")
_PREFIXED = ("medusa_head.{h}.{l}.linear.{part}", "medusa_head.{h}.{l}.weight")

FORMATS = {
    "medusa-v1": HeadFormat(*_MEDUSA, file="medusa_lm_head.pt", layout=OWN),
    "medusa-v2": HeadFormat(*_MEDUSA, layout=SHARED),
    "tgi": HeadFormat(*_MEDUSA),
    "medusa-model": HeadFormat(*_PREFIXED, file="medusa_heads.safetensors"),
    "rtp-llm": HeadFormat(*_PREFIXED, file="medusa_heads.safetensors"),
    "modelopt": HeadFormat(
        "medusa_heads.{h}.{l}.linear.{part}",
        "medusa_heads.{h}.{l}.weight",
        file="medusa_heads.safetensors",
        layout=OWN,
    ),
    "tensorrt-llm": HeadFormat(
        "medusa_heads.{h}.medusa_layers.{l}.linear.{part}",
        "medusa_heads.{h}.lm_head.weight",
        file="rank0.safetensors",
        layout=OWN,
    ),
    "vllm": HeadFormat(
        "blocks.{h}.layers.{l}.{part}",
        "lm_heads.{h}.weight",
        file="model.safetensors",
        shared="lm_heads.0.weight",
    ),
}


def read_heads(path: str | Path) -> HeadWeights:
    """Return the heads in a file of any of ``FORMATS``, or in a directory that holds one.

    Format and numbers come from the tensors' names: configurations in the field are sometimes
    wrong about them. Where heads lie among a whole model's weights, those are passed over.

    Raises:
        HeadsError: unreadable, no heads, or a tensor is missing or one too many.
    """
    file = find_checkpoint(Path(path))
    if file is None:
        raise HeadsError(
            f"no heads at {path}: give a checkpoint file, or a directory with {CHECKPOINT}"
        )
    tensors, metadata = _read(file)
    for format_ in FORMATS.values():
        pattern = _pattern(format_.block)
        found = [match for name in tensors if (match := pattern.fullmatch(name))]
        if found:
            return _structured(format_, found, tensors, metadata, file)
    names = ", ".join(sorted(tensors)[:3]) or "nothing"
    raise HeadsError(f"{file} holds no Medusa heads: expected 0.0.linear.weight, found {names}")


def write_heads(
    heads: HeadWeights, format_name: str, out: Path, lm_head: Tensor | None, backbone: str | None
) -> None:
    """Write a directory ``out`` with ``heads`` in a format and the ``config.json`` it needs.

    Args:
        lm_head: the backbone's LM head [V, d]; needed where a format cannot leave it out.
        backbone: name of the backbone, for the configurations that hold it.

    Raises:
        HeadsError: the format cannot express these heads, or ``out`` holds something already.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise HeadsError(f"{out} exists; heads are written to a new or an empty directory")
    format_ = FORMATS[format_name]
    fitted = _fitted(heads, format_name, lm_head)
    names = {ours: format_.name_of(ours, fitted.num_blocks) for ours in fitted.tensors}
    tensors = {names[ours]: tensor.contiguous() for ours, tensor in fitted.tensors.items()}
    if len({tensor.data_ptr() for tensor in tensors.values()}) < len(tensors):
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}  # copies of one
    with replacing(out) as folder:
        folder.mkdir()
        write_text(folder / "config.json", json.dumps(_config(fitted, format_name, backbone)))
        file = folder / format_.file
        if file.suffix in _PICKLES:
            torch.save(tensors, file)
        else:
            save_file(tensors, file, {"format": "pt", **fitted.metadata})
            sort_safetensors_header(file)


def _fitted(heads: HeadWeights, format_name: str, lm_head: Tensor | None) -> HeadWeights:
    """Return ``heads`` with the projections that the format wants."""
    format_ = FORMATS[format_name]
    shared = heads.lm_head if heads.lm_head is not None else lm_head
    wants = format_.layout or heads.layout
    if format_name == "tgi" and heads.layout == SHARED and heads.num_blocks > 1:
        wants = OWN  # it takes a shared LM head only for heads of one block
    explicit = wants == SHARED and format_.shared is not None
    if wants == heads.layout and explicit == (heads.lm_head is not None):
        return heads
    if shared is None:
        own = wants == OWN or explicit
        raise HeadsError(
            f"the heads share the backbone's LM head, and {format_name} loads one from their file: "
            "without it the projections would stay random; name the --backbone to bring it along"
            if own
            else f"{format_name} shares the backbone's LM head, and these heads own projections; "
            "name the --backbone to see whether they are the same"
        )
    if wants == OWN:
        return heads.with_own_projections(shared)
    return heads.with_shared_projection(shared, keep=explicit)


def _config(heads: HeadWeights, format_name: str, backbone: str | None) -> dict[str, Any]:
    """Return what the format's reader looks for in ``config.json``."""
    counts = {"medusa_num_heads": heads.num_heads, "medusa_num_layers": heads.num_blocks}
    if format_name == "rtp-llm":
        return {"medusa_config": counts}
    if format_name in ("modelopt", "tensorrt-llm"):
        nvidia = {"num_medusa_heads": heads.num_heads, "num_medusa_layers": heads.num_blocks}
        return {"medusa": nvidia} if format_name == "modelopt" else nvidia
    if format_name == "vllm":
        projection = heads.lm_head
        if projection is None:
            projection = heads.tensors[f"0.{heads.num_blocks}.weight"]
        vocab_size, hidden_size = projection.shape
        return {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": hidden_size,
            "vocab_size": vocab_size,
            "truncated_vocab_size": vocab_size,
            "num_heads": heads.num_heads,
            "num_hidden_layers": heads.num_blocks,
            "medusa_fc_bias": "0.0.linear.bias" in heads.tensors,
            "original_lm_head": heads.layout == SHARED,
        }
    version = {"version": "2"} if heads.layout == SHARED else {}
    return {"base_model_name_or_path": backbone, **counts, **version}


def _structured(
    format_: HeadFormat,
    blocks: list[re.Match[str]],
    tensors: dict[str, Tensor],
    metadata: dict[str, str],
    path: Path,
) -> HeadWeights:
    """Rename ``tensors`` to Medusa's names and see that they are all there."""
    num_heads = 1 + max(int(match["h"]) for match in blocks)
    num_blocks = 1 + max(int(match["l"]) for match in blocks)
    biased = any(match["part"] == "bias" for match in blocks)
    projection = _pattern(format_.projection)
    owned = {match["h"] for name in tensors if (match := projection.fullmatch(name))}
    brings_one = format_.shared in tensors and len(owned) == 1 < num_heads
    renamed = {}
    for ours in _names(num_heads, num_blocks, biased, bool(owned) and not brings_one, brings_one):
        theirs = format_.name_of(ours, num_blocks)
        if theirs not in tensors:  # at the first gap, however far the names go
            raise HeadsError(f"{path} lacks the tensor {theirs}")
        renamed[ours] = tensors[theirs]
    known = {format_.name_of(ours, num_blocks) for ours in renamed}
    prefix = re.match(r"medusa_heads?\.", format_.block)
    if extra := sorted(n for n in set(tensors) - known if not prefix or n.startswith(prefix[0])):
        if "token_map" in extra:
            raise HeadsError(f"{path} maps to a cut vocabulary (token_map), which heads here lack")
        raise HeadsError(f"{path} has a tensor {extra[0]} that {num_heads} heads do not need")
    return HeadWeights(num_heads, num_blocks, renamed, metadata)


def _names(
    num_heads: int, num_blocks: int, biased: bool, own: bool, brings_one: bool
) -> Iterator[str]:
    """Yield Medusa's tensor names."""
    parts = ("weight", "bias") if biased else ("weight",)
    for head in range(num_heads):
        for block in range(num_blocks):
            yield from (f"{head}.{block}.linear.{part}" for part in parts)
        if own:
            yield f"{head}.{num_blocks}.weight"
    if brings_one:
        yield _LM_HEAD


def _pattern(template: str) -> re.Pattern[str]:
    escaped = re.escape(template)
    for key, pattern in (("h", r"\d+"), ("l", r"\d+"), ("part", "weight|bias")):
        escaped = escaped.replace(rf"\{{{key}\}}", f"(?P<{key}>{pattern})")
    return re.compile(escaped)


def find_checkpoint(path: Path) -> Path | None:
    """Return the checkpoint file at ``path``: itself, or the one that a directory holds."""
    names = [CHECKPOINT, *dict.fromkeys(format_.file for format_ in FORMATS.values()), _INDEX]
    candidates = [path, *(path / name for name in names)]
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def checkpoint_files(file: Path) -> list[Path]:
    """Return the files that the heads at ``file`` lie in: itself, or the shards that it lists."""
    if file.name != _INDEX:
        return [file]
    return sorted({file.parent / shard for shard in _shards(file).values()})


def _shards(index: Path) -> dict[str, str]:
    """Return which file holds each of the heads' tensors."""
    value = read_json(index, HeadsError)
    shards = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(shards, dict):
        raise HeadsError(f"{index} has no weight_map")
    found = {name: shard for name, shard in shards.items() if name.startswith("medusa_head")}
    for shard in found.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise HeadsError(f"{index} names {shard!r}, which is no file beside it")
    return found


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return a checkpoint's tensors and its metadata."""
    if file.suffix in _PICKLES:
        return _read_pickle(file)
    if file.name != _INDEX:
        return _read_safetensors(file)
    tensors: dict[str, Tensor] = {}
    for shard in checkpoint_files(file):
        tensors |= _read_safetensors(shard, "medusa_head")[0]
    return tensors, {}


def _read_safetensors(path: Path, prefix: str = "") -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            tensors = {name: file.get_tensor(name) for name in names}
            return tensors, dict(sorted((file.metadata() or {}).items()))
    except (SafetensorError, OSError) as error:
        raise HeadsError(f"{path} is not a safetensors file: {error}") from error


def _read_pickle(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, OSError) as error:
        raise HeadsError(f"{path} is not a torch file of plain tensors") from error
    if not isinstance(value, dict) or not all(isinstance(t, Tensor) for t in value.values()):
        raise HeadsError(f"{path} is not a torch file of plain tensors")
    return value, {}
