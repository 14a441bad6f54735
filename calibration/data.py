"""Prompt files: JSONL or JSON, plain or gzipped, in the shapes that the field uses."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from treeopt.errors import DataError
from treeopt.files import read_bytes

Message = dict[str, str]
Row = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One conversation up to where the model speaks, and its answer where the file has one.

    ``answer_ids`` are the answer's exact tokens, known for files that ``treeopt distill`` wrote.
    """

    messages: list[Message]
    answer: str | None = None
    answer_ids: list[int] | None = None


@dataclass(frozen=True)
class Dataset:
    """The prompts of one file. ``sha256`` is of the file's bytes, before any unpacking."""

    name: str
    sha256: str
    prompts: list[Prompt]


def shipped_prompts() -> Path:
    """Return the calibration prompts that come with treeopt."""
    return Path(str(files("calibration"))) / "prompts.jsonl"


def held_out_prompts() -> Path:
    """Return the prompts that neither shipped heads nor shipped presets have seen."""
    return Path(str(files("calibration"))) / "held_out.jsonl"


def read_dataset(path: str | Path, limit: int | None = None) -> Dataset:
    """Return the prompts of a file, at most the first ``limit``.

    Known shapes of a row: Alpaca (``instruction``, ``input``), chat (``messages`` or
    ``conversations``), MT-Bench (``turns``, of which the first is used), ``prompt``, ``question``,
    ``text``.

    Raises:
        DataError: unreadable, broken, empty, or a row of no known shape (with the keys found).
    """
    data = read_bytes(path, DataError)
    rows = _rows(path, _text(path, data))[:limit]
    if not rows:
        raise DataError(f"{path} holds no prompts")
    prompts = [_prompt(path, number, row) for number, row in enumerate(rows, 1)]
    return Dataset(Path(path).name, hashlib.sha256(data).hexdigest(), prompts)


def _text(path: str | Path, data: bytes) -> str:
    try:
        unpacked = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        return unpacked.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is a damaged gzip file: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start})") from error


def _rows(path: str | Path, text: str) -> list[Any]:
    """Return the rows of a JSON list, or of one JSON value per line."""
    if text.lstrip().startswith("["):
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise DataError(f"{path} line {error.lineno} is not valid JSON: {error.msg}") from error
        return list(value)
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise DataError(f"{path} line {number} is not valid JSON: {error.msg}") from error
    if rows and isinstance(rows[0], dict) and "distilled" in rows[0]:
        del rows[0]  # the conditions that `treeopt distill` notes on top
    return rows


def _prompt(path: str | Path, number: int, row: Any) -> Prompt:
    if not isinstance(row, dict):
        raise DataError(f"{path} row {number} is {type(row).__name__}, not an object with keys")
    for key, read in _SHAPES.items():
        if key in row:
            try:
                prompt = read(row)
            except (KeyError, TypeError, IndexError, AttributeError) as error:
                raise DataError(f"{path} row {number}: {key} is malformed ({error!r})") from error
            if not prompt.messages or not all(m["content"].strip() for m in prompt.messages):
                raise DataError(f"{path} row {number} has an empty prompt")
            return prompt
    raise DataError(
        f"{path} row {number} has keys {', '.join(map(str, row)) or '(none)'}; "
        f"expected one of {', '.join(_SHAPES)}"
    )


def _alpaca(row: Row) -> Prompt:
    extra = row.get("input") or ""
    content = row["instruction"].strip() + (f"\n\n{extra.strip()}" if extra.strip() else "")
    return _single(content, row.get("output"))


def _chat(key: str) -> Callable[[Row], Prompt]:
    def read(row: Row) -> Prompt:
        messages = [_message(message) for message in row[key]]
        answer = messages.pop()["content"] if messages[-1]["role"] == "assistant" else None
        return Prompt(messages, answer, row.get("answer_ids"))

    return read


_ROLES = {"human": "user", "gpt": "assistant"}  # the names that ShareGPT-style files use


def _message(message: Row) -> Message:
    role = message["role"] if "role" in message else message["from"]
    content = message["content"] if "content" in message else message["value"]
    return {"role": _ROLES.get(role, role), "content": content.strip()}


def _single(content: str, answer: str | None = None) -> Prompt:
    if not isinstance(answer or "", str):
        raise TypeError(f"the answer is {type(answer).__name__}, not text")
    return Prompt([{"role": "user", "content": content.strip()}], answer or None)


def _turns(row: Row) -> Prompt:
    if not isinstance(row["turns"], list):
        raise TypeError(f"{type(row['turns']).__name__}, not a list")
    return _single(row["turns"][0])


_SHAPES: dict[str, Callable[[Row], Prompt]] = {
    "instruction": _alpaca,
    "messages": _chat("messages"),
    "conversations": _chat("conversations"),
    "turns": _turns,
    "prompt": lambda row: _single(row["prompt"], row.get("answer")),
    "question": lambda row: _single(row["question"]),
    "text": lambda row: _single(row["text"]),
}
