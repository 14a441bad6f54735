"""Fixtures that several test modules share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from treeopt.trace import MISSED, RankTrace
from treeopt.tree import Tree

# Every run tries the same examples, so a failure is one that anybody can repeat.
settings.register_profile("treeopt", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("treeopt")

DATA = Path(__file__).parent / "data"

Documents = Sequence[Sequence[Sequence[int]]]  # per document a table of ranks, [n, K]

PROVENANCE: dict[str, Any] = {
    "backbone": "tiny",
    "backbone_sha256": "b" * 64,
    "heads": "tiny-heads",
    "heads_sha256": "c" * 64,
    "heads_layout": "shared_lm_head",
    "data": "prompts.jsonl",
    "data_sha256": "d" * 64,
    "decoding": {"rule": "greedy"},
    "mode": "generate",
    "max_new_tokens": 64,
    "dtype": "float32",
    "template_sha256": "e" * 64,
}


@pytest.fixture(scope="session")
def tree() -> Tree:
    """The worked example of every docstring."""
    return Tree.from_paths([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of published figures; each file names its source."""
    return DATA


@pytest.fixture(scope="session")
def make_trace() -> Callable[..., RankTrace]:
    """Return a builder of traces from the ranks of their documents.

    A rank of a token past its document's end is ignored, so that any table will do. The other
    columns differ from position to position, so that a mix-up shows.
    """

    def make(documents: Documents, num_ranks: int = 4, **provenance: Any) -> RankTrace:
        tables = [np.array(rows, dtype=np.int16) for rows in documents]
        for table in tables:
            positions, heads = np.indices(table.shape)
            table[positions + heads + 1 >= len(table)] = MISSED
        ranks = np.concatenate(tables)
        positions, heads = ranks.shape
        falling = 0.5 ** np.arange(1, num_ranks + 1)
        scale = np.linspace(0.5, 1, positions * heads).reshape(positions, heads, 1)
        return RankTrace(
            ranks,
            (scale * falling).astype(np.float16),
            np.linspace(1, 0.25, positions).astype(np.float16),
            np.linspace(0, 3, positions).astype(np.float16),
            np.concatenate([[0], np.cumsum([len(table) for table in tables])]),
            {**PROVENANCE, **provenance},
        )

    return make
