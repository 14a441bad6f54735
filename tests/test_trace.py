"""Traces: counts against a slow loop, files, joining, refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from treeopt import trace as trace_module
from treeopt.errors import TraceError, TreeoptError
from treeopt.trace import MISSED, SCHEMA, RankTrace, concatenate

Make = Callable[..., RankTrace]

HEADS, RANKS = 3, 4
ROW = st.lists(st.integers(MISSED, RANKS - 1), min_size=HEADS, max_size=HEADS)
DOCUMENT = st.lists(ROW, min_size=1, max_size=8)
DOCUMENTS = st.lists(DOCUMENT, min_size=1, max_size=4)

# Lengths 4, 1, 3: position 0 scores three heads, the last position of a document none.
FOUR = [[0, 1, MISSED], [2, 0, 9], [3, 9, 9], [9, 9, 9]]
ONE = [[9, 9, 9]]
THREE = [[0, 0, 9], [MISSED, 9, 9], [9, 9, 9]]


@pytest.fixture
def trace(make_trace: Make) -> RankTrace:
    return make_trace([FOUR, ONE, THREE])


def same(first: RankTrace, second: RankTrace) -> bool:
    names = ("ranks", "probs", "target_probs", "entropy", "doc_start")
    arrays = [(getattr(first, name), getattr(second, name)) for name in names]
    return first.provenance == second.provenance and all(
        a.dtype == b.dtype and np.array_equal(a, b) for a, b in arrays
    )


def slow_counts(documents: list[list[list[int]]]) -> tuple[list[list[int]], list[int]]:
    """Count hits and trials token by token."""
    hits = [[0] * RANKS for _ in range(HEADS)]
    trials = [0] * HEADS
    for rows in documents:
        for position, row in enumerate(rows):
            for head in range(1, HEADS + 1):
                if position + head < len(rows):
                    trials[head - 1] += 1
                    if row[head - 1] >= 0:
                        hits[head - 1][row[head - 1]] += 1
    return hits, trials


def test_sizes_and_counts_by_hand(trace: RankTrace) -> None:
    assert (trace.num_documents, trace.num_positions) == (3, 8)
    assert (trace.num_heads, trace.num_ranks) == (HEADS, RANKS)
    assert trace.num_scored.tolist() == [3, 2, 1, 0, 0, 2, 1, 0]
    assert trace.trials().tolist() == [5, 3, 1]
    assert trace.hits().tolist() == [[2, 0, 1, 1], [2, 1, 0, 0], [0, 0, 0, 0]]


@given(documents=DOCUMENTS)
def test_counts_equal_a_slow_loop(make_trace: Make, documents: list[list[list[int]]]) -> None:
    trace = make_trace(documents, RANKS)
    hits, trials = slow_counts(documents)
    assert trace.hits().tolist() == hits
    assert trace.trials().tolist() == trials


def test_perfect_heads_are_always_right(make_trace: Make) -> None:
    # Medusa divides every head's hits by one literal, so that perfect heads of answers of 20
    # tokens come out as 1, .95, .90, .85, .80.
    documents = [[[0] * 5 for _ in range(length)] for length in (20, 20, 7, 1)]
    trace = make_trace(documents)
    assert trace.trials().tolist() == [19 + 19 + 6, 18 + 18 + 5, 17 + 17 + 4, 16 + 16 + 3, 32]
    assert (trace.hits()[:, 0] / trace.trials()).tolist() == [1.0] * 5


def test_document_of_one_token_scores_nothing(make_trace: Make) -> None:
    trace = make_trace([ONE])
    assert trace.num_scored.tolist() == [0]
    assert trace.trials().tolist() == [0, 0, 0]
    assert not trace.hits().any()


def test_document_shorter_than_the_heads(make_trace: Make) -> None:
    trace = make_trace([[[0] * 4] * 3])
    assert trace.num_scored.tolist() == [2, 1, 0]


def test_arrays_cannot_be_written(trace: RankTrace) -> None:
    with pytest.raises(ValueError, match="read-only"):
        trace.ranks[0, 0] = 1


# Parts and joins.


def test_documents_picks_in_the_order_asked(make_trace: Make, trace: RankTrace) -> None:
    picked = trace.documents([2, 0])
    assert picked.doc_start.tolist() == [0, 3, 7]
    assert np.array_equal(picked.ranks, make_trace([THREE, FOUR]).ranks)
    rows = [5, 6, 7, 0, 1, 2, 3]
    assert np.array_equal(picked.probs, trace.probs[rows])
    assert np.array_equal(picked.target_probs, trace.target_probs[rows])
    assert np.array_equal(picked.entropy, trace.entropy[rows])
    assert picked.provenance == trace.provenance


@given(documents=st.lists(DOCUMENT, min_size=3, max_size=6), data=st.data())
def test_joining_parts_gives_the_whole(
    make_trace: Make, documents: list[list[list[int]]], data: st.DataObject
) -> None:
    whole = make_trace(documents, RANKS)
    first = data.draw(st.integers(1, len(documents) - 2))
    second = data.draw(st.integers(first + 1, len(documents) - 1))
    indices = np.arange(len(documents))
    a, b, c = (whole.documents(part) for part in np.split(indices, [first, second]))
    assert same(concatenate([a, b, c]), whole)
    assert same(concatenate([concatenate([a, b]), c]), whole)
    assert same(concatenate([a, concatenate([b, c])]), whole)
    swapped = concatenate([c, a, b])
    assert np.array_equal(swapped.hits(), whole.hits())
    assert np.array_equal(swapped.trials(), whole.trials())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"heads_sha256": "f" * 64}, "traces differ in heads_sha256: 'cccc.*' and 'ffff"),
        ({"extra": 1}, "traces differ in extra: None and 1"),
        ({"decoding": {"rule": "sampling"}}, "traces differ in decoding"),
    ],
)
def test_traces_of_different_things_do_not_join(
    make_trace: Make, changed: dict[str, Any], message: str
) -> None:
    ours, theirs = make_trace([FOUR]), make_trace([FOUR], **changed)
    with pytest.raises(TraceError, match=message):
        concatenate([ours, ours, theirs])


# Refusals.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"probs": np.zeros((7, 3, 4), np.float16)}, "probs has shape"),
        ({"probs": np.zeros((8, 2, 4), np.float16)}, "probs has shape"),
        ({"probs": np.zeros((8, 3), np.float16)}, "probs is float16 .*; it must hold floats in 3"),
        ({"target_probs": np.zeros(7, np.float16)}, r"target_probs has shape \(7,\)"),
        ({"entropy": np.zeros(9, np.float16)}, r"entropy has shape \(9,\)"),
        ({"entropy": np.zeros(8, np.int64)}, "entropy is int64"),
        ({"ranks": np.full((8, 3), -1.0)}, r"ranks is float64 \[8, 3\]; it must hold integers"),
        ({"ranks": np.full(8, -1)}, "ranks is int64"),
        (
            {"ranks": np.zeros((8, 0), np.int16), "probs": np.zeros((8, 0, 4), np.float16)},
            "no heads",
        ),
        ({"doc_start": np.array([0, 4, 5])}, "rise from 0 to 8"),
        ({"doc_start": np.array([1, 4, 8])}, "rise from 0 to 8"),
        ({"doc_start": np.array([0, 4, 4, 8])}, "rise from 0 to 8"),
        ({"doc_start": np.array([0, 5, 4, 8])}, "rise from 0 to 8"),
        ({"doc_start": np.array([8])}, "at least one document"),
        ({"doc_start": np.array([0.0, 8.0])}, "doc_start is float64"),
        ({"provenance": []}, r"provenance must be a mapping, not \[\]"),
    ],
)
def test_refused_arrays(trace: RankTrace, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        replace(trace, **changes)


@pytest.mark.parametrize(
    ("at", "rank", "message"),
    [
        ((0, 0), RANKS, "ranks must lie between -1 and 3"),
        ((0, 0), -2, "ranks must lie between -1 and 3"),
        ((3, 0), 0, "past the end of its document"),
        ((1, 2), 1, "past the end of its document"),
    ],
)
def test_refused_ranks(trace: RankTrace, at: tuple[int, int], rank: int, message: str) -> None:
    ranks = trace.ranks.copy()
    ranks[at] = rank
    with pytest.raises(TraceError, match=message):
        replace(trace, ranks=ranks)


# Files.


def test_round_trip(tmp_path: Path, trace: RankTrace) -> None:
    file = tmp_path / "deep" / "calibration.safetensors"
    trace.save(file)
    assert same(RankTrace.load(file), trace)
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_round_trip_of_views(tmp_path: Path, trace: RankTrace) -> None:
    """Arrays that are not laid out row by row are saved by value, not by memory."""
    columns_first = replace(trace, ranks=np.asfortranarray(trace.ranks))
    columns_first.save(tmp_path / "trace")
    assert same(RankTrace.load(tmp_path / "trace"), trace)


def test_equal_traces_give_equal_bytes(tmp_path: Path, trace: RankTrace) -> None:
    # The safetensors writer orders metadata at random; a preset names the file by its sha256.
    again = replace(trace, provenance=dict(reversed(trace.provenance.items())))
    for number in range(8):
        (trace if number % 2 else again).save(tmp_path / str(number))
    assert len({file.read_bytes() for file in tmp_path.iterdir()}) == 1


def test_provenance_keeps_its_letters(tmp_path: Path, make_trace: Make) -> None:
    trace = make_trace([FOUR], data='prüfung "é"\n\x01\x7f\u2028🙂.jsonl')
    trace.save(tmp_path / "trace")
    assert same(RankTrace.load(tmp_path / "trace"), trace)


def foreign(file: Path) -> None:
    save_file({"weight": np.zeros(2)}, file)


def other_schema(file: Path) -> None:
    save_file({"weight": np.zeros(2)}, file, {"schema": "treeopt.trace/2"})


def no_provenance(file: Path) -> None:
    RankTrace.load(file)
    save_file(load_file(file), file, {"schema": SCHEMA})


def broken_provenance(file: Path) -> None:
    save_file(load_file(file), file, {"schema": SCHEMA, "provenance": "{"})


def lacks_an_array(file: Path) -> None:
    arrays = load_file(file)
    del arrays["entropy"]
    save_file(arrays, file, {"schema": SCHEMA, "provenance": "{}"})


def has_another_array(file: Path) -> None:
    arrays = load_file(file) | {"weight": np.zeros(2)}
    save_file(arrays, file, {"schema": SCHEMA, "provenance": "{}"})


def wrong_dimensions(file: Path) -> None:
    arrays = load_file(file)
    arrays["probs"] = arrays["probs"][:, :, 0].copy()
    save_file(arrays, file, {"schema": SCHEMA, "provenance": "{}"})


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def cut_in_the_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:20])


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def text(file: Path) -> None:
    file.write_text("not a trace at all")


def removed(file: Path) -> None:
    file.unlink()


def a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (foreign, "is not a calibration trace: no schema, not treeopt.trace/1"),
        (other_schema, "is not a calibration trace: treeopt.trace/2, not treeopt.trace/1"),
        (no_provenance, "is not a calibration trace: 'provenance'"),
        (broken_provenance, "is not a calibration trace"),
        (lacks_an_array, "is not a calibration trace: .*entropy"),
        (has_another_array, "is not a calibration trace: .*weight"),
        (wrong_dimensions, "probs is float16"),
        (cut_short, "is not a calibration trace"),
        (cut_in_the_header, "is not a calibration trace"),
        (emptied, "is not a calibration trace"),
        (text, "is not a calibration trace"),
        (removed, "cannot read .*No such file"),
        (a_folder, "cannot read"),
    ],
)
def test_files_that_are_refused(
    tmp_path: Path, trace: RankTrace, damage: Callable[[Path], None], message: str
) -> None:
    file = tmp_path / "calibration.safetensors"
    trace.save(file)
    damage(file)
    with pytest.raises(TraceError, match=message):
        RankTrace.load(file)


def test_failed_save_leaves_the_old_file_alone(
    tmp_path: Path, trace: RankTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "calibration.safetensors"
    trace.save(file)
    before = file.read_bytes()

    def full_disk(arrays: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace_module, "save_file", full_disk)
    with pytest.raises(TreeoptError, match="calibration.safetensors: No space left on device"):
        trace.save(file)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_failed_first_save_leaves_nothing(
    tmp_path: Path, trace: RankTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(arrays: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(trace_module, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trace.save(tmp_path / "calibration.safetensors")
    assert list(tmp_path.iterdir()) == []
