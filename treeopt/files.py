"""Files that are either whole or absent: atomic writes, digests, the user cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from treeopt.errors import TreeoptError


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` and move it there when the block succeeds.

    The temporary may become a file or a directory. When the block raises (a full disk, Ctrl-C),
    it is removed and whatever stood at ``path`` before is untouched.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        workspace = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise TreeoptError(f"cannot write {path}: {error.strerror}") from error
    # The suffix stays, because some writers choose their format by it.
    temporary = workspace / path.name
    try:
        yield temporary
        if path.is_dir() and temporary.is_dir():
            shutil.rmtree(path)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TreeoptError(f"cannot write {path}: {reason}") from error
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` to ``path`` as UTF-8, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_text(path: str | Path, error: type[TreeoptError]) -> str:
    """Return the UTF-8 text of ``path``; raise ``error`` with the reason when that fails."""
    try:
        return read_bytes(path, error).decode("utf-8")
    except UnicodeDecodeError as cause:
        raise error(f"{path} is not UTF-8 text (byte {cause.start})") from cause


def read_bytes(path: str | Path, error: type[TreeoptError]) -> bytes:
    """Return the bytes of ``path``; raise ``error`` with the reason when that fails."""
    try:
        return Path(path).read_bytes()
    except OSError as cause:
        raise error(f"cannot read {path}: {cause.strerror or cause}") from cause


def read_json(path: str | Path, error: type[TreeoptError]) -> Any:
    """Return the JSON value in ``path``; raise ``error`` with line and column when it is broken."""
    text = read_text(path, error)
    try:
        return json.loads(text)
    except json.JSONDecodeError as cause:
        where = f"line {cause.lineno}, column {cause.colno}"
        raise error(f"{path} is not valid JSON ({where}): {cause.msg}") from cause
    except (ValueError, RecursionError) as cause:  # an endless number, endless nesting
        raise error(f"{path} is not usable JSON: {cause}") from cause


def sha256_of_file(path: str | Path) -> str:
    """Return the hex sha256 of the file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def sha256_of_files(paths: Sequence[str | Path]) -> str:
    """Return the digest of one file, or of the digests of several."""
    digests = [sha256_of_file(path) for path in paths]
    return (
        digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    )


def sort_safetensors_header(path: str | Path) -> None:
    """Put the header of a safetensors file in a fixed order; the writer's own is random."""
    with open(path, "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        text = json.dumps(header, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        encoded = text.encode().ljust(length)
        assert len(encoded) == length  # the same tokens in another order
        file.seek(8)
        file.write(encoded)


def cache_dir() -> Path:
    """Return the directory for converted models: ``$TREEOPT_CACHE``, else the user's cache."""
    if explicit := os.environ.get("TREEOPT_CACHE"):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "treeopt"


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """Return the cache entry ``name``, made by ``make(temporary_path)`` when it is absent."""
    path = cache_dir() / name
    if not path.exists():
        with replacing(path) as temporary:
            make(temporary)
    return path
