"""Self-distillation: the backbone's own greedy answers, the text that heads learn from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from treeopt.decoder.plain import Answer, answer_batch, like_length, room_for
from treeopt.errors import DataError
from treeopt.files import read_text, write_text
from treeopt.models.backbone import Backbone, Message

_WINDOW = 16  # batches sorted by length together; small, so that a prefix of the file is a fair mix


@dataclass(frozen=True)
class Distilled:
    """One prompt and the backbone's answer, as token ids; ``answer`` includes the end token."""

    prompt: list[int]
    answer: list[int]


def distill(
    backbone: Backbone,
    conversations: Sequence[list[Message]],
    out: Path,
    *,
    max_new_tokens: int,
    batch_size: int,
    on_answers: Callable[[int, int], None] = lambda answers, tokens: None,
) -> None:
    """Append the backbone's answer to every conversation to the JSONL file ``out``.

    Resumable: what ``out`` answers already is skipped, and a line cut short by a kill is dropped. A
    file made by another backbone, template or limit is refused.

    Args:
        on_answers: called with the numbers of new answers and new tokens.

    Raises:
        DataError: ``out`` exists and was made under other conditions, or a prompt does not fit.
    """
    conditions = {
        "backbone": backbone.id,
        "backbone_sha256": backbone.sha256,
        "template_sha256": template_sha256(backbone),
        "decoding": "greedy",
        "max_new_tokens": max_new_tokens,
    }
    answered = _resume(out, conditions)
    distinct = {tuple(backbone.encode(messages)): messages for messages in conversations}
    todo = [ids for ids in distinct if ids not in answered]
    for ids in todo:
        room_for(backbone, ids, max_new_tokens)
    with out.open("a", encoding="utf-8") as file:
        for start in range(0, len(todo), _WINDOW * batch_size):
            window = todo[start : start + _WINDOW * batch_size]
            for batch in like_length(window, batch_size):
                for ended in answer_batch(backbone, [window[i] for i in batch], max_new_tokens):
                    for answer in ended:
                        messages = distinct[tuple(answer.prompt)]
                        file.write(json.dumps(_row(backbone, messages, answer)) + "\n")
                    if ended:
                        file.flush()
                        on_answers(len(ended), sum(len(answer.tokens) for answer in ended))


def _row(backbone: Backbone, messages: list[Message], answer: Answer) -> dict[str, object]:
    said = {"role": "assistant", "content": backbone.decode(answer.tokens)}
    ids = {"prompt_ids": list(answer.prompt), "answer_ids": answer.tokens}
    return {"messages": [*messages, said], **ids}


def read_distilled(path: Path) -> tuple[dict[str, object], list[Distilled]]:
    """Return the conditions and the rows of a file that ``distill`` wrote."""
    lines = read_text(path, DataError).splitlines()
    try:
        conditions = json.loads(lines[0])["distilled"]
        rows = [json.loads(line) for line in lines[1:]]
        return conditions, [Distilled(row["prompt_ids"], row["answer_ids"]) for row in rows]
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} was not written by `treeopt distill`: {error!r}") from error


def template_sha256(backbone: Backbone) -> str:
    """Return a digest of the chat template, which decides what a prompt looks like to the model."""
    return hashlib.sha256((backbone.tokenizer.chat_template or "").encode()).hexdigest()


def _resume(out: Path, conditions: dict[str, object]) -> set[tuple[int, ...]]:
    """Return the prompts that ``out`` answers; make or mend the file so that appending is safe."""
    header = json.dumps({"distilled": conditions}) + "\n"
    if not out.exists():
        write_text(out, header)
        return set()
    text = read_text(out, DataError)
    whole = text[: text.rfind("\n") + 1]
    if not whole.startswith(header):
        raise DataError(f"{out} was made under other conditions; this run has {conditions}")
    if whole != text:
        write_text(out, whole)
    return {tuple(json.loads(line)["prompt_ids"]) for line in whole.splitlines()[1:]}
