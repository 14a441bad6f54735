"""The frozen backbone's states along its own answers, computed once, in memory or in a file.

Legend: ``P`` answer positions, ``d`` hidden size, ``K`` heads.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from treeopt.errors import DataError
from treeopt.models.backbone import Backbone
from treeopt.training.distill import Distilled
from treeopt.training.processes import ALONE, Processes

NO_TARGET = -1


@dataclass(frozen=True)
class States:
    """What heads learn from.

    hidden: [P, d], in the backbone's dtype. targets: int64 [P, K], ``targets[p, k-1]`` the token k
    places after the one that position p emitted; -1 past the answer's end.
    """

    hidden: Tensor
    targets: Tensor

    def split(self, position: int) -> tuple[States, States]:
        """Return what comes before ``position``, and the rest."""
        return (
            States(self.hidden[:position], self.targets[:position]),
            States(self.hidden[position:], self.targets[position:]),
        )


def compute_states(
    backbone: Backbone,
    rows: Sequence[Distilled],
    num_heads: int,
    file: Path | None = None,
    processes: Processes = ALONE,
    batch_tokens: int = 1024,
) -> States:
    """Return the states of ``rows``, answer by answer in their order.

    With a ``file`` they are kept there, d numbers of the backbone's dtype per answer token, and
    only read when they are whole already; several processes make them together then.

    Raises:
        DataError: there are no rows, or the disk has no room for their states.
    """
    if not rows:
        raise DataError("there are no answers to train on")
    targets = torch.cat([targets_of(row, num_heads) for row in rows])
    shape = (len(targets), backbone.hidden_size)
    if file is None:
        hidden = torch.empty(shape, dtype=backbone.dtype)
        _fill(hidden, backbone, rows, ALONE, batch_tokens)
        return States(hidden, targets)
    if not file.exists():
        part = file.with_name(file.name + ".part")
        if processes.is_main:
            _allocate(part, shape, backbone.dtype)
        processes.wait()
        _fill(_mapped(part, shape, backbone.dtype), backbone, rows, processes, batch_tokens)
        processes.wait()
        if processes.is_main:
            part.replace(file)
        processes.wait()
    return States(_mapped(file, shape, backbone.dtype), targets)


def states_digest(backbone: Backbone, rows: Sequence[Distilled]) -> str:
    """Return a digest of what the states of ``rows`` depend on, order included."""
    digest = hashlib.sha256(f"{backbone.sha256} {backbone.dtype}".encode())
    for row in rows:
        digest.update(np.array([len(row.prompt), *row.prompt, *row.answer]).tobytes())
    return digest.hexdigest()


def targets_of(row: Distilled, num_heads: int) -> Tensor:
    """Return what the heads should guess along an answer: int64 [len(answer), K]."""
    padded = torch.tensor(row.answer + [NO_TARGET] * num_heads)
    return padded.unfold(0, num_heads + 1, 1)[:, 1:]


def of_like_length(rows: Sequence[Distilled], batch_tokens: int) -> list[list[int]]:
    """Deal the rows, by index, into batches of about ``batch_tokens`` tokens, padding included."""
    lengths = [len(row.prompt) + len(row.answer) for row in rows]
    batches: list[list[int]] = []
    for index in sorted(range(len(rows)), key=lengths.__getitem__):
        if not batches or (len(batches[-1]) + 1) * lengths[index] > batch_tokens:
            batches.append([])
        batches[-1].append(index)
    return batches


def padded(rows: Sequence[Distilled], device: torch.device) -> Tensor:
    """Return prompts and answers as one batch, padded on the right; nothing reads the last token.

    What stands behind a row changes nothing before it, so the padding needs no mask.
    """
    sequences = [row.prompt + row.answer[:-1] for row in rows]
    longest = max(map(len, sequences))
    return torch.tensor([s + [0] * (longest - len(s)) for s in sequences], device=device)


def answer_states(hidden: Tensor, rows: Sequence[Distilled]) -> Iterator[Tensor]:
    """Yield from ``hidden`` [rows, n, d] of a padded batch the states that emitted each answer."""
    for states, row in zip(hidden, rows, strict=True):
        first = len(row.prompt) - 1
        yield states[first : first + len(row.answer)]


@torch.inference_mode()
def _fill(
    hidden: Tensor,
    backbone: Backbone,
    rows: Sequence[Distilled],
    processes: Processes,
    batch_tokens: int,
) -> None:
    """Write this process's share of the states of ``rows`` into ``hidden`` [P, d]."""
    starts = [0, *accumulate(len(row.answer) for row in rows)]
    for batch in of_like_length(rows, batch_tokens)[processes.share]:
        together = [rows[index] for index in batch]
        tokens = padded(together, backbone.device)
        found = backbone.forward(tokens, backbone.new_cache(tokens.shape[1]))
        for index, states in zip(batch, answer_states(found, together), strict=True):
            hidden[starts[index] : starts[index + 1]] = states


def _allocate(file: Path, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Make a file of the right size, all of it on disk: a map of a full disk would crash."""
    size = shape[0] * shape[1] * dtype.itemsize
    file.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(file.parent).free
    if size > free:
        fits = free // (shape[1] * dtype.itemsize)
        raise DataError(
            f"the states of {shape[0]} answer tokens need {size / 1e9:.1f} GB beside "
            f"{file.parent}, {free / 1e9:.1f} GB are free; --max-tokens {fits} would fit"
        )
    with file.open("wb") as out:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(out.fileno(), 0, size)
        else:
            out.truncate(size)


def _mapped(file: Path, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return torch.from_file(str(file), shared=True, size=shape[0] * shape[1], dtype=dtype).view(
        shape
    )
