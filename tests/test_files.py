"""Files are whole or absent: replacing, caching, reading."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from treeopt.errors import CostError, DataError, TreeoptError
from treeopt.files import (
    cache_dir,
    cached,
    read_bytes,
    read_json,
    read_text,
    replacing,
    sha256_of_file,
    sort_safetensors_header,
    write_text,
)


def content(folder: Path) -> dict[str, str]:
    """Return every file under ``folder``, hidden ones included."""
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def write_half(target: Path, error: BaseException) -> None:
    """Fail in the middle of writing ``target``."""
    with replacing(target) as temporary:
        temporary.write_text("half")
        raise error


# Replacing.


def test_the_new_file_appears_only_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")
    with replacing(target) as temporary:
        temporary.write_text("new")
        assert target.read_text() == "old"
        assert temporary.suffix == ".txt"
    assert content(tmp_path) == {"a.txt": "new"}
    assert list(tmp_path.iterdir()) == [target]


def test_missing_folders_are_made(tmp_path: Path) -> None:
    write_text(tmp_path / "deep" / "er" / "a.txt", "é")
    assert (tmp_path / "deep/er/a.txt").read_bytes() == "é".encode()


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("before", [{}, {"a.txt": "old"}])
def test_an_exception_inside_changes_nothing(
    tmp_path: Path, error: BaseException, before: dict[str, str]
) -> None:
    for name, text in before.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(type(error)):
        write_half(tmp_path / "a.txt", error)
    assert content(tmp_path) == before
    assert len(list(tmp_path.iterdir())) == len(before)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")
    with pytest.raises(TreeoptError, match="cannot write .*a.txt: No space left on device"):
        write_half(tmp_path / "a.txt", OSError(28, os.strerror(28)))
    assert content(tmp_path) == {"a.txt": "old"}


def test_a_folder_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "inside").write_text("kept")
    with pytest.raises(TreeoptError, match="cannot write .*a: Is a directory"):
        write_text(tmp_path / "a", "new")
    assert content(tmp_path) == {"a/inside": "kept"}
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_a_file_is_not_replaced_by_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("kept")
    message = "cannot write .*a: Not a directory"
    with pytest.raises(TreeoptError, match=message), replacing(tmp_path / "a") as temporary:
        temporary.mkdir()
    assert content(tmp_path) == {"a": "kept"}
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_a_folder_replaces_a_folder(tmp_path: Path) -> None:
    for text in ("old", "new"):
        with replacing(tmp_path / "a") as temporary:
            temporary.mkdir()
            (temporary / text).write_text(text)
    assert content(tmp_path) == {"a/new": "new"}


def test_a_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("kept")
    with pytest.raises(TreeoptError, match="cannot write .*b.txt: (Not a directory|File exists)"):
        write_text(tmp_path / "a" / "b.txt", "new")
    assert content(tmp_path) == {"a": "kept"}


def test_permission_denied_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(**options: object) -> str:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr("tempfile.mkdtemp", denied)
    with pytest.raises(TreeoptError, match="cannot write .*a.txt: Permission denied"):
        write_text(tmp_path / "a.txt", "new")
    assert content(tmp_path) == {}


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(TreeoptError, match="cannot write .*: File name too long"):
        write_text(tmp_path / ("a" * 300), "new")


def test_written_files_have_ordinary_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("x")
    write_text(tmp_path / "ours", "x")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "ours")}
    assert len(modes) == 1


# The cache.


def test_cache_entry_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREEOPT_CACHE", str(tmp_path / "cache"))
    made = []

    def make(path: Path) -> None:
        made.append(path)
        path.mkdir()
        (path / "weights").write_text("w")

    first, second = cached("models/x", make), cached("models/x", make)
    assert first == second == tmp_path / "cache" / "models" / "x"
    assert len(made) == 1
    assert content(tmp_path) == {"cache/models/x/weights": "w"}


def test_failed_cache_entry_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREEOPT_CACHE", str(tmp_path))

    def broken(path: Path) -> None:
        path.mkdir()
        (path / "half").write_text("h")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached("x", broken)
    assert list(tmp_path.iterdir()) == []
    assert cached("x", lambda path: path.write_text("whole") and None).read_text() == "whole"


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TREEOPT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / "home" / ".cache" / "treeopt"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "treeopt"
    monkeypatch.setenv("TREEOPT_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    assert list(tmp_path.iterdir()) == []


# Reading.


@pytest.mark.parametrize("read", [read_bytes, read_text, read_json])
@pytest.mark.parametrize("error", [CostError, DataError])
def test_missing_file_raises_the_error_asked_for(
    tmp_path: Path,
    read: Callable[[Path, type[TreeoptError]], object],
    error: type[TreeoptError],
) -> None:
    with pytest.raises(error, match="cannot read .*a.json: No such file or directory"):
        read(tmp_path / "a.json", error)


def test_read(tmp_path: Path) -> None:
    write_text(tmp_path / "a.json", '{"é": [1, 2.5, null]}\r\n')
    assert read_json(tmp_path / "a.json", DataError) == {"é": [1, 2.5, None]}
    assert read_text(tmp_path / "a.json", DataError).endswith("\r\n")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": 1,\n "b" 2}', r"a.json is not valid JSON \(line 2, column 6\)"),
        (b"", r"is not valid JSON \(line 1, column 1\)"),
        (b'"\xe9"', r"a.json is not UTF-8 text \(byte 1\)"),
        (b"[" * 100_000, "a.json is not usable JSON: maximum recursion depth"),
        (b"1" * 5000, "a.json is not usable JSON: Exceeds the limit"),
    ],
)
def test_broken_json(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(DataError, match=message):
        read_json(tmp_path / "a.json", DataError)


@pytest.mark.parametrize("size", [0, 1, (1 << 20) + 7])
def test_sha256(tmp_path: Path, size: int) -> None:
    data = bytes(range(251)) * (size // 251 + 1)
    (tmp_path / "a").write_bytes(data[:size])
    assert sha256_of_file(tmp_path / "a") == hashlib.sha256(data[:size]).hexdigest()


def test_safetensors_header_in_a_fixed_order(tmp_path: Path) -> None:
    # The writer keeps metadata in a hash map of random order.
    metadata = {name: f'é "{name}"\n\x01\x7f/\u2028' for name in "zyxwvuts"}
    arrays = {"b": np.arange(5.0), "a": np.arange(6, dtype=np.int16).reshape(2, 3)}
    for number in range(3):
        save_file(arrays, tmp_path / str(number), metadata)
        sort_safetensors_header(tmp_path / str(number))
    assert len({(tmp_path / str(number)).read_bytes() for number in range(3)}) == 1
    with safe_open(tmp_path / "0", "np") as file:
        assert file.metadata() == metadata
        for name, array in arrays.items():
            assert np.array_equal(file.get_tensor(name), array)
    raw = (tmp_path / "0").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert list(header) == ["__metadata__", "a", "b"]
