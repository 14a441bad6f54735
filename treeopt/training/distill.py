"""Self-distillation: the backbone's own answers, the text that heads learn from.

Prompts come from a file, or the backbone invents them: after the start of a user's turn it goes on
as its users did in its training text (Magpie, arXiv 2406.08464).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from treeopt.decoder.plain import Answer, answer_batch, greedy, like_length, room_for
from treeopt.decoder.rules import Greedy, Sampling, draw, section_of, target_probs
from treeopt.decoder.tree import TreeDecoder
from treeopt.errors import DataError
from treeopt.files import read_text, write_text
from treeopt.models.backbone import Backbone, Message
from treeopt.models.heads import MedusaHeads
from treeopt.tree import Tree

_WINDOW = 16  # batches sorted by length together; small, so that a prefix of the file is a fair mix
_INVENTING = Sampling(top_p=0.95)
_LONGEST_INVENTED = 192
_PLACE = "\x1fPLACE\x1f"  # no template changes or holds this


@dataclass(frozen=True)
class Distilled:
    """One prompt and the backbone's answer, as token ids; ``answer`` includes the end token."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Recipe:
    """How answers are made.

    max_new_tokens: of an answer, the end token included.
    samples: answers to each prompt; more than one only where ``rule`` samples.
    seed: of what is drawn. A run that was stopped goes on with other numbers, never with the same.
    drafts: heads and a tree to decode with. Lossless, so no condition of the text; it pays where
        rows are few, while large batches keep a machine busy without.
    """

    max_new_tokens: int
    batch_size: int
    rule: Greedy | Sampling = Greedy()
    samples: int = 1
    seed: int = 0
    drafts: tuple[MedusaHeads, Tree] | None = None

    def __post_init__(self) -> None:
        if self.samples > 1 and isinstance(self.rule, Greedy):
            raise DataError(
                f"{self.samples} greedy answers to a prompt would be the same; sampling needs a "
                "temperature above 0"
            )


OnAnswers = Callable[[int, int], None]
"""Called with the numbers of new answers and new tokens."""

Choose = Callable[[Tensor], Tensor]
"""Returns a token of each row of logits [B, V]: int64 [B]."""


def distill(
    backbone: Backbone,
    conversations: Sequence[list[Message]],
    out: Path,
    recipe: Recipe,
    on_answers: OnAnswers = lambda answers, tokens: None,
) -> None:
    """Append the backbone's answers to every conversation to the JSONL file ``out``.

    Resumable: what ``out`` answers already is skipped, and a line cut short by a kill is dropped. A
    file made by another backbone, template or recipe is refused.

    Raises:
        DataError: ``out`` exists and was made under other conditions, or a prompt does not fit.
    """
    answered = _resume(out, _conditions(backbone, recipe))
    generator = _generator(recipe, answered)
    distinct = {tuple(backbone.encode(messages)): messages for messages in conversations}
    for ids in distinct:
        room_for(backbone, ids, recipe.max_new_tokens)
    todo = [ids for ids in distinct for _ in range(recipe.samples - answered[ids])]
    size = _WINDOW * recipe.batch_size
    windows = (todo[first : first + size] for first in range(0, len(todo), size))
    _answer(backbone, windows, distinct, out, recipe, generator, on_answers)


def distill_invented(
    backbone: Backbone,
    num_prompts: int,
    out: Path,
    recipe: Recipe,
    on_answers: OnAnswers = lambda answers, tokens: None,
) -> None:
    """Append prompts of the backbone's own invention and its answers.

    Stops when ``out`` answers ``num_prompts`` prompts, those that ``distill`` put there included;
    resumable like it.

    Raises:
        DataError: as ``distill``, or there is no chat template that shows where a user speaks.
    """
    answered = _resume(out, _conditions(backbone, recipe))
    generator = _generator(
        recipe, answered
    )  # for both: one seed twice would tie answers to prompts
    start = _user_turn(backbone)
    known: dict[tuple[int, ...], list[Message]] = {}

    def windows() -> Iterator[list[tuple[int, ...]]]:
        todo = [ids for ids, count in answered.items() for _ in range(recipe.samples - count)]
        if todo:
            known.update(_messages_in(out))
            yield todo
        while (missing := num_prompts - len(answered)) > 0:
            window: list[tuple[int, ...]] = []
            for _ in range(_WINDOW):
                number = min(missing - len(window), recipe.batch_size)
                for text in _invent(backbone, start, number, generator):
                    messages = [{"role": "user", "content": text}]
                    ids = tuple(backbone.encode(messages))
                    if ids not in answered and _fits(backbone, ids):
                        answered[ids] = recipe.samples
                        known[ids] = messages
                        window.append(ids)
                if len(window) == missing:
                    break
            if not window:
                raise DataError(
                    f"{backbone.id} ended no new user's turn within {_LONGEST_INVENTED} tokens in "
                    f"{_WINDOW * number} trials; it cannot invent prompts"
                )
            yield [ids for ids in window for _ in range(recipe.samples)]

    _answer(backbone, windows(), known, out, recipe, generator, on_answers)


def _answer(
    backbone: Backbone,
    windows: Iterable[list[tuple[int, ...]]],
    known: dict[tuple[int, ...], list[Message]],
    out: Path,
    recipe: Recipe,
    generator: torch.Generator,
    on_answers: OnAnswers,
) -> None:
    """Answer ``windows`` of prompts, whose messages are ``known`` by then."""
    answers = _answers_by_tree if recipe.drafts else _answers
    with out.open("a", encoding="utf-8") as file:
        for window in windows:
            for ended in answers(backbone, window, recipe, generator):
                for answer in ended:
                    messages = known[tuple(answer.prompt)]
                    file.write(json.dumps(_row(backbone, messages, answer)) + "\n")
                if ended:
                    file.flush()
                    on_answers(len(ended), sum(len(answer.tokens) for answer in ended))


def _answers(
    backbone: Backbone, prompts: list[tuple[int, ...]], recipe: Recipe, generator: torch.Generator
) -> Iterator[list[Answer]]:
    choose = _chooser(recipe.rule, generator)
    for batch in like_length(prompts, recipe.batch_size):
        together = [prompts[index] for index in batch]
        yield from answer_batch(backbone, together, recipe.max_new_tokens, choose)


def _answers_by_tree(
    backbone: Backbone, prompts: list[tuple[int, ...]], recipe: Recipe, generator: torch.Generator
) -> Iterator[list[Answer]]:
    assert recipe.drafts
    seed = int(torch.randint(1 << 31, (), generator=generator))
    decoder = TreeDecoder(backbone, *recipe.drafts, recipe.rule, seed)
    answers = [Answer(prompt) for prompt in prompts]
    for emitted in decoder.decode_many(prompts, recipe.max_new_tokens, recipe.batch_size):
        if emitted.error:
            raise emitted.error
        answer = answers[emitted.prompt]
        answer.tokens += emitted.tokens
        yield [answer] if emitted.ended else []


def _generator(recipe: Recipe, answered: Counter[tuple[int, ...]]) -> torch.Generator:
    return torch.Generator().manual_seed(recipe.seed + answered.total())


def _chooser(rule: Greedy | Sampling, generator: torch.Generator) -> Choose:
    if isinstance(rule, Greedy):
        return greedy

    def choose(logits: Tensor) -> Tensor:
        uniforms = torch.rand(len(logits), generator=generator).to(logits.device)
        return draw(target_probs(logits, rule.temperature, rule.top_p, rule.top_k), uniforms)

    return choose


def _invent(
    backbone: Backbone, start: list[int], number: int, generator: torch.Generator
) -> Iterator[str]:
    """Yield at most ``number`` user turns that the backbone began and ended by itself."""
    choose = _chooser(_INVENTING, generator)
    for ended in answer_batch(backbone, [start] * number, _LONGEST_INVENTED, choose):
        for turn in ended:
            if turn.tokens[-1] in backbone.eos_ids and (text := backbone.decode(turn.tokens)):
                yield text.strip()


def _user_turn(backbone: Backbone) -> list[int]:
    """Return the tokens up to where the user speaks first."""
    if not backbone.tokenizer.chat_template:
        raise DataError(f"{backbone.id} has no chat template, so it cannot invent a user's turn")
    text = backbone.tokenizer.apply_chat_template(
        [{"role": "user", "content": _PLACE}], tokenize=False
    )
    before, place, _ = text.partition(_PLACE)
    ids = backbone.tokenizer(before, add_special_tokens=False)["input_ids"]
    if not place or not ids:
        raise DataError(f"the chat template of {backbone.id} does not mark where a user speaks")
    return ids


def _fits(backbone: Backbone, ids: Sequence[int]) -> bool:
    try:
        return room_for(backbone, ids, 2) == 2
    except DataError:
        return False


def _conditions(backbone: Backbone, recipe: Recipe) -> dict[str, object]:
    return {
        "backbone": backbone.id,
        "backbone_sha256": backbone.sha256,
        "template_sha256": template_sha256(backbone),
        "decoding": section_of(recipe.rule),
        "max_new_tokens": recipe.max_new_tokens,
    }


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


def _resume(out: Path, conditions: dict[str, object]) -> Counter[tuple[int, ...]]:
    """Return how often ``out`` answers its prompts; make or mend the file to be appended to."""
    header = json.dumps({"distilled": conditions}) + "\n"
    if not out.exists():
        write_text(out, header)
        return Counter()
    text = read_text(out, DataError)
    whole = text[: text.rfind("\n") + 1]
    if not whole.startswith(header):
        raise DataError(f"{out} was made under other conditions; this run has {conditions}")
    if whole != text:
        write_text(out, whole)
    return Counter(tuple(json.loads(line)["prompt_ids"]) for line in whole.splitlines()[1:])


def _messages_in(out: Path) -> dict[tuple[int, ...], list[Message]]:
    rows = [json.loads(line) for line in read_text(out, DataError).splitlines()[1:]]
    return {tuple(row["prompt_ids"]): row["messages"][:-1] for row in rows}
