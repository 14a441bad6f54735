"""What calibration saw: the rank of every emitted token in every head's list.

Legend: ``S`` documents, ``P`` positions of all documents, ``K`` heads, ``R`` ranks kept.

A document is one answer of n tokens ``y[0..n-1]``. Position p is the state that emitted ``y[p]``;
there, head k guesses ``y[p + k]``. Positions too close to the end for head k do not count for it,
neither as hit nor as trial.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from treeopt.errors import TraceError
from treeopt.files import replacing, sort_safetensors_header

SCHEMA = "treeopt.trace/1"
MISSED = -1
FOLDS = 5  # parts that documents are dealt into, to judge on one what the others taught


@dataclass(frozen=True)
class RankTrace:
    """Ranks of emitted tokens, made along text that the backbone itself emitted.

    ranks: ``ranks[p, k-1]`` is the rank, in head k's list at position p, of the token emitted k
        places on; ``MISSED`` beyond R and past the document's end (``num_scored`` tells which).
    probs: the heads' own probabilities of their first R guesses.
    target_probs: the backbone's probability of the token it emitted at p.
    entropy: of the backbone's distribution at p, in nats.
    doc_start: first position of each document, and P at the end.
    provenance: what the trace was made from; equal keys make two traces concatenable.
    """

    ranks: NDArray[np.int16]  # [P, K]
    probs: NDArray[np.float16]  # [P, K, R]
    target_probs: NDArray[np.float16]  # [P]
    entropy: NDArray[np.float16]  # [P]
    doc_start: NDArray[np.int64]  # [S + 1]
    provenance: dict[str, Any]

    def __post_init__(self) -> None:
        _check(self)
        for name in ("ranks", "probs", "target_probs", "entropy", "doc_start"):
            getattr(self, name).setflags(write=False)

    @property
    def num_documents(self) -> int:
        """S."""
        return len(self.doc_start) - 1

    @property
    def num_positions(self) -> int:
        """P."""
        return int(self.ranks.shape[0])

    @property
    def num_heads(self) -> int:
        """K."""
        return int(self.ranks.shape[1])

    @property
    def num_ranks(self) -> int:
        """R."""
        return int(self.probs.shape[2])

    @cached_property
    def num_scored(self) -> NDArray[np.int64]:
        """int64 [P]: heads that position p can score, those whose token still is in the document.

        A document of 3 tokens and 4 heads gives ``[2, 1, 0]``.
        """
        ends = np.repeat(self.doc_start[1:], np.diff(self.doc_start))
        left: NDArray[np.int64] = ends - 1 - np.arange(self.num_positions)
        return np.minimum(left, self.num_heads)

    @cached_property
    def fold_of(self) -> NDArray[np.int64]:
        """int64 [S]: the fold of each document, below ``FOLDS``.

        Documents are dealt in turn, so that an order by category is spread over all folds.
        """
        return np.arange(self.num_documents) % FOLDS

    @property
    def fold_at(self) -> NDArray[np.int64]:
        """int64 [P]: the fold of each position's document."""
        return np.repeat(self.fold_of, np.diff(self.doc_start))

    def hits(self) -> NDArray[np.int64]:
        """int64 [K, R]: ``hits[k-1, r]`` counts positions where head k's rank-r guess was right."""
        counts = [
            np.bincount(column[column >= 0], minlength=self.num_ranks) for column in self.ranks.T
        ]
        return np.stack(counts).astype(np.int64)

    def trials(self) -> NDArray[np.int64]:
        """int64 [K]: positions that head k could score; the denominator of every row of hits."""
        heads = np.arange(1, self.num_heads + 1)
        trials: NDArray[np.int64] = np.count_nonzero(self.num_scored[:, None] >= heads, axis=0)
        return trials

    def documents(self, which: Sequence[int] | NDArray[np.int64]) -> RankTrace:
        """Return the trace of the documents ``which``, in that order."""
        starts, ends = self.doc_start[:-1][which], self.doc_start[1:][which]
        rows = np.concatenate([np.arange(a, b) for a, b in zip(starts, ends, strict=True)])
        doc_start = np.concatenate([[0], np.cumsum(ends - starts)])
        return RankTrace(
            self.ranks[rows],
            self.probs[rows],
            self.target_probs[rows],
            self.entropy[rows],
            doc_start,
            self.provenance,
        )

    def save(self, path: str | Path) -> None:
        """Write the trace as safetensors, whole or not at all; equal traces give equal bytes."""
        arrays = {
            "ranks": self.ranks,
            "probs": self.probs,
            "target_probs": self.target_probs,
            "entropy": self.entropy,
            "doc_start": self.doc_start,
        }
        metadata = {"schema": SCHEMA, "provenance": json.dumps(self.provenance, sort_keys=True)}
        with replacing(path) as temporary:
            # safetensors would write the memory of a strided view, not its values.
            save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, temporary, metadata)
            sort_safetensors_header(temporary)

    @classmethod
    def load(cls, path: str | Path) -> RankTrace:
        """Read what ``save`` wrote.

        Raises:
            TraceError: the file is missing, damaged, or not a trace.
        """
        try:
            with safe_open(path, "np") as file:
                metadata = file.metadata() or {}
                if metadata.get("schema") != SCHEMA:
                    found = metadata.get("schema", "no schema")
                    raise TraceError(f"{path} is not a calibration trace: {found}, not {SCHEMA}")
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return cls(**arrays, provenance=json.loads(metadata["provenance"]))
        except OSError as error:
            raise TraceError(f"cannot read {path}: {error.strerror or error}") from error
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{path} is not a calibration trace: {error}") from error


def concatenate(traces: Sequence[RankTrace]) -> RankTrace:
    """Return one trace of all documents, in order.

    Raises:
        TraceError: the traces were made from different things.
    """
    first = traces[0]
    for trace in traces[1:]:
        if trace.probs.shape[1:] != first.probs.shape[1:]:
            raise TraceError(
                f"traces differ in heads and ranks: {first.probs.shape[1:]} and "
                f"{trace.probs.shape[1:]}"
            )
        for key in first.provenance.keys() | trace.provenance.keys():
            ours, theirs = first.provenance.get(key), trace.provenance.get(key)
            if ours != theirs:
                raise TraceError(f"traces differ in {key}: {ours!r} and {theirs!r}")
    lengths = np.concatenate([np.diff(trace.doc_start) for trace in traces])
    return RankTrace(
        np.concatenate([trace.ranks for trace in traces]),
        np.concatenate([trace.probs for trace in traces]),
        np.concatenate([trace.target_probs for trace in traces]),
        np.concatenate([trace.entropy for trace in traces]),
        np.concatenate([[0], np.cumsum(lengths)]),
        first.provenance,
    )


def _check(trace: RankTrace) -> None:
    if not isinstance(trace.provenance, dict):
        raise TraceError(f"provenance must be a mapping, not {trace.provenance!r}")
    layout = {
        "ranks": "i2",
        "probs": "f3",
        "target_probs": "f1",
        "entropy": "f1",
        "doc_start": "i1",
    }
    for name, expected_layout in layout.items():
        array = getattr(trace, name)
        if f"{array.dtype.kind}{array.ndim}" != expected_layout:
            kind = "integers" if expected_layout[0] == "i" else "floats"
            raise TraceError(
                f"{name} is {array.dtype} {list(array.shape)}; it must hold {kind} "
                f"in {expected_layout[1]} dimensions"
            )
    positions, heads = trace.ranks.shape
    shapes = {
        "probs": (trace.probs.shape[:2], (positions, heads)),
        "target_probs": (trace.target_probs.shape, (positions,)),
        "entropy": (trace.entropy.shape, (positions,)),
    }
    for name, (found, expected) in shapes.items():
        if found != expected:
            raise TraceError(
                f"{name} has shape {found}; ranks of {trace.ranks.shape} need {expected}"
            )
    starts = trace.doc_start
    if len(starts) < 2 or starts[0] != 0 or starts[-1] != positions or (np.diff(starts) <= 0).any():
        raise TraceError(
            f"doc_start must rise from 0 to {positions} and name at least one document"
        )
    if heads == 0:
        raise TraceError("the trace has no heads")
    if (trace.ranks >= trace.num_ranks).any() or (trace.ranks < MISSED).any():
        raise TraceError(f"ranks must lie between {MISSED} and {trace.num_ranks - 1}")
    unscored = np.arange(heads) >= trace.num_scored[:, None]
    if (trace.ranks[unscored] != MISSED).any():
        raise TraceError("a rank is given for a token past the end of its document")
