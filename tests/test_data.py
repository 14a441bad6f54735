"""Prompt files in every shape that is known, and every way in which they can be wrong."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from calibration.data import held_out_prompts, read_dataset, shipped_prompts
from treeopt.errors import DataError

Row = dict[str, Any]
USER = [{"role": "user", "content": "Hi"}]


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        read_dataset(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("row", "messages", "answer"),
    [
        ({"instruction": "Hi"}, USER, None),
        ({"instruction": " Hi ", "input": "", "output": "Yo"}, USER, "Yo"),
        ({"instruction": "Hi", "input": None, "output": ""}, USER, None),
        (
            {"instruction": "Add", "input": " 1 2 ", "output": "3"},
            [{"role": "user", "content": "Add\n\n1 2"}],
            "3",
        ),
        ({"messages": USER}, USER, None),
        ({"messages": [*USER, {"role": "assistant", "content": "Yo"}]}, USER, "Yo"),
        (
            {"messages": [{"role": "system", "content": "Be"}, *USER]},
            [{"role": "system", "content": "Be"}, *USER],
            None,
        ),
        (
            {"messages": [*USER, {"role": "assistant", "content": "Yo"}, *USER]},
            [*USER, {"role": "assistant", "content": "Yo"}, *USER],
            None,
        ),
        ({"conversations": [{"from": "human", "value": "Hi"}]}, USER, None),
        (
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]},
            USER,
            "Yo",
        ),
        (
            {
                "conversations": [
                    {"from": "system", "value": "Be"},
                    {"from": "human", "value": "Hi"},
                ]
            },
            [{"role": "system", "content": "Be"}, *USER],
            None,
        ),
        ({"conversations": USER}, USER, None),
        ({"turns": ["Hi", "And then?"], "category": "writing"}, USER, None),
        ({"prompt": "Hi"}, USER, None),
        ({"prompt": "Hi", "answer": "Yo"}, USER, "Yo"),
        ({"question": "Hi", "id": 7}, USER, None),
        ({"text": "Hi\n"}, USER, None),
        ({"text": "the whole", "instruction": "Hi"}, USER, None),
    ],
)
def test_shapes(tmp_path, row, messages, answer):
    (prompt,) = read_dataset(written(tmp_path / "x.jsonl", row)).prompts
    assert prompt.messages == messages
    assert prompt.answer == answer
    assert prompt.answer_ids is None


ROWS = [{"prompt": "one"}, {"text": "zwei – Ü"}, {"turns": ["three"]}]


def contents(path: Path) -> list[str]:
    return [prompt.messages[0]["content"] for prompt in read_dataset(path).prompts]


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(map(json.dumps, ROWS)),
        "\n\n".join(map(json.dumps, ROWS)) + "\n \n",
        "\r\n".join(map(json.dumps, ROWS)) + "\r\n",
        json.dumps(ROWS),
        "\n  " + json.dumps(ROWS, indent=2, ensure_ascii=False) + "\n",
        "\ufeff" + "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS),
        "\ufeff" + json.dumps(ROWS),
    ],
    ids=["jsonl", "blank lines", "crlf", "list", "indented list", "bom", "bom list"],
)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_files(tmp_path, text, packed):
    path = tmp_path / ("x.json.gz" if packed else "x.json")
    data = text.encode()
    path.write_bytes(gzip.compress(data) if packed else data)
    assert contents(path) == ["one", "zwei – Ü", "three"]


def test_line_separators_inside_a_text_do_not_end_the_row(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a\u2028b\u0085c"}\n{"text": "d"}\n', encoding="utf-8")
    assert contents(path) == ["a\u2028b\u0085c", "d"]


def test_name_digest_and_limit(tmp_path):
    path = written(tmp_path / "x.jsonl", *ROWS, 3)
    dataset = read_dataset(path, 2)
    assert (dataset.name, len(dataset.prompts)) == ("x.jsonl", 2)
    assert dataset.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    packed = tmp_path / "y.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_dataset(packed, 2).sha256 == hashlib.sha256(packed.read_bytes()).hexdigest()


def test_files_of_distill(tmp_path):
    row = {
        "messages": [*USER, {"role": "assistant", "content": "Yo"}],
        "prompt_ids": [1, 2],
        "answer_ids": [5, 6, 0],
    }
    path = written(tmp_path / "x.jsonl", {"distilled": {"backbone": "b"}}, row)
    (prompt,) = read_dataset(path).prompts
    assert (prompt.messages, prompt.answer, prompt.answer_ids) == (USER, "Yo", [5, 6, 0])


# What is wrong with a file


def test_missing_file_and_directory(tmp_path):
    assert refusal(tmp_path / "x") == f"cannot read {tmp_path / 'x'}: No such file or directory"
    assert refusal(tmp_path) == f"cannot read {tmp_path}: Is a directory"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "a"}\n{"text": \n', "line 2 is not valid JSON: Expecting value"),
        ('{"text": "a"}\n\n\n{"text" "b"}\n', "line 4 is not valid JSON: Expecting ':' delimiter"),
        ('[{"text": "a"},\n {"text": "b"}', "line 2 is not valid JSON: Expecting ',' delimiter"),
        ("", "holds no prompts"),
        ("\n \n", "holds no prompts"),
        ("[]", "holds no prompts"),
        ('{"distilled": {}}\n', "holds no prompts"),
        ('{"text": "a"}\n["text", "b"]\n', "row 2 is list, not an object with keys"),
        ('["a"]', "row 1 is str, not an object with keys"),
        ("7", "row 1 is int, not an object with keys"),
        ("null", "row 1 is NoneType, not an object with keys"),
        (
            '{"text": "a"}\n{"title": "a", "body": "b"}',
            "row 2 has keys title, body; expected one of instruction, messages, conversations, "
            "turns, prompt, question, text",
        ),
        ("{}", "row 1 has keys (none); expected one of instruction, messages"),
    ],
)
def test_broken_files(tmp_path, text, message):
    path = tmp_path / "x.jsonl"
    path.write_text(text, encoding="utf-8")
    assert refusal(path).startswith(f"{path} {message}")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": " \n "},
        {"text": ""},
        {"instruction": "", "input": ""},
        {"turns": [""]},
        {"messages": [{"role": "user", "content": ""}]},
        {"messages": [{"role": "assistant", "content": "only me"}]},
    ],
)
def test_empty_prompts(tmp_path, row):
    path = written(tmp_path / "x.jsonl", {"text": "a"}, row)
    assert refusal(path) == f"{path} row 2 has an empty prompt"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": []},
        {"messages": [{"role": "user"}]},
        {"messages": [{"content": "no role"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
        {"messages": "Hi"},
        {"messages": None},
        {"conversations": [{"from": "human"}]},
        {"turns": []},
        {"turns": [["Hi"]]},
        {"turns": "Hi"},
        {"turns": None},
        {"prompt": None},
        {"prompt": 7},
        {"prompt": ["Hi"]},
        {"question": {}},
        {"text": 1.5},
        {"instruction": None},
        {"instruction": "Hi", "input": 7},
        {"instruction": "Hi", "output": 7},
        {"prompt": "Hi", "answer": ["Yo"]},
    ],
)
def test_malformed_rows_name_row_and_key(tmp_path, row):
    path = written(tmp_path / "x.jsonl", row)
    assert refusal(path).startswith(f"{path} row 1: {next(iter(row))} is malformed (")


@pytest.mark.parametrize(
    "data",
    [
        gzip.compress(b'{"text": "a"}\n' * 50)[:-9],
        gzip.compress(b'{"text": "a"}\n' * 50)[:10] + b"\xff" * 20,
        gzip.compress(b'{"text": "a"}\n' * 50)[:-8] + b"\0" * 8,
        b"\x1f\x8b",
        b"\x1f\x8b\x07rest",
    ],
    ids=["truncated", "garbled", "wrong checksum", "magic only", "unknown method"],
)
def test_damaged_gzip(tmp_path, data):
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(data)
    assert refusal(path).startswith(f"{path} is a damaged gzip file: ")


def test_not_utf8(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes('{"text": "é"}'.encode("latin-1"))
    assert refusal(path) == f"{path} is not UTF-8 text (byte 10)"
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert refusal(path) == f"{path} is not UTF-8 text (byte 10)"


# What treeopt ships


def shipped(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_shipped_prompts():
    rows, held_out = shipped(shipped_prompts()), shipped(held_out_prompts())
    assert set(Counter(row["category"] for row in rows).values()) == {30}
    assert len(rows) == 240
    assert len(held_out) == 80
    assert {row["category"] for row in held_out} == {row["category"] for row in rows}
    for path, number in ((shipped_prompts(), 240), (held_out_prompts(), 80)):
        assert len(set(contents(path))) == len(contents(path)) == number
    assert set(contents(shipped_prompts())).isdisjoint(contents(held_out_prompts()))
